"use strict";
/* The namespace, and how elements are made. Texts reach the page only through text nodes: nothing that a model reads or writes is
   ever parsed as HTML.

   AYN.el(tag, props, ...children)   an element. props: `class`, `text`, `on: {click: f}`, `style: {"--x": "1"}`, `data: {…}`, any
                                     attribute (true: empty, null or false: left out). Children: nodes, strings, lists, null.
   AYN.svg(tag, props, ...children)  the same for SVG.
   AYN.text(text)                    a <bdi> with the text; characters that hide or reorder others are shown as escapes.
   AYN.prose(text)                   the same of a text that may have lines and paragraphs: it is shown with them.
   AYN.plain(text)                   the same as a string, for labels and canvas.
   AYN.clear(node, ...children)      replaces what a node contains. */

const AYN = { views: {}, SVG: "http://www.w3.org/2000/svg" };

/** Controls, bidirectional marks and overrides, invisible characters, lone surrogates, tags. */
AYN.HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Cs}/gu;
AYN.SIGNS = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

/** @param {string} char */
AYN.escaped = (char) => AYN.SIGNS[char] ?? "U+" + char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

AYN.fill = (node, children) => {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
};

AYN.make = (node, props, children) => {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return AYN.fill(node, children);
};

/** @returns {HTMLElement} */
AYN.el = (tag, props, ...children) => AYN.make(document.createElement(tag), props, children);
/** @returns {SVGElement} */
AYN.svg = (tag, props, ...children) => AYN.make(document.createElementNS(AYN.SVG, tag), props, children);
AYN.clear = (node, ...children) => AYN.fill((node.replaceChildren(), node), children);

/** @param {string} text @returns {HTMLElement} */
AYN.text = (text) => {
  const found = AYN.el("bdi", { dir: "auto" });
  let at = 0;
  for (const match of String(text).matchAll(AYN.HIDDEN)) {
    found.append(text.slice(at, match.index), AYN.el("span", { class: "escape", text: AYN.escaped(match[0]) }));
    at = match.index + match[0].length;
  }
  found.append(String(text).slice(at));
  return found;
};

/** @param {string} text @returns {HTMLElement} */
AYN.prose = (text) => AYN.el("span", { class: "prose" }, String(text).split(/\r\n|[\n\r]/).map((line, n) => [n > 0 && "\n", AYN.text(line)]));

AYN.plain = (text) => String(text).replace(AYN.HIDDEN, (char) => AYN.escaped(char));

let ids = 0;
AYN.id = (prefix = "id") => `${prefix}-${++ids}`;
