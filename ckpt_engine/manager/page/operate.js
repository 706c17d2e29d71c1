// Commands to copy, and buttons for who may retry, hold and evict.

import { ask, WAIT_MS } from "./asking.js";
import { byId, make, say, show } from "./dom.js";
import { command, named } from "./words.js";

/** A command with a button that copies it. */
export function copyable(text) {
  const code = make("code", { tabindex: "0" }, text);
  const button = make("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(code);
    say(button, copied ? "Copied" : "Press Ctrl+C");
    setTimeout(() => say(button, "Copy"), 1500);
  });
  return make("div", { class: "command" }, code, button);
}

/** Browsers have a clipboard for pages over HTTPS and of this machine only. */
async function copy(code) {
  const selection = getSelection();
  selection.selectAllChildren(code);
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    return document.execCommand("copy");
  }
}

const dialog = byId("evicting");
let evicting = null;

byId("keep").addEventListener("click", () => dialog.close());
byId("evict").addEventListener("click", () => {
  dialog.close();
  evicting?.(byId("reason").value);
});

/** What can be done about one replica: {element, update(replica, overview)}. */
export function operations() {
  const commands = make("div", { class: "commands" });
  const retry = make("button", { type: "button", class: "main" }, "Retry");
  const evict = make("button", { type: "button", class: "danger" }, "Evict…");
  const hold = make("button", { type: "button" }, "Hold");
  const buttons = make("div", { class: "line" }, retry, hold, evict);
  const told = make("p", { class: "told", role: "status" });
  const element = make("div", { class: "acts" }, buttons, commands, told);
  let name = "";
  let written = "";
  let held = false;

  async function act(what, body) {
    retry.disabled = hold.disabled = evict.disabled = true;
    try {
      const answer = await ask(`/v1/replicas/${encodeURIComponent(name)}/${what}`, body);
      say(told, answer.message || (what === "hold" ? "held" : "evicted"));
      told.className = "told good";
    } catch (error) {
      say(told, error.name === "TimeoutError" ? `${what}: no answer within ${WAIT_MS / 1000} s: look at the state`
        : `${what} was not done: ${error.message}`);
      told.className = "told bad";
    } finally {
      retry.disabled = hold.disabled = evict.disabled = false;
    }
  }

  retry.addEventListener("click", () => act("retry", {}));
  hold.addEventListener("click", () => act(held ? "release" : "hold", {}));
  evict.addEventListener("click", () => {
    say(byId("evicting-title"), `Evict ${named(name)}?`);
    byId("reason").value = "";
    evicting = (reason) => act("evict", { reason });
    dialog.showModal();
    byId("keep").focus();
  });

  function update(replica, overview) {
    name = replica.watched.name;
    const broken = replica.watched.state === "REPLICA_STATE_CLOSED" && !replica.hold;
    held = replica.hold !== "";
    say(hold, held ? "Release" : "Hold");
    show(buttons, overview.asker.operates);
    show(retry, broken);
    const key = `${overview.manager} ${broken} ${held} ${name}`;
    if (key !== written) {
      written = key;
      const lines = [...(broken ? ["retry"] : []), held ? "release" : "hold", "evict"].map((what) => command(what, overview.manager, name));
      commands.replaceChildren(...lines.map(copyable));
    }
  }

  return { element, update };
}
