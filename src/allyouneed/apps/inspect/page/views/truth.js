"use strict";
/* Truth: how far every shown number is from a plain float64 recomputation (look/views/truth.py). */

const relative = (site) => site.difference / Math.max(site.largest, 1e-30);

AYN.view("truth", {
  order: 25,
  render(root, found, app) {
    const { sites, worst, relative: most, stored, answers } = found.data;
    const order = { computed: (list) => list, worst: (list) => [...list].sort((a, b) => relative(b) - relative(a)) };
    const place = AYN.el("div");
    const draw = (how) => AYN.clear(place, AYN.table(
      [app.t("truth.site"), app.t("walk.shape"), app.t("truth.largest"), app.t("truth.difference"), app.t("truth.relative")],
      order[how](sites).map((one) => [AYN.el("code", { text: one.name }), AYN.el("span", { class: "nowrap", text: one.shape.join(" × ") }), AYN.format(one.largest), AYN.format(one.difference), AYN.format(relative(one))]),
      { numeric: [2, 3, 4], label: app.t("truth.title") }));
    draw("computed");
    AYN.fill(root, [AYN.title(app, "truth"), AYN.panel(null,
      AYN.el("p", { class: "big" }, AYN.el("b", { class: "num", text: AYN.format(most) }), " ", app.t("truth.worst"), " ", AYN.el("code", { text: worst })),
      answers.of ? AYN.el("p", { text: app.t("truth.answers", answers) }) : null,
      stored && AYN.el("p", { class: "note", text: app.t("truth.stored", { stored }) })),
    AYN.panel(app.t("truth.all", { count: sites.length }), AYN.el("div", { class: "row" }, AYN.choice(app.t("truth.order"), [["computed", app.t("truth.computed")], ["worst", app.t("truth.largest.first")]], "computed", draw),
      AYN.button(app.t("csv"), () => AYN.download("truth.csv", "site,largest,difference\n" + sites.map((one) => [AYN.quoted(one.name), one.largest, one.difference].join(",")).join("\n") + "\n"), { class: "quiet" })), place)]);
  },
});
