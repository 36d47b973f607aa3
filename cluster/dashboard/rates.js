// The rates of workers' counters over the last few seconds.

const WINDOW_MS = 5_000;

export class Rates {
  #samples = new Map(); // by the id of a worker's incarnation, whose counters start at zero

  see(workers, now_ms) {
    const alive = new Set(workers.map((worker) => worker.info.worker));
    for (const id of this.#samples.keys()) if (!alive.has(id)) this.#samples.delete(id);
    for (const worker of workers) {
      const samples = this.#samples.get(worker.info.worker) ?? [];
      samples.push({ at_ms: now_ms, counters: worker.load.counters });
      while (samples.length > 2 && now_ms - samples[1].at_ms >= WINDOW_MS) samples.shift();
      this.#samples.set(worker.info.worker, samples);
    }
  }

  // Returns the rate per second; 0 without an earlier sample.
  of(worker, counter) {
    const samples = this.#samples.get(worker.info.worker) ?? [];
    if (samples.length < 2) return 0;
    const first = samples[0];
    const last = samples[samples.length - 1];
    const grown = (last.counters[counter] ?? 0) - (first.counters[counter] ?? 0);
    return Math.max(0, grown / ((last.at_ms - first.at_ms) / 1000));
  }

  ofAll(workers, counter) {
    return workers.reduce((sum, worker) => sum + this.of(worker, counter), 0);
  }
}
