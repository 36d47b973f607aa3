// The parts of the time to first token of a request.

import { byId, keyed, make, setText, show } from "./dom.js";
import { seconds } from "./format.js";

const PARTS = [
  ["prefill_times", "waited_s", "prefill: waited", "free"],
  ["prefill_times", "fetched_s", "prefill: fetched", "pages-cached"],
  ["prefill_times", "computed_s", "prefill: computed", "pages-live"],
  ["prefill_times", "stored_s", "prefill: stored", "states-cached"],
  ["decode_times", "waited_s", "decode: waited", "free"],
  ["decode_times", "fetched_s", "decode: fetched", "pages-cached"],
  ["decode_times", "computed_s", "decode: computed", "states-live"],
];

// `row` is null if the caller may not see it.
export function drawWaterfall(row) {
  const parts = row?.ttft_s ? partsOf(row) : [];
  show(byId("waterfall-part"), parts.length > 0);
  keyed(byId("waterfall"), parts, keyOf, newSegment, (segment, { time_s }) => {
    segment.style.flexGrow = String(time_s / row.ttft_s);
  });
  keyed(byId("waterfall-times"), parts, keyOf, newTime, (pair, { time_s }) => setText(pair.lastElementChild, seconds(time_s)));
  const texts = parts.map(({ label, time_s }) => `${label} ${seconds(time_s)}`);
  byId("waterfall").setAttribute("aria-label", texts.join(", "));
}

function partsOf(row) {
  const parts = PARTS.map(([worker, time, label, color]) => ({ label, color, time_s: row[worker]?.[time] ?? 0 }));
  const known_s = parts.reduce((sum, { time_s }) => sum + time_s, 0);
  parts.push({ label: "routing, ways", color: "empty", time_s: Math.max(0, row.ttft_s - known_s) });
  return parts.filter(({ time_s }) => time_s > 0);
}

function keyOf({ label }) {
  return label;
}

function newSegment({ color }) {
  return make("span", "", color);
}

function newTime({ label, color }) {
  const pair = make("div", "", color);
  pair.append(make("dt", label), make("dd", ""));
  return pair;
}
