// Makes and changes elements. Text is only ever text: nothing here, or on this page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `make("p", {class: "soft", onclick: f}, "words", other)`. */
export function make(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets text if it differs, so that a selection in it survives. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  element.hidden = !visible;
}

const kept = new WeakMap();

/** Lets `parent` show one element for each item, in order, and keeps those that stay: with their focus, their selection
 * and whether they are open. `create` gives {element, update(item, context, index)}. */
export function list(parent, items, keyOf, create, context) {
  const rows = kept.get(parent) ?? new Map();
  kept.set(parent, rows);
  const wanted = new Set();
  let place = null;
  for (const [index, item] of items.entries()) {
    const key = keyOf(item);
    wanted.add(key);
    if (!rows.has(key)) rows.set(key, create(item));
    const row = rows.get(key);
    row.update(item, context, index);
    const next = place === null ? parent.firstChild : place.nextSibling;
    if (next !== row.element) parent.insertBefore(row.element, next);
    place = row.element;
  }
  for (const [key, row] of rows) {
    if (!wanted.has(key)) {
      row.element.remove();
      rows.delete(key);
    }
  }
}

/** The same, in `place`; where there is nothing, `empty` says so instead. `frame`: around the rows, if there are any. */
export function listOr(place, frame, items, keyOf, create, empty, context) {
  list(frame.body, items, keyOf, create, context);
  const kind = items.length ? "some" : "none";
  if (place.dataset.kind !== kind) {
    place.dataset.kind = kind;
    place.replaceChildren(items.length ? frame.element : make("p", { class: "empty" }, ...[empty()].flat()));
  }
}
