// The table of recent requests and their routes.

import { byId, copyOf, fill, keyed, part, show } from "./dom.js";
import { clockTime, count, nameOf, seconds, threeDigits } from "./format.js";
import { words } from "./misses.js";

export function pathOf(request) {
  if (request.decode === null) return request.finish === null ? "no token yet" : "no token";
  const names = [request.prefill, request.decode].filter((worker) => worker !== null).map(nameOf);
  const again = request.attempts > 1 ? ` (attempt ${request.attempts})` : "";
  return names.join(" → ") + again;
}

export function drawRequests(requests, severalModels) {
  show(byId("no-requests"), requests.length === 0);
  show(byId("requests-table"), requests.length > 0);
  keyed(
    byId("requests"),
    requests,
    (request) => request.id,
    () => copyOf("request-row"),
    (row, request) => drawRow(row, request, severalModels),
  );
}

function drawRow(row, request, severalModels) {
  const from = request.prompt_tokens_details;
  const end = request.finish === "error" ? request.error : (request.finish ?? "running");
  row.dataset.end = request.finish ?? "running";
  fill(row, {
    at: clockTime(request.started_unix_s),
    path: pathOf(request),
    id: severalModels ? `${request.model} ${request.request_id}` : request.request_id,
    prompt: count(request.prompt_tokens),
    prefilled: count(from.prefilled_tokens),
    fetched: count(from.fetched_tokens),
    reused: count(from.reused_tokens),
    replayed: count(from.replayed_tokens),
    cache: words(request.cache_reason),
    answer: count(request.completion_tokens),
    ttft: seconds(request.ttft_s),
    speed: threeDigits(request.tokens_per_s),
    end,
  });
  part(row, "id").title = request.request_id;
}
