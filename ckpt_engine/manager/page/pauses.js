// Pauses over time: the median replica's and the slowest hundredth's, one point an update.

import { byId, draw, make } from "./dom.js";
import { clock, seconds } from "./words.js";

const HEIGHT = 180;
const LEFT = 62;
const RIGHT = 16;
const TOP = 12;
const BOTTOM = 28;
const LINES = [["p50", "half of the replicas were paused no longer"], ["p99", "99 of 100 were paused no longer"]];

let drawn = "";

export function showPauses(history) {
  const points = history.updates.filter((each) => each.pauses).map((each) => ({ ...each.pauses, time: each.time, version: each.identity.version })).reverse();
  const place = byId("chart");
  const width = Math.max(240, place.clientWidth - 32);
  const key = JSON.stringify([points, width]);
  if (key === drawn) return;
  drawn = key;
  if (!points.length) {
    place.replaceChildren(make("p", { class: "empty" }, "No replica has been paused yet: the first update draws the first point."));
    return;
  }
  place.replaceChildren(legend(points), chart(points, width));
}

function legend(points) {
  const last = points.at(-1);
  return make("ul", { class: "legend" }, ...LINES.map(([name, words]) => make("li", {},
    make("i", { class: `stroke ${name}`, "aria-hidden": "true" }), `${name} `, make("strong", { class: "number" }, seconds(last[name])),
    make("small", { class: "soft" }, ` ${words}`))));
}

function chart(points, width) {
  const top = step(Math.max(...points.map((each) => each.p99)) || 0.001);
  const first = points[0].time;
  const span = points.at(-1).time - first || 1;
  const x = (time) => points.length === 1 ? (LEFT + width - RIGHT) / 2 : LEFT + ((time - first) / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const last = points.at(-1);
  const label = `Pauses of ${points.length} updates: at last p50 ${seconds(last.p50)}, p99 ${seconds(last.p99)}; the longest p99 ${seconds(Math.max(...points.map((each) => each.p99)))}`;
  const picture = draw("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const part of [0, 0.5, 1]) {
    const at = y(part * top);
    picture.append(draw("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      draw("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, seconds(part * top)));
  }
  const ends = points.length === 1 ? [[last, "middle"]] : [[points[0], "start"], [last, "end"]];
  for (const [point, anchor] of ends) {
    picture.append(draw("text", { x: x(point.time), y: HEIGHT - 8, "text-anchor": anchor }, width < 420 ? clock(point.time) : `version ${point.version}, ${clock(point.time)}`));
  }
  for (const [name] of [...LINES].reverse()) {
    picture.append(draw("polyline", { class: `stroke ${name}`, points: points.map((each) => `${x(each.time)},${y(each[name])}`).join(" ") }));
    for (const each of points) {
      picture.append(draw("circle", { class: name, cx: x(each.time), cy: y(each[name]), r: 3.5 },
        draw("title", {}, `version ${each.version}: ${name} ${seconds(each[name])}`)));
    }
  }
  return picture;
}

/** The next number of 1, 2 and 5 times a power of ten that is no smaller. */
function step(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((each) => each * power >= value * 0.999);
}
