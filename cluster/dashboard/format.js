// Formats numbers with units and few digits.

export const NONE = "–";

const COUNT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function count(number) {
  return number === null || number === undefined ? NONE : COUNT.format(number);
}

export function threeDigits(number) {
  if (number === null || number === undefined) return NONE;
  if (number === 0 || number >= 99.95) return COUNT.format(number);
  return number.toFixed(number >= 9.995 ? 1 : 2);
}

export function bytes(numBytes) {
  let unit = 0;
  let left = numBytes;
  while (left >= 1000 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? COUNT.format(left) : threeDigits(left)} ${UNITS[unit]}`;
}

export function seconds(time_s) {
  if (time_s === null || time_s === undefined) return NONE;
  return time_s < 1 ? `${COUNT.format(time_s * 1000)} ms` : `${threeDigits(time_s)} s`;
}

export function percent(share) {
  return share === null ? NONE : `${COUNT.format(share * 100)} %`;
}

export function clockTime(unix_s) {
  return new Date(unix_s * 1000).toLocaleTimeString("en-GB");
}

// `decode-0.3f9a1c` is one incarnation of the worker decode-0.
export function nameOf(worker) {
  const end = worker.lastIndexOf(".");
  return end < 0 ? worker : worker.slice(0, end);
}
