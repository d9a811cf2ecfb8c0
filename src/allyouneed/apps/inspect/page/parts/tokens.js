"use strict";
/* A row of tokens. Tokens of one `group` (the bytes of a Chinese character, an emoji, a letter with its marks) stay together.

   AYN.tokens(tokens, {label, selected, onSelect(index), weights, kind, under(index), off, multiple})
     tokens    [{id, text, group, special}]
     weights   numbers in −1…1 or 0…1 that colour the tokens (kind: "sequential" or "diverging")
     under     a small text below each, such as a number
     off       a Set of indexes shown as crossed out
     later     the index from which tokens are shown as not yet there
   Returns an element with .select(index) and .paint(weights, kind). With onSelect it is a listbox: one stop of the Tab key,
   arrow keys move, Enter or space selects.
   AYN.tokenText(token)   the text of a token as nodes: a leading space is a visible dot.
   AYN.chip(token, note, props)   one token by itself, with a small text below */

AYN.tokenText = (token) => {
  const text = token.text ?? "";
  const lead = text.match(/^ +/)?.[0].length ?? 0;
  const trail = text.length > lead ? text.match(/ +$/)?.[0].length ?? 0 : 0;
  const dots = (count) => count > 0 && AYN.el("span", { class: "space", "aria-hidden": "true", text: "·".repeat(count) });
  return [dots(lead), text.length > lead ? AYN.text(text.slice(lead, text.length - trail)) : null, dots(trail),
    text === "" && AYN.el("span", { class: "space", text: "∅" })];
};

/** The character that tokens of bytes (<E6><9C>) form together; null if they form none. */
AYN.character = (texts) => {
  const bytes = [];
  for (const [whole, hex] of texts.join("").matchAll(/<([0-9A-F]{2})>|[^<]+|</g)) bytes.push(...(hex ? [parseInt(hex, 16)] : new TextEncoder().encode(whole)));
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
};

AYN.chip = (token, note, props = {}) => AYN.el("span", { ...props, class: `token ${props.class ?? ""}`.trim() }, AYN.el("span", {}, AYN.tokenText(token)), note !== undefined && AYN.el("small", { text: note }));

AYN.tokens = (tokens, options = {}) => {
  const { label = "", onSelect, weights, kind, under, off, later } = options;
  const root = AYN.el("div", { class: "tokens", "aria-label": label, role: onSelect ? "listbox" : "list", "aria-multiselectable": options.multiple && "true" });
  const items = tokens.map((token, index) => AYN.el("span", {
    class: ["token", token.special && "special", off?.has(index) && "off", later !== undefined && index >= later && "later"].filter(Boolean).join(" "),
    role: onSelect ? "option" : "listitem", tabindex: onSelect && -1, title: token.id === undefined || token.id === null ? null : `#${token.id}`,
    "aria-selected": onSelect && "false",
  }, AYN.el("span", {}, AYN.tokenText(token)), under && AYN.el("small", { text: under(index) })));
  let group = null, last;
  tokens.forEach((token, index) => {
    const joined = token.group !== undefined && token.group !== null && (tokens[index + 1]?.group === token.group || (index > 0 && last === token.group));
    if (joined && last !== token.group) {
      const whole = AYN.character(tokens.filter((one) => one.group === token.group).map((one) => one.text));
      root.append((group = AYN.el("span", { class: "group", role: "presentation", title: whole && AYN.plain(whole) })));
      if (whole) group.append(AYN.el("span", { class: "whole", "aria-hidden": "true" }, AYN.text(whole.trim())));
    }
    (joined ? group : root).append(items[index]);
    last = token.group;
  });
  let current = 0;
  const focusOn = (index, move) => {
    items[current]?.setAttribute("tabindex", "-1");
    current = Math.min(Math.max(index, 0), items.length - 1);
    items[current]?.setAttribute("tabindex", "0");
    if (move) items[current]?.focus();
  };
  root.select = (index) => {
    const chosen = new Set([index].flat());
    items.forEach((item, n) => item.setAttribute("aria-selected", String(chosen.has(n))));
    const first = [index].flat()[0];
    if (first !== undefined && first !== null) focusOn(first);
  };
  root.paint = (numbers, how = kind) => numbers && items.forEach((item, n) => Number.isFinite(numbers[n]) && AYN.paint(item, numbers[n], how));
  if (onSelect && items.length) {
    focusOn(0);
    if (options.selected !== undefined) root.select(options.selected);
    root.addEventListener("click", (event) => {
      const index = items.indexOf(event.target.closest(".token"));
      if (index >= 0) (root.select(options.multiple ? [] : index), focusOn(index), onSelect(index));
    });
    root.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
      if (step) (event.preventDefault(), focusOn(Math.max(-1e9, Math.min(1e9, current + step)), true));
      if (event.key === "Enter" || event.key === " ") (event.preventDefault(), items[current].click());
    });
  }
  root.paint(weights);
  return root;
};
