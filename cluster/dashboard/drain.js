// Drains a worker, or undoes that, after a confirmation by the user.

import { ask, Refused } from "./api.js";
import { byId, setText, show } from "./dom.js";

const LAST = "last_of_its_kind";

let selected = null; // the worker of the dialog

export function askToDrain(worker, drain) {
  selected = { worker, drain, force: false };
  setText(byId("drain-title"), drain ? `Drain ${worker}?` : `Take ${worker} back?`);
  setText(
    byId("drain-text"),
    drain
      ? "It takes no more work and hands over what it has; its streams go on elsewhere."
      : "It takes work again.",
  );
  setText(byId("drain-go"), drain ? "Drain" : "Undrain");
  show(byId("drain-error"), false);
  byId("drain").showModal();
  byId("drain-cancel").focus();
}

async function go() {
  const button = byId("drain-go");
  button.disabled = true;
  try {
    const { worker, drain, force } = selected;
    await ask(`cluster/workers/${encodeURIComponent(worker)}/drain`, { drain, force });
    byId("drain").close();
  } catch (error) {
    setText(byId("drain-error"), error.message);
    show(byId("drain-error"), true);
    if (error instanceof Refused && error.code === LAST) {
      selected.force = true;
      setText(button, "Drain anyway");
    }
  } finally {
    button.disabled = false;
  }
}

export function startDrains() {
  byId("drain-go").addEventListener("click", go);
  byId("drain-cancel").addEventListener("click", () => byId("drain").close());
}
