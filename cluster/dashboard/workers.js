// A card for each worker with its role, load and memory.

import { byId, copyOf, fill, keyed, part, show } from "./dom.js";
import { askToDrain } from "./drain.js";
import { bytes, count, seconds, threeDigits } from "./format.js";

const CLASSES = [
  "pages_live",
  "pages_cached",
  "states_live",
  "states_cached",
  "windows_live",
  "windows_cached",
  "checkpoints_live",
  "checkpoints_cached",
  "free",
  "empty",
  "unmapped",
];
const SET_BY = {
  operator: "budget by a person",
  broker: "budget by the broker",
  share: "budget as it was started with",
};
const GONE_SHOWN_MS = 60_000;

const lastSeen = new Map(); // by name: the last state of the worker and its time

export function drawWorkers(workers, rates, { now_ms, severalModels }) {
  for (const worker of workers) lastSeen.set(worker.info.name, { worker, at_ms: now_ms });
  const shown = workers.map((worker) => ({ worker, gone_ms: null }));
  const alive = new Set(workers.map((worker) => worker.info.name));
  for (const [name, { worker, at_ms }] of lastSeen) {
    if (alive.has(name)) continue;
    if (now_ms - at_ms > GONE_SHOWN_MS) lastSeen.delete(name);
    else shown.push({ worker, gone_ms: now_ms - at_ms });
  }
  shown.sort((one, other) => one.worker.info.name.localeCompare(other.worker.info.name, "en", { numeric: true }));
  show(byId("no-workers"), shown.length === 0);
  keyed(
    byId("workers"),
    shown,
    ({ worker }) => worker.info.name,
    newCard,
    (card, one) => drawCard(card, one, rates, severalModels),
  );
}

// The choice of models changed, so workers of other models have not gone.
export function forgetGone() {
  lastSeen.clear();
}

function newCard({ worker }) {
  const card = copyOf("worker-card");
  const button = part(card, "drain");
  button.addEventListener("click", () => askToDrain(worker.info.name, card.dataset.state !== "draining"));
  return card;
}

function drawCard(card, { worker, gone_ms }, rates, severalModels) {
  const { info, load } = worker;
  const state = gone_ms === null ? worker.state : "gone";
  card.dataset.state = state;
  const ranks = info.tensor_parallel_size;
  fill(card, {
    name: info.name,
    role: ranks > 1 ? `${info.role}, TP ${ranks}` : info.role,
    model: severalModels ? worker.model : "",
    state: gone_ms === null ? `${state}, heartbeat ${worker.heard_ago_s.toFixed(1)} s ago` : `gone for ${seconds(gone_ms / 1000)}`,
    drain: state === "draining" ? "Undrain" : "Drain",
    running: count(load.running_rows),
    waiting: count(load.waiting_rows),
    queued: count(load.queued_tokens),
    computed: threeDigits(rates.of(worker, "computed_tokens")),
    generated: threeDigits(rates.of(worker, "generated_tokens")),
    published: bytes(rates.of(worker, "store_put_bytes")),
    fetched: bytes(rates.of(worker, "store_get_bytes")),
    depths: count(worker.restorable_depths),
    where: `${info.device || info.node}, pid ${info.pid}, ${info.address}`,
  });
  const button = part(card, "drain");
  button.disabled = state === "gone";
  button.setAttribute("aria-label", `${button.textContent} ${info.name}`);
  drawMemory(card, worker);
}

function drawMemory(card, { load, set_by: setBy, set_bytes: setBytes }) {
  const memory = { checkpoints_live: 0, checkpoints_cached: 0, ...load.memory };
  const held = CLASSES.reduce((sum, name) => sum + memory[name], 0);
  const scale = Math.max(held, load.budget_bytes, setBytes, 1);
  const bar = part(card, "bar");
  CLASSES.forEach((name, index) => {
    bar.children[index].style.flexGrow = String(memory[name] / scale);
    bar.children[index].hidden = memory[name] === 0;
  });
  const target = setBytes || load.budget_bytes;
  part(card, "mark").style.insetInlineStart = `${(100 * target) / scale}%`;
  const texts = Object.fromEntries(CLASSES.map((name) => [name, bytes(memory[name])]));
  fill(card, {
    ...texts,
    budget: bytes(load.budget_bytes),
    set_by: `${SET_BY[setBy] ?? ""}${target === load.budget_bytes ? "" : `, on its way to ${bytes(target)}`}`,
  });
  bar.setAttribute(
    "aria-label",
    `memory: ${CLASSES.map((name) => `${name.replace("_", " ")} ${texts[name]}`).join(", ")}`,
  );
}
