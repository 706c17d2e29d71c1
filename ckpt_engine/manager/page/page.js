// Asks the manager each second what is there, and shows it. Nothing is kept when the page is closed.

import { ask, hasToken, Refusal, useToken } from "./asking.js";
import { byId, make, say, show } from "./dom.js";
import { showNow, stateOf } from "./now.js";
import { showPauses } from "./pauses.js";
import { showLegend, showUpdates } from "./updates.js";
import { counted, seconds } from "./words.js";

const EVERY_MS = 1000;
const SLOWEST_MS = 8000;
const HISTORY_MS = 15_000;

let timer = 0;
let failures = 0;
let heard = 0;
let history = null;
let historyKey = "";
let historyTime = 0;
let overview = null;
let turn = 0;

async function look() {
  clearTimeout(timer);
  const mine = ++turn;
  try {
    const found = await ask("/v1/overview");
    const key = `${found.epoch} ${found.phase === "idle"} ${found.refused}`;
    const old = Date.now() - historyTime > HISTORY_MS;
    const told = history === null || key !== historyKey || old ? await ask("/v1/history?limit=40") : history;
    if (mine !== turn) return; // another look began meanwhile, or the token is another one
    if (told !== history) [history, historyKey, historyTime] = [told, key, Date.now()];
    overview = found;
    failures = 0;
    heard = Date.now();
    render();
  } catch (error) {
    if (mine !== turn) return;
    fail(error);
    if (error instanceof Refusal && error.status === 401) return;
  }
  if (!document.hidden) timer = setTimeout(look, Math.min(SLOWEST_MS, EVERY_MS * 2 ** Math.min(failures, 3)));
}

function render() {
  show(byId("ask"), false);
  show(byId("all"), true);
  document.body.classList.remove("stale");
  link("live", "live");
  showNow(overview);
  showFacts();
  showUpdates(history, overview);
  showPauses(history);
  showFoot();
}

function fail(error) {
  failures += 1;
  if (error instanceof Refusal && error.status === 401) {
    const refused = hasToken();
    forget();
    say(byId("ask-problem"), refused ? error.message : "");
    return;
  }
  document.body.classList.add("stale");
  const words = error instanceof Refusal ? error.message : "the manager does not answer";
  link(heard ? `${words}; what is shown is ${counted(Math.round((Date.now() - heard) / 1000), "second")} old` : words, "lost");
}

function link(words, state) {
  say(byId("link"), words);
  byId("link").className = state;
}

/** Asks for a token. What an earlier one was needed for stays hidden; "Forget the token" empties the page. */
function forget() {
  clearTimeout(timer);
  turn += 1;
  useToken("");
  history = null;
  show(byId("all"), false);
  show(byId("ask"), true);
  byId("about").replaceChildren();
  byId("foot").replaceChildren();
  link("waiting for a token", "lost");
  byId("token").focus();
}

function showFacts() {
  const states = new Map();
  for (const each of overview.replicas) states.set(stateOf(each), (states.get(stateOf(each)) ?? 0) + 1);
  const others = [...states].filter(([state]) => state !== "serving").map(([state, count]) => `${count} ${state}`).join(", ");
  const last = history.updates.find((each) => each.ok !== undefined);
  const newest = history.updates[0];
  const paused = history.updates.find((each) => each.pauses);
  const facts = [
    ["serving", `${states.get("serving") ?? 0} of ${overview.replicas.length}`, others || (overview.replicas.length ? "all of them" : "no replica")],
    ["newest version", newest ? newest.identity.version : "–", newest ? newest.identity.lineage : "none yet"],
    ["last update", last ? seconds(last.seconds) : "–", last ? (last.ok ? "ok" : "partial") : "none yet"],
    ["last pause", paused ? seconds(paused.pauses.p50) : "–", paused ? `p50; p99 ${seconds(paused.pauses.p99)}` : "none yet"],
  ];
  const key = JSON.stringify(facts);
  if (byId("facts").dataset.key === key) return;
  byId("facts").dataset.key = key;
  byId("facts").replaceChildren(...facts.map(([name, value, more]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, make("strong", { class: "number" }, value), make("small", { class: "soft" }, more)))));
}

function showFoot() {
  say(byId("about"), `manager ${overview.manager}, cluster ${overview.cluster.slice(0, 8)}, epoch ${overview.epoch}`);
  if (byId("foot").childElementCount) return;
  const may = overview.asker.operates ? "may retry, hold and evict" : "may only look; to retry, hold and evict wants the grant operator";
  const left = make("span", {}, `ckpt-engine ${overview.software_version}. You are ${overview.asker.name}: ${may}.`);
  const button = make("button", { type: "button", class: "plain" }, "Forget the token");
  button.addEventListener("click", () => {
    useToken("");
    location.reload();
  });
  const docs = make("a", { href: "/docs" }, "HTTP interface");
  byId("foot").append(left, hasToken() ? button : docs);
}

function enter() {
  useToken(byId("token").value);
  byId("token").value = "";
  say(byId("ask-problem"), "");
  if (hasToken()) look();
}

byId("use").addEventListener("click", enter);
byId("token").addEventListener("keydown", (event) => {
  if (event.key === "Enter") enter();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("ask").hidden) look();
});
addEventListener("resize", () => history && showPauses(history));
addEventListener("pagehide", () => useToken(""));
addEventListener("pageshow", (event) => event.persisted && look());

showLegend();
look();
