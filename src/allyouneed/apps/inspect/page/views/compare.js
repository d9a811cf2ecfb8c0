"use strict";
/* Two models, one input (look/views/compare.py): the answers side by side, and the log-probability that each model gives to every word of
   both. */

const drawText = (app, one, names) => {
  const chance = (by) => by.log_probs.map((x) => Math.exp(x));
  return AYN.panel(AYN.text(one.text),
    one.by.map((by, n) => AYN.el("div", {}, AYN.el("h3", { class: "small soft" }, AYN.text(names[n])),
      AYN.tokens(one.words.map((text) => ({ text })), { label: app.t("compare.words", { model: names[n] }), weights: chance(by), under: (at) => AYN.percent(chance(by)[at]) }))),
    AYN.table([app.t("compare.model"), app.t("compare.total"), app.t("compare.end"), app.t("compare.tokens"), app.t("compare.character")],
      one.by.map((by, n) => [names[n], by.total, by.end ?? "–", String(by.tokens), by.per_character]), { numeric: [1, 2, 3, 4], label: `${app.t("compare.scores")}: ${AYN.plain(one.text).slice(0, 80)}` }),
    AYN.el("h3", { class: "small", text: app.t("compare.gap", { left: names[0], right: names[1] }) }),
    AYN.bars(one.words.map((text, at) => ({ name: text, value: one.by[0].log_probs[at] - one.by[1].log_probs[at] })), { signed: true, label: app.t("compare.gap", { left: names[0], right: names[1] }) }));
};

const drawSide = (app, side, name) => {
  const data = side.data;
  const facts = ["task", "parameters", "dtype"].map((one) => AYN.el("span", {}, app.t(`model.${one}`), " ", AYN.el("b", {}, AYN.text(one === "parameters" ? Number(side.model[one]).toLocaleString("en") : side.model[one]))));
  const inner = data.shows !== "text" ? AYN.otherAnswer(app, data) : [AYN.el("p", { class: "answer" }, AYN.prose(data.answer)), data.parts.map((part) => AYN.answerPart(app, part)),
    data.parts.filter((part) => part.alignment).map((part) => AYN.el("details", {}, AYN.el("summary", { text: app.t("use.alignment") }),
      AYN.heatmap({ tensor: AYN.tensor(part.alignment), rows: [...part.tokens, { text: app.t("use.end") }], columns: part.read, label: `${name}: ${app.t("use.alignment")}`, size: 400, name: "alignment" })))];
  return AYN.panel(AYN.text(name), AYN.el("p", { class: "facts" }, facts), inner, data.notes.map((note) => AYN.el("p", { class: "note" }, AYN.text(note))));
};

const draw = (app, found, place) => {
  const { sides, texts } = found.data;
  const names = found.request.models;
  AYN.views.compare.document = found;
  app.drawFoot(found);
  AYN.fill(place, [AYN.el("div", { class: "split" }, sides.map((side, n) => drawSide(app, side, names[n]))),
    texts.length ? [AYN.el("h2", { text: app.t("compare.scores") }), AYN.el("p", { class: "soft small", text: app.t("compare.scores.about") }), AYN.el("div", { class: "split" }, texts.map((one) => drawText(app, one, names)))]
      : sides.every((side) => side.data.shows === "text") && AYN.el("p", { class: "note", text: app.t("compare.parts") })]);
};

AYN.view("compare", {
  order: 75,
  async open(root, app) {
    const place = AYN.el("div", { class: "stack" });
    const names = app.models.map((one) => one.id);
    const chosen = [app.params.left ?? app.state.model ?? names[0], app.params.right ?? names.find((name) => name !== (app.state.model ?? names[0])) ?? names[0]];
    const run = () => app.load(place, "compare", app.offline ? {} : { models: chosen, model: null }, (found, inner) => draw(app, found, inner));
    const pick = (at, label) => AYN.select(label, names.map((name) => [name, name]), chosen[at], (name) => ((chosen[at] = name), app.remember({ left: chosen[0], right: chosen[1] }), run()));
    AYN.fill(root, [AYN.title(app, "compare"), !app.offline && AYN.el("div", { class: "row end" }, pick(0, app.t("compare.left")), pick(1, app.t("compare.right"))),
      !app.offline && names.length < 2 && AYN.el("div", { class: "note stack" }, AYN.el("p", { text: app.t("compare.one") }), AYN.code("allyouneed serve translator FOLDER")), place]);
    if (!app.offline && !app.hasInput()) return AYN.fill(place, [AYN.el("p", { class: "panel", text: app.t(`input.missing.${app.inputKind()}`) })]);
    await run();
  },
});
