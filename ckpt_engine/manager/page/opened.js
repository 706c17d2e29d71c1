// One update opened: for each replica its stages, its workers, and its edges: which bytes came from where, how and why.

import { ask, save } from "./asking.js";
import { make, say } from "./dom.js";
import { badge, bar, byStage, cell, table, total } from "./parts.js";
import { bytes, digits, named, outcome as ended, rate, seconds } from "./words.js";

const AT_A_TIME = 16;

/** Fills `place` with the update of this epoch. */
export async function opened(place, epoch) {
  if (!place.childElementCount) place.replaceChildren(make("p", { class: "soft" }, "asking the manager"));
  try {
    place.replaceChildren(...inside(await ask(`/v1/updates/${epoch}`)));
  } catch (error) {
    place.replaceChildren(make("p", { class: "bad", role: "alert" }, error.message));
  }
}

function inside(update) {
  const report = update.report;
  const about = [`epoch ${update.epoch}`, `root ${digits(update.identity.root)}`];
  if (!report) return [make("p", { class: "soft" }, [...about, "it has no report yet"].join(", "))];
  about.push(`${report.tensors} tensors`, report.verified ? "verified" : "not verified");
  const longest = Math.max(...report.replicas.map((each) => total(byStage(each.stages))), 1e-9);
  const said = [report.prefetch, report.collective].filter(Boolean);
  return [
    make("div", { class: "line" }, make("p", { class: "soft" }, about.join(", ")), ...trace(update.epoch)),
    ...said.map((words) => make("p", { class: "soft" }, words)),
    ...(report.relays.length ? [relays(report.relays)] : []),
    ...some(report.replicas, (each) => replica(each, longest), "replicas"),
  ];
}

/** A button that saves the update's timeline, and where it says why it could not. */
function trace(epoch) {
  const told = make("span", { class: "told bad", role: "status" });
  const button = make("button", { type: "button", title: "a timeline of this update, a file for Perfetto" }, "Trace");
  button.addEventListener("click", async () => {
    button.disabled = true;
    say(told, "");
    try {
      await save(`/v1/updates/${epoch}/trace`);
    } catch (error) {
      say(told, `there is no trace: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  });
  return [button, told];
}

function relays(reports) {
  const { element, body } = table(["relay", "brought", "from", "took"], "edges");
  for (const each of reports) {
    const filled = each.filled;
    const lines = filled?.brought.length ? filled.brought : [{ source: "", bytes: 0 }];
    for (const { source, bytes: count } of lines) {
      body.append(make("div", { class: "row", role: "row" },
        cell("relay", "", named(each.relay)), cell("brought", "number", Number(count) ? bytes(count) : "nothing"),
        cell("from", "", named(source) || "–"),
        cell("took", "number", !filled ? "no answer" : filled.problem ? filled.problem.message
          : `${seconds(filled.fill_seconds)}, ${rate(filled.bytes, filled.fill_seconds)}`)));
    }
  }
  return element;
}

function replica(outcome, longest) {
  const stages = byStage(outcome.stages);
  const parts = [
    make("div", { class: "line" }, make("strong", { class: "name" }, named(outcome.replica)),
      badge(ended(outcome.outcome)),
      make("span", { class: "soft number" }, `paused ${seconds(outcome.pause_seconds)} of ${seconds(outcome.sync_seconds)}, ${bytes(outcome.bytes)}`)),
  ];
  if (Object.keys(stages).length) {
    parts.push(bar(stages, longest), make("p", { class: "soft number stages" },
      Object.entries(stages).map(([stage, time]) => `${stage} ${seconds(time)}`).join(" · ")));
  }
  for (const problem of [outcome.problem?.message, outcome.label_problem].filter(Boolean)) {
    parts.push(make("p", { class: "bad" }, problem));
  }
  if (outcome.edges.length) parts.push(...edges(outcome));
  return make("section", { class: "one", "aria-label": `replica ${named(outcome.replica)}` }, ...parts);
}

function edges(outcome) {
  const { element, body } = table(["from", "to", "bytes", "transport", "why", "worker"], "edges");
  const workers = new Map(outcome.workers.map((each) => [each.rank, each]));
  const ordered = [...outcome.edges].sort((one, other) => one.worker_rank - other.worker_rank || other.bytes - one.bytes);
  const first = ordered.slice(0, 4 * AT_A_TIME);
  let before = null;
  for (const edge of first) {
    const worker = workers.get(edge.worker_rank);
    const again = before === edge.worker_rank;
    before = edge.worker_rank;
    body.append(make("div", { class: "row", role: "row" },
      cell("from", "", named(edge.source) || (edge.source_rank === undefined ? "–" : `rank ${edge.source_rank}`)),
      cell("to", "", `worker ${edge.worker_rank}`),
      cell("bytes", "number", bytes(edge.bytes)),
      cell("transport", "", edge.transport.replaceAll("_", " ")),
      cell("why", "soft", edge.reason || "–"),
      cell("worker", "number soft", worker && !again ? work(worker) : "")));
  }
  const left = ordered.length - first.length;
  return left ? [element, make("p", { class: "soft" }, `and ${left} more edges, of fewer bytes or other workers`)] : [element];
}

function work(worker) {
  if (worker.problem) return worker.problem.message;
  const checked = worker.verified + worker.verified_as_loaded;
  const fast = worker.transfer_seconds > 0 ? `${rate(worker.bytes, worker.transfer_seconds)}, ` : "";
  return `${fast}${checked} of ${worker.tensors} verified`;
}

/** What is made of the first ones, and a button for more. */
function some(items, create, things) {
  const shown = items.slice(0, AT_A_TIME).map(create);
  const rest = items.slice(AT_A_TIME);
  if (!rest.length) return shown;
  const more = make("button", { type: "button" }, `${rest.length} more ${things}`);
  more.addEventListener("click", () => more.replaceWith(...some(rest, create, things)));
  return [...shown, more];
}
