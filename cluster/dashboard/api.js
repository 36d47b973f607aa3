// Sends requests to the server, with the API key that the user entered in this tab.

const STORED_KEY = "tidemill-api-key";
const TIMEOUT_MS = 10_000;

// The reason for which the server refused a request; `status` is the HTTP status.
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

export function heldKey() {
  return sessionStorage.getItem(STORED_KEY);
}

export function holdKey(key) {
  if (key) sessionStorage.setItem(STORED_KEY, key);
  else sessionStorage.removeItem(STORED_KEY);
}

// Returns the response of a successful request. Throws Refused, or TypeError when the server is unreachable.
export async function send(path, { body, signal } = {}) {
  const headers = {};
  const key = heldKey();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new Refused(response.status, await errorOf(response));
  return response;
}

export async function ask(path, body) {
  const response = await send(path, { body, signal: AbortSignal.timeout(TIMEOUT_MS) });
  return response.json();
}

async function errorOf(response) {
  try {
    return (await response.json()).error;
  } catch {
    return null;
  }
}

// Yields the server-sent events of a response, with names and data, until [DONE] or the end.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = eventOf(block);
      if (event.data === "[DONE]") return;
      if (event.data) yield { name: event.name, data: JSON.parse(event.data) };
    }
  }
}

function eventOf(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event.name = line.slice(6).trim();
    if (line.startsWith("data:")) event.data += line.slice(5).trim();
  }
  return event;
}
