// The table of why prompt tokens of the recent requests were computed.

import { byId, copyOf, fill, keyed, show } from "./dom.js";
import { count, seconds } from "./format.js";

export function drawMisses(requests) {
  const rows = byReason(requests);
  show(byId("misses-part"), rows.length > 0);
  keyed(
    byId("misses"),
    rows,
    ({ reason }) => reason,
    () => copyOf("miss-row"),
    (row, { reason, requests, tokens, time_s }) => {
      fill(row, { reason: words(reason), requests: count(requests.size), tokens: count(tokens), time: seconds(time_s) });
    },
  );
}

export function words(reason) {
  return reason?.replaceAll("_", " ") ?? "";
}

function byReason(requests) {
  const rows = new Map();
  for (const request of requests) {
    for (const miss of (request.cache_diagnostics ?? []).flatMap(({ misses }) => misses)) {
      const row = rows.get(miss.reason) ?? { reason: miss.reason, requests: new Set(), tokens: 0, time_s: 0 };
      row.requests.add(request.id);
      row.tokens += miss.tokens;
      row.time_s += miss.seconds;
      rows.set(miss.reason, row);
    }
  }
  return [...rows.values()].sort((one, other) => other.tokens - one.tokens);
}
