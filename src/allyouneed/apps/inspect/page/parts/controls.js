"use strict";
/* Small controls, all reachable by keyboard.

   AYN.button(label, run, props)               a button
   AYN.field(label, control)                   a control with its label above
   AYN.select(label, options, value, change)   options: [[value, label], …]
   AYN.choice(label, options, value, change)   one of a few, as a row of buttons (radio group: arrow keys)
   AYN.range(…) is in tensor.js; AYN.slider(label, {min, max, step, value, show}, change)
   AYN.check(label, value, change)
   AYN.code(text, label)                       a line of code with a copy button
   AYN.table(head, rows, {numeric: [columns], label})   rows: lists of strings, numbers or nodes
   AYN.numbers(values)                         the first numbers of a row
   AYN.title(app, key)                         heading and one sentence of a view: strings KEY.title and KEY.about
   AYN.panel(title, ...children) */

AYN.button = (label, run, props = {}) => AYN.el("button", { type: "button", ...props, on: { click: run, ...props.on } }, label);

AYN.field = (label, control) => AYN.el("label", { class: "field" }, AYN.el("span", { text: label }), control);

AYN.select = (label, options, value, change) => {
  const control = AYN.el("select", { on: { change: () => change(options[control.selectedIndex][0]) } },
    options.map(([one, shown]) => AYN.el("option", { value: one, selected: String(one) === String(value) }, AYN.plain(shown))));
  return AYN.field(label, control);
};

AYN.choice = (label, options, value, change) => {
  const group = AYN.el("div", { class: "choice", role: "radiogroup", "aria-label": label });
  const pick = (number, focus) => {
    [...group.children].forEach((one, n) => {
      one.setAttribute("aria-checked", String(n === number));
      one.tabIndex = n === number ? 0 : -1;
    });
    if (focus) group.children[number].focus();
  };
  options.forEach(([one, shown], number) => group.append(AYN.button(shown, () => (pick(number), change(one)), { role: "radio" })));
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = ([...group.children].indexOf(document.activeElement) + step + options.length) % options.length;
    pick(next, true);
    change(options[next][0]);
  });
  pick(Math.max(0, options.findIndex(([one]) => String(one) === String(value))));
  return group;
};

AYN.slider = (label, { min, max, step = 1, value, show = String }, change) => {
  const shown = AYN.el("output", { class: "num", text: show(value) });
  const control = AYN.el("input", { type: "range", min, max, step, value,
    on: { input: () => { shown.textContent = show(Number(control.value)); change(Number(control.value)); } } });
  return AYN.field(label, AYN.el("span", { class: "row" }, control, shown));
};

AYN.check = (label, value, change) => {
  const control = AYN.el("input", { type: "checkbox", checked: value, on: { change: () => change(control.checked) } });
  return AYN.el("label", { class: "check" }, control, label);
};

AYN.copied = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure context, or a file: the old way
    const area = AYN.el("textarea", { class: "hidden", "aria-hidden": "true", tabindex: "-1" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
};

AYN.code = (text, label) => {
  const button = AYN.button(AYN.app.t("copy"), async () => {
    await AYN.copied(text);
    button.textContent = AYN.app.t("copied");
    AYN.app.announce(AYN.app.t("copied"));
    setTimeout(() => (button.textContent = AYN.app.t("copy")), 1500);
  }, { "aria-label": `${AYN.app.t("copy")}: ${AYN.plain(label ?? text).slice(0, 80)}`, class: "quiet" });
  return AYN.el("div", { class: "code" }, AYN.el("pre", {}, AYN.el("code", {}, AYN.prose(text))), button);
};

AYN.table = (head, rows, { numeric = [], label } = {}) => {
  const cell = (tag, value, n) => AYN.el(tag, { class: numeric.includes(n) && "num", scope: tag === "th" && "col" },
    value instanceof Node ? value : typeof value === "number" ? AYN.format(value) : AYN.text(value ?? ""));
  return AYN.el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": label ?? head.join(", ") }, AYN.el("table", {},
    AYN.el("thead", {}, AYN.el("tr", {}, head.map((one, n) => cell("th", one, n)))),
    AYN.el("tbody", {}, rows.map((row) => AYN.el("tr", {}, row.map((one, n) => cell("td", one, n)))))));
};

AYN.numbers = (values) => AYN.el("div", { class: "numbers" },
  Array.from(values, (x) => AYN.el("span", { title: AYN.exact(x), text: AYN.format(x) })));

AYN.title = (app, key) => AYN.el("div", { class: "title" }, AYN.el("h1", { text: app.t(`${key}.title`) }),
  AYN.el("p", { class: "soft", text: app.t(`${key}.about`) }));

AYN.panel = (title, ...children) => AYN.el("section", { class: "panel" }, title && AYN.el("h2", {}, title), children);
