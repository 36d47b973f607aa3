// The figures of the whole fleet, and the drawing of where its pages flow.

import { byId, say } from "./dom.js";
import { bytes, count, percent, threeDigits } from "./format.js";

const WAYS = {
  "flow-prefill-put": { of: "prefills", counter: "store_put_bytes", verb: "published" },
  "flow-prefill-get": { of: "prefills", counter: "store_get_bytes", verb: "fetched" },
  "flow-decode-get": { of: "decodes", counter: "store_get_bytes", verb: "fetched" },
  "flow-decode-put": { of: "decodes", counter: "store_put_bytes", verb: "published" },
};

export function drawFigures(workers, requests, rates) {
  const sum = (read) => workers.reduce((total, worker) => total + read(worker.load), 0);
  say(byId("figure-running"), count(sum((load) => load.running_rows)));
  say(byId("figure-waiting"), count(sum((load) => load.waiting_rows)));
  say(byId("figure-queued"), count(sum((load) => load.queued_tokens)));
  say(byId("figure-computed"), threeDigits(rates.ofAll(workers, "computed_tokens")));
  say(byId("figure-generated"), threeDigits(rates.ofAll(workers, "generated_tokens")));
  say(byId("figure-hits"), percent(hitRate(requests)));
}

// Of the prompt tokens of requests that were placed, the share that nobody had to compute; null without any.
function hitRate(requests) {
  const placed = requests.filter((request) => request.decode !== null);
  const prompts = placed.reduce((sum, request) => sum + request.prompt_tokens, 0);
  const cached = placed.reduce((sum, request) => sum + request.prompt_tokens_details.cached_tokens, 0);
  return prompts ? cached / prompts : null;
}

export function drawFlow(workers, rates) {
  const sides = {
    prefills: workers.filter((worker) => worker.info.role === "prefill"),
    decodes: workers.filter((worker) => worker.info.role !== "prefill"),
  };
  const told = [];
  for (const [id, { of, counter, verb }] of Object.entries(WAYS)) {
    const speed = rates.ofAll(sides[of], counter);
    byId(id).classList.toggle("flows", speed > 0);
    byId(id).style.strokeWidth = String(speed > 0 ? Math.min(6, 1.5 + Math.log10(1 + speed / 1024)) : 1);
    const text = `${verb} ${bytes(speed)}/s`;
    say(byId(`${id}-text`), speed > 0 ? `${bytes(speed)}/s` : verb);
    told.push(`${of === "prefills" ? "prefill" : "decode"} workers ${text}`);
  }
  const { prefills, decodes } = sides;
  const mixed = decodes.filter((worker) => worker.info.role === "mixed").length;
  say(byId("flow-decode-name"), mixed === 0 ? "decode" : mixed === decodes.length ? "mixed" : "decode, mixed");
  for (const [side, ids] of [[prefills, "flow-prefill"], [decodes, "flow-decode"]]) {
    byId(ids).classList.toggle("absent", side.length === 0);
    say(byId(`${ids}-count`), side.length === 1 ? "1 worker" : `${side.length} workers`);
  }
  say(byId("flow-prefill-speed"), `${threeDigits(rates.ofAll(prefills, "computed_tokens"))} tok/s`);
  say(byId("flow-decode-speed"), `${threeDigits(rates.ofAll(decodes, "generated_tokens"))} tok/s`);
  const down = workers.filter((worker) => worker.load.counters.store_is_down).length;
  byId("flow-store").classList.toggle("down", down > 0);
  say(byId("flow-store-state"), down > 0 ? `down for ${down}` : "up");
  say(byId("flow-text"), told.join(", "));
}
