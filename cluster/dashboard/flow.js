// The figures of the whole fleet, and the drawing of the flow of its pages.

import { byId, setText } from "./dom.js";
import { bytes, count, percent, threeDigits } from "./format.js";

const WAYS = {
  "flow-prefill-put": { of: "prefills", counter: "store_put_bytes", verb: "published" },
  "flow-prefill-get": { of: "prefills", counter: "store_get_bytes", verb: "fetched" },
  "flow-decode-get": { of: "decodes", counter: "store_get_bytes", verb: "fetched" },
  "flow-decode-put": { of: "decodes", counter: "store_put_bytes", verb: "published" },
};

export function drawFigures(workers, requests, rates) {
  const sum = (read) => workers.reduce((total, worker) => total + read(worker.load), 0);
  setText(byId("figure-running"), count(sum((load) => load.running_rows)));
  setText(byId("figure-waiting"), count(sum((load) => load.waiting_rows)));
  setText(byId("figure-queued"), count(sum((load) => load.queued_tokens)));
  setText(byId("figure-computed"), threeDigits(rates.ofAll(workers, "computed_tokens")));
  setText(byId("figure-generated"), threeDigits(rates.ofAll(workers, "generated_tokens")));
  setText(byId("figure-hits"), percent(hitRate(requests)));
}

// Returns the share of prompt tokens of placed requests that no worker had to compute; null without requests.
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
  const parts = [];
  for (const [id, { of, counter, verb }] of Object.entries(WAYS)) {
    const speed = rates.ofAll(sides[of], counter);
    byId(id).classList.toggle("flows", speed > 0);
    byId(id).style.strokeWidth = String(speed > 0 ? Math.min(6, 1.5 + Math.log10(1 + speed / 1024)) : 1);
    const text = `${verb} ${bytes(speed)}/s`;
    setText(byId(`${id}-text`), speed > 0 ? `${bytes(speed)}/s` : verb);
    parts.push(`${of === "prefills" ? "prefill" : "decode"} workers ${text}`);
  }
  const { prefills, decodes } = sides;
  const mixed = decodes.filter((worker) => worker.info.role === "mixed").length;
  setText(byId("flow-decode-name"), mixed === 0 ? "decode" : mixed === decodes.length ? "mixed" : "decode, mixed");
  for (const [side, ids] of [[prefills, "flow-prefill"], [decodes, "flow-decode"]]) {
    byId(ids).classList.toggle("absent", side.length === 0);
    setText(byId(`${ids}-count`), side.length === 1 ? "1 worker" : `${side.length} workers`);
  }
  setText(byId("flow-prefill-speed"), `${threeDigits(rates.ofAll(prefills, "computed_tokens"))} tok/s`);
  setText(byId("flow-decode-speed"), `${threeDigits(rates.ofAll(decodes, "generated_tokens"))} tok/s`);
  const down = workers.filter((worker) => worker.load.counters.store_is_down).length;
  byId("flow-store").classList.toggle("down", down > 0);
  setText(byId("flow-store-state"), down > 0 ? `down for ${down}` : "up");
  setText(byId("flow-text"), parts.join(", "));
}
