// What is there now: the line of what goes on, the facts, replicas, relays, lineages.

import { byId, list, listOr, make, say, show } from "./dom.js";
import { copyable, operations } from "./operate.js";
import { badge, cell, table } from "./parts.js";
import { bytes, counted, digits, named, percent, quoted, seconds } from "./words.js";

const STATES = {
  REPLICA_STATE_SERVING: "serving",
  REPLICA_STATE_DRAINING: "updating",
  REPLICA_STATE_ASLEEP: "asleep",
  REPLICA_STATE_AWAY: "away",
};

/** The one word for a replica. */
export const stateOf = (replica) => (replica.quarantined ? "quarantined" : STATES[replica.watched.state] ?? "closed");

const TROUBLED = new Set(["quarantined", "closed", "away"]);

export function showNow(overview) {
  const idle = overview.phase === "idle";
  say(byId("phase"), idle ? "Idle: no update runs" : overview.phase);
  byId("now").className = idle ? "idle" : "busy";
  say(byId("waits"), `Waits for ${overview.waiting_for.map(named).join(", ")}`);
  show(byId("waits"), overview.waiting_for.length > 0);
  list(byId("warnings"), overview.warnings, (each) => each, (each) => ({
    element: make("p", { class: "warning" }, each),
    update: () => {},
  }));
  const nothing = !overview.replicas.length && !overview.lineages.length && !overview.holders.length;
  show(byId("first"), nothing);
  if (nothing && !byId("steps").childElementCount) byId("steps").append(...firstSteps(overview.manager));
  showReplicas(overview);
  showRelays(overview);
  showLineages(overview);
}

function firstSteps(manager) {
  const address = quoted(manager);
  const steps = [
    ["See that this host has what it needs.", "ckpt-engine doctor"],
    ["Start a replica: an inference server with its agent.",
      `ckpt-engine agent --manager ${address} -- vllm serve DIR`],
    ["Bring it weights: from a trainer (ckpt_engine.Trainer in its code), or from a checkpoint.",
      `ckpt-engine update --manager ${address} --checkpoint SAFETENSORS_DIR`],
  ];
  return [make("ol", {}, ...steps.map(([words, line]) => make("li", {}, make("p", {}, words), copyable(line))))];
}

const replicas = table(["replica", "state", "version", "last pause", "engine", "host", "-what to do"], "replicas");

function showReplicas(overview) {
  const shown = overview.replicas;
  const troubled = shown.filter((each) => TROUBLED.has(stateOf(each))).length;
  say(byId("replicas-title"), `Replicas${shown.length ? ` (${shown.length}${troubled ? `, ${troubled} not there` : ""})` : ""}`);
  listOr(byId("replica-rows"), replicas, shown, (each) => each.watched.name, replicaRow,
    () => ["None. Start one with ", make("code", {}, "ckpt-engine agent"), "."], overview);
}

function replicaRow() {
  const name = make("strong", { class: "name" });
  const pool = make("small", { class: "soft" });
  const state = cell("state");
  const version = make("span", { class: "number" });
  const lag = make("small");
  const pause = make("span", { class: "number" });
  const engine = make("span");
  const host = make("span", { class: "soft" });
  const acts = operations();
  const more = make("button", { type: "button", class: "plain", "aria-expanded": "false" }, "Act");
  const line = make("div", { class: "row", role: "row" },
    cell("replica", "first", name, pool), state, cell("version", "", version, lag), cell("last pause", "", pause),
    cell("engine", "", engine), cell("host", "", host), cell("", "last", more));
  const why = make("div", { class: "why" });
  const scrub = make("small", { class: "soft" });
  const probe = make("small", { class: "soft" });
  const panel = make("div", { class: "panel" }, why, scrub, probe, acts.element);
  const element = make("div", { class: "entry", role: "presentation" }, line, panel);
  let open = null;
  let current = "";
  more.addEventListener("click", () => {
    open = more.getAttribute("aria-expanded") !== "true";
    fold();
  });

  function fold() {
    const wide = open ?? TROUBLED.has(current);
    more.setAttribute("aria-expanded", String(wide));
    show(acts.element, wide);
    show(panel, wide || why.textContent !== "");
  }

  function update(replica, overview) {
    const { watched } = replica;
    say(name, named(watched.name));
    say(pool, watched.pool ? `pool ${named(watched.pool)}` : "");
    if (current !== stateOf(replica)) {
      current = stateOf(replica);
      element.className = `entry ${current}`;
      state.replaceChildren(badge(current));
    }
    say(version, watched.identity ? watched.identity.version : "none");
    const behind = Number(replica.lag ?? 0);
    say(lag, watched.identity ? `${behind ? `${counted(behind, "version")} behind, ` : ""}${named(watched.identity.lineage)}` : "");
    lag.className = behind > 0 ? "late" : "soft";
    say(pause, seconds(replica.pause_seconds || null));
    say(engine, named([watched.engine, watched.engine_version].filter(Boolean).join(" ")) || "–");
    say(host, [named(replica.host), replica.workers > 1 ? counted(replica.workers, "worker") : ""].filter(Boolean).join(", "));
    more.setAttribute("aria-label", `Act on ${named(watched.name)}`);
    const still = current !== "updating";
    const said = [still && watched.reason, replica.hold,
      still && !replica.hold && !replica.unfit && watched.reason !== replica.drift && replica.drift,
      replica.unfit && `left out of updates: ${replica.unfit}`, watched.label_problem].filter(Boolean).join("; ");
    say(why, said);
    say(scrub, replica.scrub ? `scrub: ${replica.scrub}` : "");
    say(probe, replica.probe ? `probe: ${replica.probe}` : "");
    acts.update(replica, overview);
    fold();
  }

  return { element, update };
}

const relays = table(["relay", "state", "holds", "last filling"], "relays");

function showRelays(overview) {
  const shown = overview.holders;
  listOr(byId("relay-rows"), relays, shown, (each) => `${each.kind} ${each.name}`, relayRow,
    () => "None: replicas read the trainers' memory.");
}

function relayRow() {
  const cells = [cell("relay", "first"), cell("state"), cell("holds"), cell("last filling")];
  const why = make("div", { class: "why" });
  const element = make("div", { class: "entry", role: "presentation" }, make("div", { class: "row", role: "row" }, ...cells),
    make("div", { class: "panel" }, why));
  let state = "";
  function update(relay) {
    cells[0].replaceChildren(make("strong", { class: "name" }, named(relay.name)),
      make("small", { class: "soft" }, [relay.kind === "relay" ? "" : relay.kind, relay.description].filter(Boolean).map(named).join(", ")));
    const whole = Number(relay.progress?.bytes_total ?? 0);
    const part = whole ? Number(relay.progress.bytes_done) / whole : null;
    const last = relay.last_filled;
    const now = !relay.connected ? "away" : part !== null ? `filling, ${Math.floor(100 * part)} %` : "connected";
    if (now !== state) {
      state = now;
      cells[1].replaceChildren(badge(now, now.split(",")[0]));
    }
    cells[2].replaceChildren(...(relay.shares.length ? relay.shares.map(share) : [make("span", {}, "nothing")]),
      make("small", { class: "soft" }, relay.filling ? `${bytes(relay.filling.memory_bytes)} of memory` : ""));
    cells[3].replaceChildren(make("span", { class: "number" }, !last ? "–" : last.problem ? "failed"
      : `${bytes(last.bytes)} in ${seconds(last.fill_seconds)}`));
    say(why, [last?.problem && `version ${last.identity.version}: ${last.problem.message}`,
      relay.slow && `passes nothing on to others: it ${relay.slow}`].filter(Boolean).join("; "));
    show(why.parentElement, why.textContent !== "");
  }
  return { element, update };
}

/** How much a relay has of one version. */
function share({ identity, bytes: has, wanted_bytes: wanted, coming }) {
  const part = Number(wanted) ? Math.min(1, Number(has) / Number(wanted)) : 1;
  const amount = Number(wanted) ? `${bytes(has)} of ${bytes(wanted)}${coming ? ", coming" : ""}` : "";
  const fill = make("span", { class: coming ? "coming" : part < 1 ? "part" : "whole" });
  fill.style.width = `${100 * part}%`;
  const version = `${identity.version} of ${named(identity.lineage)}`;
  return make("div", { class: "share", title: amount }, make("span", {}, version),
    make("div", { class: "bar", role: "img", "aria-label": `${version}: ${amount || "held"}` }, fill),
    make("small", { class: "soft" }, coming || part < 1 ? percent(part) : ""));
}

const lineages = table(["lineage", "ranks", "replicas", "last version"], "lineages");

function showLineages(overview) {
  const shown = overview.lineages;
  listOr(byId("lineage-rows"), lineages, shown, (each) => each.lineage, lineageRow, () => "None: no trainer has a session.");
}

function lineageRow() {
  const cells = [cell("lineage", "first"), cell("ranks"), cell("replicas"), cell("last version")];
  const element = make("div", { class: "entry", role: "presentation" }, make("div", { class: "row", role: "row" }, ...cells));
  function update(lineage) {
    const { world_size: size, connected, published, latest } = lineage;
    const whole = size > 0 && connected === size && published === size;
    cells[0].replaceChildren(make("strong", { class: "name" }, named(lineage.lineage)));
    cells[1].replaceChildren(make("span", { class: "number" }, size === 0 ? "none" : whole ? `${counted(size, "rank")}, published`
      : `${connected} of ${size} connected, ${published} published`));
    cells[2].replaceChildren(make("span", { class: "number" }, String(lineage.replicas || "none")),
      make("small", { class: "soft" }, lineage.sources ? `read from ${counted(lineage.sources, "source")}` : ""));
    cells[3].replaceChildren(make("span", { class: "number" }, latest ? `version ${latest.version}` : "–"),
      make("small", { class: "soft" }, latest ? `root ${digits(latest.root)}` : ""));
  }
  return { element, update };
}
