"use strict";
/* What if? Leave out tokens, heads or blocks, move positions, edit a number, patch from another sentence (look/views/what_if.py).
   The changes are in the hash; without any, only the controls are shown. */

const list = (text) => (text ? text.split(",").filter((one) => one.trim() !== "") : []);
const numbers = (text) => list(text).map(Number);

/** The changes of the hash as request fields. */
const wanted = (params) => {
  const found = {};
  if (params.mask) found.mask = numbers(params.mask);
  if (params.place) found.place = numbers(params.place);
  if (params.stack && (found.mask || found.place)) found.stack = params.stack;
  if (params.ablate) found.ablate = list(params.ablate);
  if (params.edit_site && params.edit_at && params.edit_number) found.edit = [{ site: params.edit_site, at: numbers(params.edit_at), number: Number(params.edit_number) }];
  if (params.patch_site && params.patch_text) {
    found.patch = [{ site: params.patch_site, text: params.patch_text }];
    if (params.patch_positions) found.patch[0].positions = numbers(params.patch_positions);
  }
  const any = Object.keys(found).length > 0;
  if (any && params.rewrite) found.rewrite = true;
  return any ? found : null;
};

/** Heads of each sub-layer, by the shapes of the walk. */
const headCounts = (boxes) => {
  const found = {};
  for (const box of boxes) if (/^(.*)\.heads$/.test(box.name) && box.shape.length === 4) found[box.name.slice(0, -6)] = box.shape[1];
  return found;
};

const tokenControl = (app, data, change) => {
  const masked = new Set(numbers(app.params.mask));
  const chosen = app.params.stack ?? Object.keys(data.tokens)[0];
  return Object.entries(data.tokens).map(([stack, tokens]) => AYN.el("div", {}, AYN.el("h3", { class: "small soft", text: AYN.stackName(app, stack) }),
    AYN.tokens(tokens, { label: AYN.stackName(app, stack), multiple: true, off: stack === chosen ? masked : new Set(), onSelect: (index) => {
      const own = stack === chosen ? new Set(masked) : new Set();
      if (!own.delete(index)) own.add(index);
      change({ stack, mask: [...own].sort((a, b) => a - b).join(",") || null });
    } })));
};

const partControl = (app, data, change) => {
  const off = new Set(list(app.params.ablate)), heads = headCounts(data.boxes), names = new Set(data.boxes.map((one) => one.name));
  const toggle = (name, label) => AYN.button(label, () => {
    const next = new Set(off);
    if (!next.delete(name)) next.add(name);
    change({ ablate: [...next].join(",") || null });
  }, { "aria-pressed": String(off.has(name)), "aria-label": name, title: name, class: "toggle" });
  const rows = Object.entries(data.stacks).flatMap(([stack, count]) => Array.from({ length: count }, (_, block) => {
    const base = `${stack}.${block}`, parts = ["mixer", "cross", "channel"].map((one) => `${base}.${one}`).filter((one) => names.has(one));
    return AYN.el("div", { class: "row tight" }, toggle(base, app.t("walk.block", { stack: AYN.stackName(app, stack), block })),
      parts.map((part) => [toggle(part, part.split(".").at(-1)), Array.from({ length: heads[part] ?? 0 }, (_, head) => toggle(`${part}.heads[${head}]`, String(head)))]));
  }));
  return AYN.el("div", { class: "scroll tall stack", tabindex: 0, role: "region", "aria-label": app.t("what.parts") }, rows);
};

const textField = (app, label, name, hint, wide) => AYN.el("label", { class: wide ? "field wide" : "field" }, AYN.el("span", { text: label }),
  AYN.el("input", { value: app.params[name] ?? "", placeholder: hint, dir: "auto", size: wide ? 24 : 10, data: { param: name } }));

const siteField = (app, data, name) => AYN.field(app.t("what.site"), AYN.el("select", { data: { param: name } }, AYN.el("option", { value: "" }, "–"),
  data.boxes.map((one) => AYN.el("option", { value: one.name, selected: one.name === app.params[name] }, `${one.name} (${one.shape.join(" × ")})`))));

const moreControls = (app, data, change) => {
  const root = AYN.el("details", { open: Boolean(app.params.place || app.params.edit_site || app.params.patch_site) }, AYN.el("summary", { text: app.t("what.more") }), AYN.el("div", { class: "stack" },
    AYN.el("div", { class: "row end" }, textField(app, app.t("what.place"), "place", "0,1,1,2", true)),
    AYN.el("div", { class: "row end" }, AYN.el("b", { text: app.t("what.edit") }), siteField(app, data, "edit_site"), textField(app, app.t("what.at"), "edit_at", "0,5"), textField(app, app.t("what.number"), "edit_number", "0.0")),
    AYN.el("div", { class: "row end" }, AYN.el("b", { text: app.t("what.patch") }), siteField(app, data, "patch_site"), textField(app, app.t("what.text"), "patch_text", "…", true), textField(app, app.t("what.positions"), "patch_positions", app.t("what.all"))),
    AYN.el("div", {}, AYN.button(app.t("what.apply"), () => change(Object.fromEntries([...root.querySelectorAll("[data-param]")].map((one) => [one.dataset.param, one.value.trim() || null]))), { class: "primary" }))));
  return root;
};

const delta = (one) => (one.after === null ? AYN.el("span", { text: "–" }) : AYN.el("span", { class: one.after < one.before ? "num down" : "num up", text: AYN.format(one.after - one.before) }));

const spread = (data) => {
  const found = data.sites.filter((one) => one.difference !== null && one.difference > 0).map((one) => ({ name: AYN.el("code", { text: one.name }), value: one.difference / Math.max(one.largest, 1e-30) }));
  return found.length > 40 ? found.filter((one, n) => /\.\d+$|^head$|\.end$/.test(one.name.textContent)) : found;
};

const result = (app, found, place) => {
  const data = found.data;
  AYN.views.what_if.document = found;
  app.python(found.python);
  const choice = (one) => one && AYN.chip(one);
  AYN.fill(place, [AYN.panel(app.t("what.result", { changed: data.changed, of: data.answers.length }),
    AYN.table([app.t("what.answer"), app.t("what.before"), app.t("what.after"), app.t("what.delta"), app.t("what.now")],
      data.answers.map((one) => [choice(one), AYN.format(one.before), AYN.format(one.after), delta(one), one.choice_after ? AYN.chip(one.choice_after, undefined, { class: one.choice_after.id !== one.choice_before.id ? "chosen" : "" }) : "–"]), { numeric: [1, 2, 3], label: app.t("what.answer") }),
    data.rewritten && AYN.el("div", { class: "stack" }, AYN.el("h3", { text: app.t("what.rewritten") }), AYN.tokens(data.rewritten, { label: app.t("what.rewritten") })),
    AYN.el("h3", { text: app.t("python") }), AYN.code(found.python)),
  AYN.panel(app.t("what.spread"), AYN.el("p", { class: "soft small", text: app.t("what.spread.about") }), AYN.bars(spread(data), { label: app.t("what.spread") }))]);
};

AYN.view("what_if", {
  order: 50,
  async open(root, app) {
    if (!app.offline && !app.hasInput()) throw new AYN.Failure(app.t(`input.missing.${app.inputKind()}`));
    const first = app.offline && !app.names.includes("walk") ? null : await app.ask("walk", { position: 0 });
    const controls = AYN.el("div", { class: "stack" }), place = AYN.el("div", { class: "stack" });
    const change = (params) => {
      app.remember(params);
      refresh();
    };
    const refresh = () => {
      if (first) {
        const data = first.data, focused = [...controls.querySelectorAll("[tabindex], button, input, select")].indexOf(document.activeElement);
        AYN.clear(controls, AYN.panel(app.t("what.tokens"), tokenControl(app, data, change)), AYN.panel(app.t("what.parts"), partControl(app, data, change)),
          AYN.panel(null, moreControls(app, data, change)),
          AYN.el("div", { class: "row" }, AYN.check(app.t("what.rewrite"), app.params.rewrite === "1", (on) => change({ rewrite: on ? "1" : null })),
            AYN.button(app.t("what.reset"), () => change(Object.fromEntries(Object.keys(app.params).map((one) => [one, null]))), { disabled: !wanted(app.params) })));
        if (focused >= 0) [...controls.querySelectorAll("[tabindex], button, input, select")][focused]?.focus();
      }
      const sent = wanted(app.params) ?? (first ? null : {});
      if (!sent) AYN.clear(place, AYN.el("p", { class: "waiting", text: app.t("what.nothing") }));
      return sent && app.load(place, "what_if", sent, (found) => result(app, found, place));
    };
    AYN.fill(root, [AYN.title(app, "what"), first ? AYN.el("div", { class: "split" }, controls, place) : place]);
    this.document = first;
    await refresh();
  },
});
