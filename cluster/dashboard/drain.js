// Takes a worker out of service, or back into it, after a person has said so twice.

import { ask, Refused } from "./api.js";
import { byId, say, show } from "./dom.js";

const LAST = "last_of_its_kind";

let asked = null; // the worker that the dialog is about

export function askToDrain(worker, drain) {
  asked = { worker, drain, force: false };
  say(byId("drain-title"), drain ? `Drain ${worker}?` : `Take ${worker} back?`);
  say(
    byId("drain-text"),
    drain
      ? "It takes no more work and hands over what it has; its streams go on elsewhere."
      : "It takes work again.",
  );
  say(byId("drain-go"), drain ? "Drain" : "Undrain");
  show(byId("drain-error"), false);
  byId("drain").showModal();
  byId("drain-cancel").focus();
}

async function go() {
  const button = byId("drain-go");
  button.disabled = true;
  try {
    const { worker, drain, force } = asked;
    await ask(`cluster/workers/${encodeURIComponent(worker)}/drain`, { drain, force });
    byId("drain").close();
  } catch (error) {
    say(byId("drain-error"), error.message);
    show(byId("drain-error"), true);
    if (error instanceof Refused && error.code === LAST) {
      asked.force = true;
      say(button, "Drain anyway");
    }
  } finally {
    button.disabled = false;
  }
}

export function startDrains() {
  byId("drain-go").addEventListener("click", go);
  byId("drain-cancel").addEventListener("click", () => byId("drain").close());
}
