// Fetches the state of the fleet once a second while the page is visible, and draws it.

import { ask, heldKey, holdKey, Refused } from "./api.js";
import { byId, keyed, setText, show } from "./dom.js";
import { startDrains } from "./drain.js";
import { drawFigures, drawFlow } from "./flow.js";
import { clockTime } from "./format.js";
import { drawHistory } from "./history.js";
import { drawMisses } from "./misses.js";
import { offerModels, startPlayground } from "./playground.js";
import { Rates } from "./rates.js";
import { drawRequests } from "./requests.js";
import { drawWorkers, forgetGone } from "./workers.js";

const POLL_MS = 1_000;
const HISTORY_MS = 5_000;
const REQUESTS_SHOWN = 40;
const ALL = "all models";

const rates = new Rates();
let answeredAt_s = null; // Unix time of the last answer
let history = null; // as the server returned it last
let historyAt_ms = -Infinity;
let next = null; // the timer of the next request, null while one is running
let looking = false;

function draw({ models, frontend, workers }, requests) {
  const names = models.map((model) => model.id);
  const several = names.length > 1;
  keyed(byId("view"), [ALL, ...names], (name) => name, (name) => new Option(name, name), () => {});
  show(byId("view-choice"), several);
  const view = several ? byId("view").value : ALL;
  const isShown = (one) => view === ALL || one.model === view;
  const longest = models.map((model) => `${model.id}, up to ${model.max_model_len.toLocaleString("en-US")} tokens`);
  setText(byId("server"), `${several ? `${names.length} models` : longest[0]}; version ${frontend.version}`);
  offerModels(names);
  const now_ms = performance.now();
  rates.see(workers, now_ms);
  const shown = workers.filter(isShown);
  const asked = requests.filter(isShown);
  drawFigures(shown, asked, rates);
  drawFlow(shown, rates);
  drawWorkers(shown, rates, { now_ms, severalModels: several });
  drawRequests(asked, several);
  drawMisses(asked);
}

// Fetches the history when the last one is old.
async function refreshHistory() {
  if (performance.now() - historyAt_ms < HISTORY_MS) return;
  history = await ask("cluster/history");
  historyAt_ms = performance.now();
}

async function refresh() {
  if (looking) return;
  clearTimeout(next);
  looking = true;
  try {
    const [fleet, { requests }] = await Promise.all([
      ask("cluster"),
      ask(`cluster/requests?limit=${REQUESTS_SHOWN}`),
      refreshHistory(),
    ]);
    showParts({ fleet: true });
    draw(fleet, requests);
    drawHistory(history, byId("view").value === ALL ? "" : byId("view").value);
    showAnswered(`live, ${fleet.workers.length === 1 ? "1 worker" : `${fleet.workers.length} workers`}`);
  } catch (error) {
    await failed(error);
  } finally {
    looking = false;
    if (!document.hidden) next = setTimeout(refresh, POLL_MS);
  }
}

function showAnswered(text) {
  answeredAt_s = Date.now() / 1000;
  document.body.classList.remove("stale");
  setText(byId("connection"), text);
}

async function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    document.body.classList.add("stale");
    setText(byId("connection"), heldKey() ? "the key is not known here" : "needs a key");
    showParts({ key: true });
  } else if (error instanceof Refused && error.status === 403) {
    await loadModels();
  } else {
    const since = answeredAt_s === null ? "" : ` since ${clockTime(answeredAt_s)}`;
    const what = error instanceof Refused ? error.message : `no answer from the server${since}`;
    document.body.classList.add("stale");
    setText(byId("connection"), `${what}; asking again`);
  }
}

// Loads the models and shows the parts for callers who are not operators.
async function loadModels() {
  try {
    const { data } = await ask("v1/models");
    offerModels(data.map((model) => model.id));
    showAnswered("live");
    showParts({ noOperator: true });
  } catch (error) {
    setText(byId("connection"), error.message);
  }
}

function showParts({ fleet = false, key = false, noOperator = false }) {
  show(byId("fleet"), fleet);
  show(byId("requests-part"), fleet);
  show(byId("playground"), !key);
  show(byId("key-form"), key);
  show(byId("no-operator"), noOperator);
  show(byId("forget-key"), Boolean(heldKey()) && !key);
}

function useKey(key) {
  holdKey(key);
  forgetGone();
  refresh();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
});
byId("forget-key").addEventListener("click", () => useKey(null));
byId("view").addEventListener("change", () => {
  forgetGone();
  refresh();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(next);
  else refresh();
});
startPlayground();
startDrains();
refresh();
