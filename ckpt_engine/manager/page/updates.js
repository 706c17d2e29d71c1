// Updates as bars of their stages, newest first, and updates that were refused.

import { byId, listOr, make, say, show } from "./dom.js";
import { opened } from "./opened.js";
import { badge, bar, byStage, scaleOf, STAGES } from "./parts.js";
import { ago, bytes, clock, counted, moment, named, outcome, seconds } from "./words.js";

export function showLegend() {
  byId("legend").append(...Object.entries(STAGES).map(([stage, words]) =>
    make("li", {}, make("i", { class: `stage ${stage}`, "aria-hidden": "true" }), `${stage}`, make("small", { class: "soft" }, ` ${words}`))));
}

const frames = [make("div"), make("div")].map((element) => ({ element, body: element }));

export function showUpdates(history, overview) {
  const longest = scaleOf(history.updates);
  listOr(byId("update-rows"), frames[0], history.updates, (each) => each.epoch, updateRow, () => noUpdates(overview), { overview, longest });
  show(byId("legend"), history.updates.length > 0);
  say(byId("refused-title"), overview.refused ? `Refused updates (${overview.refused})` : "Refused updates");
  listOr(byId("refused-rows"), frames[1], history.refused, (each) => `${each.time} ${each.lineage} ${each.version}`, refusedRow,
    () => "None since the manager started.", overview);
}

function noUpdates(overview) {
  if (!overview.lineages.length) {
    return ["None yet. A trainer brings weights: ", make("code", {}, "ckpt_engine.Trainer"), " in its code, or ",
      make("code", {}, "ckpt-engine update --checkpoint DIR"), "."];
  }
  return ["None yet. The first comes when every rank has called ", make("code", {}, "update_weights"), "."];
}

function updateRow() {
  const version = make("strong", { class: "name number" });
  const lineage = make("small", { class: "soft" });
  const when = make("time", { class: "soft number" });
  const track = make("span", { class: "track" });
  const took = make("span", { class: "number" });
  const pause = make("span", { class: "number soft" });
  const state = make("span", { class: "outcome" });
  const toggle = make("button", { type: "button", class: "update", "aria-expanded": "false" },
    make("span", { class: "what" }, version, lineage), when, track,
    make("span", { class: "times" }, took, pause), state);
  const why = make("div", { class: "why" });
  const inside = make("div", { class: "inside", hidden: true });
  const element = make("div", { class: "entry" }, toggle, why, inside);
  let current = null;
  let drawn = "";
  let scale = 0;
  toggle.addEventListener("click", () => {
    const open = toggle.getAttribute("aria-expanded") !== "true";
    toggle.setAttribute("aria-expanded", String(open));
    show(inside, open);
    if (open) opened(inside, current.epoch);
  });

  function update(told, { overview, longest }, index) {
    current = told;
    say(version, `version ${told.identity.version}`);
    say(lineage, named(told.identity.lineage));
    say(when, ago(told.time, overview.now));
    when.title = moment(told.time);
    when.dateTime = new Date(told.time * 1000).toISOString();
    const running = told.ok === undefined && index === 0 && overview.phase !== "idle";
    if (scale !== longest) track.replaceChildren(bar(byStage(told.stages), longest));
    scale = longest;
    const key = JSON.stringify([told.stages, told.ok, running, told.outcomes, told.problems]);
    if (key === drawn) return;
    const corrected = drawn !== "" && !inside.hidden;
    drawn = key;
    track.replaceChildren(bar(byStage(told.stages), longest));
    say(took, told.ok === undefined ? "" : `${seconds(told.seconds)}, ${bytes(told.bytes)}`);
    say(pause, !told.pauses ? "" : `paused ${seconds(told.pauses.p50)}`
      + (told.pauses.replicas > 1 ? `, p99 ${seconds(told.pauses.p99)}` : ""));
    const ended = told.ok === undefined ? (running ? "runs" : "no report") : !told.ok ? "partial" : told.verified ? "verified" : "ok";
    state.replaceChildren(badge(ended));
    const counts = told.outcomes.filter((each) => each.outcome !== "OUTCOME_NEW_SERVING")
      .map((each) => `${counted(each.replicas, "replica")} ${outcome(each.outcome)}`);
    const problems = told.problems.map((each) => `${named(each.replica)}: ${each.message}`);
    const nobody = ended === "no report" ? ["the manager ended in the middle of it"] : [];
    why.replaceChildren(...[...nobody, counts.join(", "), ...problems].filter(Boolean).map((words) => make("p", {}, words)),
      ...told.warnings.map((words) => make("p", { class: "late" }, words)));
    if (corrected) opened(inside, told.epoch);
  }

  return { element, update };
}

function refusedRow(refused) {
  const when = make("time", { class: "soft number", title: moment(refused.time), datetime: new Date(refused.time * 1000).toISOString() },
    clock(refused.time));
  const where = [refused.problem.ranks.length ? `ranks ${refused.problem.ranks.slice(0, 16).join(", ")}` : "",
    refused.problem.tensors.length ? `tensors ${refused.problem.tensors.slice(0, 8).join(", ")}` : "",
    refused.problem.replica ? `replica ${named(refused.problem.replica)}` : ""].filter(Boolean).join("; ");
  const element = make("div", { class: "entry refusal" },
    make("div", { class: "line" },
      make("strong", { class: "name" }, refused.version === undefined ? "the next version" : `version ${refused.version}`),
      make("small", { class: "soft" }, named(refused.lineage)), when,
      make("span", { class: "badge refused" }, String(refused.problem.code).replace("CODE_", "").replaceAll("_", " ").toLowerCase())),
    make("p", {}, refused.problem.message), where ? make("p", { class: "soft" }, where) : null);
  return { element, update: (_, overview) => say(when, ago(refused.time, overview.now)) };
}
