"use strict";
/* Why this word? Causal effect (default), direct logit attribution, rollout, attention; the logit lens (look/views/why.py). */

const SHOWN = 24; // bars

const percent = (logProb) => `${(100 * Math.exp(logProb)).toFixed(1)} %`;

/** Token units as coloured strips, one per stack, or as colours over the image or sound. */
const strips = (app, data, units) => Object.entries(data.tokens).map(([stack, tokens]) => {
  const own = units.filter((one) => one.name === stack);
  if (!own.length) return null;
  const values = tokens.map(() => NaN);
  own.forEach((one) => one.tokens.forEach((at) => (values[at] = one.value)));
  const most = Math.max(...units.map((one) => Math.abs(one.value)), 1e-30);
  const media = data.media?.[stack];
  return AYN.el("div", { class: "stack" }, AYN.el("h3", { class: "small soft", text: AYN.stackName(app, stack) }),
    media ? AYN.media(app, media, { weights: values.map((x) => (Number.isFinite(x) ? x : 0)) })
      : AYN.tokens(tokens, { label: AYN.stackName(app, stack), weights: values.map((x) => x / most), kind: "diverging", under: (n) => (Number.isFinite(values[n]) ? AYN.format(values[n]) : "") }));
});

/** Heads as a heat map: one row per sub-layer. */
const headMap = (app, units) => {
  const parsed = units.map((one) => ({ ...one, found: one.name.match(/^(.*)\.heads\[(\d+)\]$/) }));
  if (!parsed.length || !parsed.every((one) => one.found)) return null;
  const rows = [...new Set(parsed.map((one) => one.found[1]))], wide = Math.max(...parsed.map((one) => Number(one.found[2]))) + 1;
  const values = new Float32Array(rows.length * wide).fill(NaN);
  parsed.forEach((one) => (values[rows.indexOf(one.found[1]) * wide + Number(one.found[2])] = one.value));
  return AYN.heatmap({ tensor: { shape: [rows.length, wide], values }, rows, columns: Array.from({ length: wide }, (_, n) => String(n)), kind: "diverging", label: app.t("why.heads"), name: "heads",
    onSelect: (row, column) => app.go("what_if", { ablate: `${rows[row]}.heads[${column}]` }) });
};

const result = (app, data) => {
  const sorted = data.units.map((one, index) => ({ ...one, index })).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const causal = data.method === "causal";
  const name = (one) => (data.unit === "token" ? AYN.el("span", {}, AYN.tokenText({ text: one.label || one.name })) : AYN.el("span", {}, AYN.el("code", { text: one.name }), one.label && one.label !== one.name ? [" ", AYN.text(one.label)] : null));
  const open = (one) => (data.unit === "token" ? app.go("what_if", { stack: one.name, mask: one.tokens.join(",") }) : app.go("what_if", { ablate: one.name }));
  return [AYN.el("p", { class: "soft", text: app.t(`why.${data.method}.about`) }),
    AYN.el("p", { class: "facts" }, AYN.el("span", {}, app.t(data.method === "logits" ? "why.logit" : "why.log_prob"), " ", AYN.el("b", { class: "num", text: AYN.format(data.total) })),
      data.residual !== null && AYN.el("span", {}, app.t("why.residual"), " ", AYN.el("b", { class: "num", text: AYN.format(data.residual) }))),
    data.unit === "token" ? strips(app, data, data.units) : headMap(app, data.units),
    AYN.bars(sorted.slice(0, SHOWN).map((one) => ({ name: name(one), value: one.value })), { label: app.t("why.units"), signed: true, onSelect: causal ? (n) => open(sorted[n]) : null }),
    sorted.length > SHOWN && AYN.el("p", { class: "small soft", text: app.t("why.more", { shown: SHOWN, count: sorted.length }) }),
    AYN.el("div", {}, AYN.button(app.t("csv"), () => AYN.download("why.csv", "name,tokens,label,value\n" + data.units.map((one) => [one.name, one.tokens.join(" "), AYN.plain(one.label), AYN.exact(Math.fround(one.value))].map((x) => AYN.quoted(String(x))).join(",")).join("\n") + "\n"), { class: "quiet" }))];
};

const lens = (app, data) => {
  if (!data.lens.length) return null;
  const answer = data.answers[data.answer];
  const cell = (one) => AYN.chip(one, percent(one.log_prob), { class: one.id === answer.id ? "chosen" : "" });
  return AYN.panel(app.t("why.lens"), AYN.el("p", { class: "soft small", text: app.t("why.lens.about") }),
    AYN.table([app.t("why.after"), "1", "2", "3", "4", "5"].slice(0, 1 + data.lens[0].candidates.length), data.lens.map((one) => [AYN.el("code", { text: one.site }), ...one.candidates.map(cell)]), { label: app.t("why.lens") }));
};

/** What Python says in English about a method that is not exact here, in the language of the page. */
const problem = (app, text) => {
  const key = `why.problem.${text.toLowerCase().replace(/'[^']*' /, "").replace(/[^a-z]+/g, "-")}`;
  return app.known(key, null) === null ? text : app.t(key, { kind: text.match(/'([^']*)'/)?.[1] });
};

const draw = (root, found, app) => {
  const data = found.data;
  const ask = (changes) => {
    const wanted = { answer: data.answer, method: data.method, unit: data.unit, ...changes };
    const units = data.methods.find((one) => one.method === wanted.method).units;
    if (!units.includes(wanted.unit)) wanted.unit = units[0];
    app.remember({ answer: wanted.answer || null, method: wanted.method === "causal" ? null : wanted.method, unit: wanted.unit === "token" ? null : wanted.unit });
    return app.load(root, "why", wanted, (next, place) => (draw(place, next, app), app.python(next.python)));
  };
  const usable = data.methods.filter((one) => !one.problem), refused = data.methods.filter((one) => one.problem);
  const units = data.methods.find((one) => one.method === data.method).units;
  AYN.clear(root, AYN.title(app, "why"),
    AYN.panel(app.t("why.answer"), AYN.tokens(data.answers, { label: app.t("why.answer"), selected: data.answer, onSelect: (answer) => ask({ answer }), under: (n) => percent(data.answers[n].log_prob) }),
      AYN.el("div", { class: "row" }, AYN.choice(app.t("why.method"), usable.map((one) => [one.method, app.t(`why.${one.method}`)]), data.method, (method) => ask({ method })),
        units.length > 1 && AYN.choice(app.t("why.unit"), units.map((one) => [one, app.t(`why.unit.${one}`)]), data.unit, (unit) => ask({ unit }))),
      refused.map((one) => AYN.el("p", { class: "small soft" }, `${app.t(`why.${one.method}`)}: `, AYN.text(problem(app, one.problem))))),
    AYN.panel(app.t("why.because"), result(app, data)), lens(app, data));
};

AYN.view("why", {
  order: 40,
  params: (app) => ({ answer: Number(app.params.answer ?? 0), method: app.params.method, unit: app.params.unit }),
  render: draw,
});
