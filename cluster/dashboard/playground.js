// Sends a prompt, streams the tokens, and then shows the route of the request.

import { ask, events, Refused, send } from "./api.js";
import { byId, describe, keyed, make, setText, show } from "./dom.js";
import { count, nameOf, seconds, threeDigits } from "./format.js";
import { drawWaterfall } from "./waterfall.js";

const REQUESTS_LOOKED_AT = 200;

let stop = null; // the AbortController of the current answer

export function startPlayground() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (stop === null) run();
  });
  byId("ask-prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("ask-stop").addEventListener("click", () => stop?.abort());
}

export function offerModels(names) {
  keyed(byId("ask-model"), names, (name) => name, (name) => new Option(name, name), () => {});
}

async function run() {
  stop = new AbortController();
  const progress = { started_ms: performance.now(), first_ms: null, usage: null, requestId: null };
  begin();
  try {
    await answer(progress);
    await showRoute(progress);
  } finally {
    stop = null;
    end();
  }
}

async function answer(progress) {
  try {
    const { path, body } = asked();
    const response = await send(path, { body, signal: stop.signal });
    progress.requestId = response.headers.get("x-request-id");
    await (body.stream ? readStream(response, progress) : readWhole(response, progress));
  } catch (error) {
    if (error.name === "AbortError") showError("Stopped.");
    else showError(error instanceof Refused ? `${error.status}: ${error.message}` : error.message);
  }
}

function begin() {
  byId("answer").replaceChildren();
  byId("answer").setAttribute("aria-busy", "true");
  byId("route").replaceChildren();
  byId("answer-figures").replaceChildren();
  drawWaterfall(null);
  show(byId("answer-error"), false);
  byId("ask-stop").disabled = false;
  byId("ask-send").disabled = true;
}

function end() {
  byId("answer").setAttribute("aria-busy", "false");
  byId("ask-stop").disabled = true;
  byId("ask-send").disabled = false;
}

function showError(text) {
  setText(byId("answer-error"), text);
  show(byId("answer-error"), true);
}

function asked() {
  const prompt = byId("ask-prompt").value;
  const isChat = new FormData(byId("ask")).get("kind") === "chat";
  const stream = byId("ask-stream").checked;
  const body = {
    model: byId("ask-model").value,
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    ...numbers({ max_tokens: "ask-max-tokens", temperature: "ask-temperature", top_p: "ask-top-p", seed: "ask-seed" }),
    stream,
    ...(stream ? { stream_options: { include_usage: true } } : {}),
  };
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
}

// Returns the sampling parameters that the user filled in.
function numbers(fields) {
  const given = Object.entries(fields).filter(([, id]) => byId(id).value !== "");
  return Object.fromEntries(given.map(([name, id]) => [name, byId(id).valueAsNumber]));
}

async function readStream(response, progress) {
  for await (const { name, data } of events(response)) {
    if (name === "error") throw new Error(data.error?.message ?? "the stream broke");
    if (data.usage) progress.usage = data.usage;
    for (const choice of data.choices ?? []) {
      write(choice.delta ?? choice, progress);
      if (choice.finish_reason) progress.finish = choice.finish_reason;
    }
  }
}

async function readWhole(response, progress) {
  const { choices, usage } = await response.json();
  progress.usage = usage;
  progress.finish = choices[0].finish_reason;
  write(choices[0].message ?? choices[0], progress);
}

function write({ content, reasoning_content: reasoning, text }, progress) {
  const words = text ?? content;
  if (!reasoning && !words) return;
  progress.first_ms ??= performance.now();
  if (reasoning) append(reasoning, "reasoning");
  if (words) append(words, "words");
}

function append(text, kind) {
  const answer = byId("answer");
  const last = answer.lastElementChild;
  if (last?.className === kind) last.firstChild.appendData(text);
  else answer.append(make("span", text, kind));
  answer.scrollTop = answer.scrollHeight;
}

async function showRoute(progress) {
  const row = await rowOf(progress.requestId);
  const usage = row ?? progress.usage;
  if (!usage) return;
  const from = usage.prompt_tokens_details;
  const steps = [];
  if (row?.prefill) {
    steps.push(`${nameOf(row.prefill)} computed ${count(from.prefilled_tokens)} tokens of the prompt and published up to ${count(row.prefill_depth)}`);
  } else if (from.prefilled_tokens) {
    steps.push(`a prefill worker computed ${count(from.prefilled_tokens)} tokens of the prompt`);
  } else {
    steps.push("no prefill worker was needed");
  }
  const decode = row?.decode ? nameOf(row.decode) : "the decode worker";
  steps.push(`${decode} had ${count(from.reused_tokens)}, fetched ${count(from.fetched_tokens)} from the store and computed ${count(from.replayed_tokens)} itself`);
  steps.push(`${decode} drew ${count(usage.completion_tokens)} tokens`);
  byId("route").replaceChildren(...steps.map((step) => make("li", step)));
  describe(byId("answer-figures"), figuresOf(progress, row, usage));
  drawWaterfall(row);
}

function figuresOf(progress, row, usage) {
  const ttft_s = row?.ttft_s ?? (progress.first_ms === null ? null : (progress.first_ms - progress.started_ms) / 1000);
  return [
    ["prompt", count(usage.prompt_tokens)],
    ["not computed", count(usage.prompt_tokens_details.cached_tokens)],
    ["answer", count(usage.completion_tokens)],
    ["TTFT", seconds(ttft_s)],
    ["tokens/s", threeDigits(row?.tokens_per_s)],
    ["end", row?.finish ?? progress.finish ?? "–"],
    ["request", progress.requestId ?? "–"],
  ];
}

// Returns the server's record of this request, if the key may see it.
async function rowOf(requestId) {
  if (!requestId) return null;
  try {
    const { requests } = await ask(`cluster/requests?limit=${REQUESTS_LOOKED_AT}`);
    return requests.find((row) => row.request_id === requestId) ?? null;
  } catch {
    return null;
  }
}
