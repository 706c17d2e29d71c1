// Parts that several sections have: badges, bars of stages, tables.

import { make } from "./dom.js";
import { seconds } from "./words.js";

export const STAGES = {
  plan: "prepare, plan, seal, fill relays",
  ready: "agents fetch their plans",
  quiesce: "pause the engine",
  transfer: "bytes come to the workers",
  install: "write into parameters",
  verify: "read back and hash",
  resume: "the engine goes on",
};

export function badge(word, kind = word) {
  return make("span", { class: `badge ${kind.replaceAll(" ", "-")}` }, word);
}

/** Seconds by stage, in the order of the stages; equal ones add up. told: StageSeconds. */
export function byStage(told) {
  const found = new Map(Object.keys(STAGES).map((stage) => [stage, 0]));
  for (const { stage, seconds } of told) {
    const name = typeof stage === "string" ? stage.replace("STAGE_", "").toLowerCase() : `unknown ${stage}`;
    found.set(name, (found.get(name) ?? 0) + seconds);
  }
  return Object.fromEntries([...found].filter(([, time]) => time > 0));
}

/** A bar of stages. longest: the seconds that its whole width stands for; what is longer fills it and has a torn end. */
export function bar(stages, longest) {
  const whole = total(stages);
  const parts = Object.entries(stages).filter(([, time]) => time > 0);
  const words = parts.map(([stage, time]) => `${stage} ${seconds(time)}`).join(", ");
  const element = make("div", { class: whole > longest * 1.001 ? "bar torn" : "bar", role: "img", "aria-label": words || "no stage was timed" });
  for (const [stage, time] of parts) {
    const part = make("span", { class: `stage ${stage in STAGES ? stage : "other"}`, title: `${stage} ${seconds(time)}` });
    part.style.width = `${(100 * time) / Math.max(longest, whole)}%`;
    element.append(part);
  }
  return element;
}

export const total = (stages) => Object.values(stages).reduce((sum, time) => sum + time, 0);

/** What the widest bar stands for: the longest of them, but no more than four times the middle one, since the first
 * update records the engines' loaders and would make all others too small to read. */
export function scaleOf(items) {
  const totals = items.map((each) => total(byStage(each.stages))).filter((time) => time > 0).sort((one, other) => one - other);
  return totals.length ? Math.min(totals.at(-1), 4 * totals[Math.floor((totals.length - 1) / 2)]) : 1;
}

/** A table of named columns; a title that begins with a dash is for screen readers only. */
export function table(titles, className) {
  const head = make("div", { class: "head", role: "row" });
  for (const title of titles) {
    const unseen = title.startsWith("-");
    head.append(make("span", { role: "columnheader" }, unseen ? make("span", { class: "unseen" }, title.slice(1)) : title));
  }
  const body = make("div", { role: "rowgroup" });
  const element = make("div", { class: `grid ${className}`, role: "table" }, make("div", { role: "rowgroup" }, head), body);
  return { element, body };
}

/** A cell; a narrow window shows the title beside what is in it. */
export function cell(title, className = "", ...children) {
  return make("span", { role: "cell", class: `cell ${className}`, "data-title": title }, ...children);
}
