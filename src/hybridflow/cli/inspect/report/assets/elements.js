"use strict";
// Elements and numbers of the page. Every text of a run becomes a text node: nothing here reads it as HTML.

/** Return an element; `attributes` with functions are listeners, `children` are elements or texts. */
function make(name, attributes, ...children) {
  const element = document.createElement(name);
  setAll(element, attributes);
  addAll(element, ...children);
  return element;
}

function makeSvg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  setAll(element, attributes);
  element.append(...children.map(asNode));
  return element;
}

function addAll(element, ...children) {
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
}

function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** Return text on which control and direction characters can be seen, and cannot change what stands around it. */
function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (char) => {
    const code = char.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `\\u{${code.toString(16)}}`;
  });
}

function oneLine(text, most) {
  const line = visible(String(text).slice(0, 4 * most)).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

function textBlock(text, label) {
  return make("pre", { dir: "auto", tabindex: "0", role: "group", "aria-label": label }, visible(text));
}

/** Return a table in a box that scrolls; `head` are texts, `rows` lists of cells: elements, texts or numbers. */
function table(caption, head, rows, cellClass) {
  const cell = (value, column) => {
    const isNumber = typeof value === "number" || value === "–";
    const content = typeof value === "number" ? formatNumber(value) : value;
    return make("td", { class: (cellClass && cellClass[column]) || (isNumber ? "number" : null), "data-label": head[column] || null }, content);
  };
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {},
      make("thead", {}, make("tr", {}, head.map((text, column) => make("th", { scope: "col", class: typeof (rows[0]?.cells || rows[0] || [])[column] === "number" ? "number" : null }, text)))),
      make("tbody", {}, rows.map((row) => make("tr", { class: row.differs ? "differs" : null },
        (row.cells || row).map(cell))))));
}

function labelled(label, control) {
  control.setAttribute("aria-label", label);
  return make("label", {}, label, control);
}

function choice(label, options, value, onChange) {
  const select = make("select", { change: () => onChange(select.value) },
    options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)));
  return labelled(label, select);
}

function note(text) {
  return make("p", { class: "note" }, text);
}

/** Return a function that runs `action` once the calls have stopped for some milliseconds. */
function delayed(action, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}
