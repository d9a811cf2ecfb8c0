"use strict";
/* Anatomy: a model drawn from its config (look/views/anatomy.py), or two side by side; input at the bottom, as in the paper's figure 1.
   A box opens its shapes and costs. Patterns with their reach, positions. */

const WIDE = 248, TALL = 46, GAP = 14, MARGIN = 10, BESIDE = 88; // pixels of a box, between boxes, at the edge, right of a column
const short = (x) => {
  for (const letter of ["", "k", "M", "G", "T"]) {
    if (Math.abs(x) < 999.5) return `${Number(x.toPrecision(3))}${letter}`;
    x /= 1000;
  }
  return `${Number(x.toPrecision(3))}P`;
};

/** A string that may not exist for parts from elsewhere. */
const named = (app, key, otherwise) => (app.t(key) === key ? otherwise : app.t(key));

const clipped = (text, most) => (AYN.plain(text).length > most ? `${AYN.plain(text).slice(0, most - 1)}…` : AYN.plain(text));

/** A box is marked where one of its keys differs. */
const isMarked = (box, differences) => differences.some((one) => one.path === box.path || one.path.startsWith(`${box.path}.`) || box.path.startsWith(`${one.path}.`) || box.path.startsWith(`${one.path}[`));

/** A layer is marked where something differs that is none of its boxes: repeat, wiring, … */
const isLayerMarked = (layer, differences) => differences.some((one) => one.path === layer.path ||
  (one.path.startsWith(`${layer.path}.`) && !/^(mixer|cross|channel)\b/.test(one.path.slice(layer.path.length + 1))));

/** The boxes of a column from the bottom up, each with the layer it belongs to. */
const rising = (column) => [
  ...(column.embed ? [{ box: column.embed }] : []),
  ...column.layers.flatMap((layer, n) => layer.slots.map((box, at) => ({ box, layer, first: at === 0, last: at === layer.slots.length - 1, number: n }))),
  ...(column.head ? [{ box: column.head }] : []),
];

const drawModel = (app, model, differences, select) => {
  const columns = model.columns.map(rising);
  const tallest = Math.max(...columns.map((one) => one.length));
  const width = columns.length * (WIDE + BESIDE) + MARGIN, height = tallest * (TALL + GAP) + 34 + MARGIN;
  const svg = AYN.svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "anatomy", role: "group", "aria-label": AYN.plain(app.t("anatomy.drawing", { name: model.name })) });
  columns.forEach((boxes, at) => {
    const left = at * (WIDE + BESIDE) + MARGIN;
    const top = (n) => height - 30 - (n + 1) * (TALL + GAP);
    svg.append(AYN.svg("text", { class: "column", x: left + WIDE / 2, y: height - 8, "text-anchor": "middle" }, AYN.plain(named(app, `stack.${model.columns[at].name}`, model.columns[at].name))));
    boxes.forEach(({ box, layer, first, last }, n) => {
      const y = top(n);
      if (n < boxes.length - 1) svg.append(AYN.svg("path", { class: "flow", d: `M${left + WIDE / 2} ${y}v${-GAP}` }));
      if (layer && first) {
        const count = layer.slots.length, high = count * (TALL + GAP) - GAP + 10;
        svg.append(AYN.svg("rect", { class: isLayerMarked(layer, differences) ? "layer differs" : "layer", x: left - 6, y: top(n + count - 1) - 5, width: WIDE + 12, height: high, rx: 10 }));
        svg.append(AYN.svg("text", { class: "repeat", x: left + WIDE + 12, y: top(n + count - 1) + high / 2 }, `${layer.repeat}×`),
          AYN.svg("text", { class: "wiring", x: left + WIDE + 12, y: top(n + count - 1) + high / 2 + 15 }, AYN.plain(layer.wiring.kind).slice(0, 12)));
      }
      const open = () => select(box, layer, node);
      const label = `${named(app, `slot.${box.slot}`, box.slot)}: ${box.kind}${box.summary ? `, ${box.summary}` : ""}`;
      const node = AYN.svg("g", { class: `box ${box.slot}${isMarked(box, differences) ? " differs" : ""}`, tabindex: 0, role: "button", "aria-label": AYN.plain(`${label}; ${app.t("anatomy.parameters")} ${box.parameters}`),
        on: { click: open, keydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), open()) } },
      AYN.svg("rect", { x: left, y, width: WIDE, height: TALL, rx: 6 }),
      AYN.svg("text", { class: "kind", x: left + 10, y: y + 19 }, clipped(box.kind, 20)),
      AYN.svg("text", { class: "slot", x: left + WIDE - 10, y: y + 19, "text-anchor": "end" }, named(app, `slot.${box.slot}`, box.slot)),
      AYN.svg("text", { class: "summary", x: left + 10, y: y + 36 }, clipped(box.summary, 25)),
      AYN.svg("text", { class: "figures", x: left + WIDE - 10, y: y + 36, "text-anchor": "end" }, box.tied && !box.parameters ? app.t("anatomy.tied") : short(box.parameters)));
      svg.append(node);
      if (box.slot === "cross" && at > 0) {
        const from = columns[at - 1].length - 1, start = left - BESIDE - WIDE / 2; // the middle of the column that it reads
        svg.append(AYN.svg("path", { class: "flow", d: `M${start} ${top(from)}v-9H${left - 20}V${y + TALL / 2}H${left - 7}` }));
      }
    });
  });
  return AYN.el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": AYN.plain(app.t("anatomy.drawing", { name: model.name })) }, svg);
};

const figures = (app, one, generates) => AYN.el("p", { class: "facts" },
  AYN.el("span", {}, app.t("anatomy.parameters"), " ", AYN.el("b", { class: "num", text: one.parameters.toLocaleString("en") })),
  AYN.el("span", {}, app.t("anatomy.flops"), " ", AYN.el("b", { class: "num", text: short(one.flops) })),
  generates && AYN.el("span", {}, app.t("anatomy.cache"), " ", AYN.el("b", { class: "num", text: `${short(2 * one.state_per_token)}B` })),
  generates && one.state_constant > 0 && AYN.el("span", {}, app.t("anatomy.constant"), " ", AYN.el("b", { class: "num", text: `${short(2 * one.state_constant)}B` })));

const drawBox = (app, model, box, layer) => AYN.el("div", { class: "stack" },
  AYN.el("h3", {}, `${named(app, `slot.${box.slot}`, box.slot)}: `, AYN.text(box.kind)), AYN.el("p", { class: "mono", text: box.path }), figures(app, box, model.generates),
  layer && AYN.el("p", { class: "small soft", text: app.t(layer.share ? "anatomy.shared" : "anatomy.repeated", { count: layer.repeat, wiring: layer.wiring.kind, norm: layer.norm }) }),
  Object.keys(box.config).length > 0 && AYN.el("pre", {}, AYN.prose(JSON.stringify(box.config, null, 1).replace(/^\{\n|\n\}$/g, ""))),
  AYN.table([app.t("anatomy.weight"), app.t("anatomy.shape"), app.t("anatomy.times")], box.shapes.map((one) => [one.name, one.shape.join(" × "), one.times > 1 ? one.times.toLocaleString("en") : ""]), { numeric: [1, 2], label: app.t("anatomy.weights") }));

const drawSide = (app, model, differences) => {
  const details = AYN.el("div", { class: "stack", "aria-live": "polite" }, AYN.el("p", { class: "soft small", text: app.t("anatomy.pick") }));
  let before = null;
  const select = (box, layer, node) => {
    before?.classList.remove("chosen");
    (before = node).classList.add("chosen");
    AYN.clear(details, drawBox(app, model, box, layer));
  };
  return AYN.panel(AYN.text(model.name), model.paper && AYN.el("p", { class: "small soft" }, AYN.text(model.paper)),
    AYN.el("p", { class: "facts" }, AYN.el("span", {}, app.t("anatomy.kind"), " ", AYN.el("b", { text: model.kind })), AYN.el("span", {}, app.t("anatomy.width"), " ", AYN.el("b", { class: "num", text: String(model.width) })),
      AYN.el("span", {}, app.t("anatomy.limit"), " ", AYN.el("b", { class: "num", text: model.limit === null ? "∞" : model.limit.toLocaleString("en") }))),
    figures(app, model, model.generates), drawModel(app, model, differences, select), details,
    AYN.el("details", {}, AYN.el("summary", { text: "YAML" }), AYN.el("pre", { class: "yaml" }, AYN.el("code", {}, AYN.prose(model.yaml)))));
};

const drawDifferences = (app, data) => data.models.length === 2 && AYN.panel(app.t("anatomy.differences"), data.differences.length
  ? AYN.table([app.t("anatomy.key"), ...data.models.map((one) => one.name)], data.differences.map((one) => [AYN.el("code", { text: one.path }), ...[one.left, one.right].map((x) => (x === null ? "–" : String(x)))]), { label: app.t("anatomy.differences") })
  : AYN.el("p", { text: app.t("anatomy.same") }));

/** What Python says in English about positions, in the language of the page. */
const note = (app, text) => AYN.el("p", { class: "small soft" }, AYN.text(named(app, `anatomy.note.${text.toLowerCase().replace(/[^a-z]+/g, "-")}`, text)));

const properties = (app, one) => AYN.el("p", { class: "facts" },
  AYN.el("span", { text: app.t(one.causal ? "anatomy.causal" : one.decodes ? "anatomy.prompt" : "anatomy.notCausal") }),
  AYN.el("span", {}, app.t("anatomy.sees"), " ", AYN.el("b", { class: "num", text: `${AYN.whole(one.reach[0])} … ${AYN.whole(one.reach[1])}` })),
  AYN.el("span", {}, app.t("anatomy.keys"), " ", AYN.el("b", { class: "num", text: String(Number(one.keys.toPrecision(4))) })),
  one.decodes && AYN.el("span", {}, app.t("anatomy.keeps"), " ", AYN.el("b", { text: one.keeps ? one.keeps.filter(Boolean).map((n) => n.toLocaleString("en")).join(" + ") : app.t("anatomy.all") })));

AYN.whole = (x) => (x === null ? "∞" : x.toLocaleString("en").replace("-", "−"));

const drawPattern = (app, pattern, models) => {
  const hops = AYN.tensor(pattern.hops).values;
  const depth = models.flatMap((model, n) => model.columns.flatMap((column) => column.layers.filter((layer) => pattern.used.some((path) => path.startsWith(`${n}:${layer.path}.`))).map((layer) => layer.repeat)));
  const said = pattern.never ? app.t("anatomy.never", { count: pattern.never, layers: pattern.layers }) : app.t("anatomy.hops", { layers: pattern.layers, size: pattern.size });
  return AYN.panel(AYN.el("code", {}, AYN.text(pattern.title)), properties(app, pattern), pattern.notes.map((one) => note(app, one)),
    pattern.used.length > 0 && AYN.el("p", { class: "small mono" }, AYN.text(pattern.used.map((path) => (models.length > 1 ? `${models[Number(path.split(":")[0])].name} ` : "") + path.split(":")[1]).join(", "))),
    AYN.heatmap({ tensor: AYN.tensor(pattern.mask), label: app.t("anatomy.pattern", { pattern: pattern.title }), high: 1, low: 0, size: 300, name: "pattern" }),
    AYN.el("h3", { text: app.t("anatomy.reach") }), AYN.el("p", {}, said, depth.length > 0 && ` ${app.t("anatomy.depth", { count: depth.reduce((a, b) => a + b, 0) })}`),
    pattern.layers > 1 && AYN.curve({ series: [{ name: app.t("anatomy.layers"), x: Array.from(hops, (_, n) => n), y: hops }], xLabel: app.t("anatomy.token"), label: app.t("anatomy.reach") }));
};

const axis = (app, text) => named(app, `anatomy.axis.${text.toLowerCase().replace(/[^a-z]+/g, "-")}`, text);

const drawPositions = (app, one) => {
  const tensor = AYN.tensor(one.values);
  const title = [AYN.el("code", {}, AYN.text(one.title)), one.notes.map((text) => note(app, text))];
  if (one.shape === "curves") {
    const points = tensor.shape[1], x = Array.from({ length: points }, (_, n) => one.start + n);
    const step = Math.max(1, Math.ceil(tensor.shape[0] / 4));
    const series = one.lines.map((name, n) => ({ name, x, y: tensor.values.subarray(n * points, (n + 1) * points) })).filter((_, n) => n % step === 0);
    return AYN.panel(null, title, AYN.curve({ series, xLabel: axis(app, one.across), yLabel: axis(app, one.down), label: one.title }));
  }
  return AYN.panel(null, title, AYN.heatmap({ tensor, kind: "diverging", label: `${one.title}: ${axis(app, one.down)} × ${axis(app, one.across)}`, size: 380, name: "positions" }));
};

const drawAll = (app, found, place) => {
  const data = found.data;
  AYN.fill(place, [
    AYN.el("div", { class: "split" }, data.models.map((model) => drawSide(app, model, data.differences))),
    drawDifferences(app, data),
    data.patterns.length > 0 && [AYN.el("h2", { text: app.t("anatomy.patterns") }), AYN.el("div", { class: "split" }, data.patterns.map((one) => drawPattern(app, one, data.models)))],
    data.positions.length > 0 && [AYN.el("h2", { text: app.t("anatomy.positions") }), AYN.el("div", { class: "split" }, data.positions.map((one) => drawPositions(app, one)))],
  ]);
};

const YAML = "<yaml>";
const NO_INPUT = { text: null, image: null, sound: null, target: null, to: null, source: null, model: null };
/** What the fields ask for. */
const asked = (state) => {
  const found = { ...NO_INPUT, length: state.length };
  for (const [name, choice, text] of [["preset", state.preset, state.yaml], ["other", state.other, state.otherYaml]]) {
    if (choice === YAML) found[name === "preset" ? "yaml" : "other_yaml"] = text;
    else if (choice) found[name] = choice;
  }
  if (state.patterns) found.patterns = state.patterns.split("\n").map((line) => line.trim()).filter(Boolean);
  return found;
};

const form = (app, state, presets, again) => {
  const choices = (none) => [...(none ? [["", app.t("anatomy.none")]] : []), ...presets.map((name) => [name, name]), [YAML, app.t("anatomy.yaml")]];
  const set = (changes) => (Object.assign(state, changes), again());
  const area = (name, hint) => AYN.el("textarea", { rows: 8, class: "mono yaml-field", spellcheck: "false", "aria-label": app.t("anatomy.yaml"), placeholder: hint, on: { change: (event) => set({ [name]: event.target.value }) } }, state[name]);
  return AYN.el("div", { class: "stack" }, AYN.el("div", { class: "row end" },
    AYN.select(app.t("anatomy.model"), choices(false), state.preset, (preset) => set({ preset })),
    AYN.select(app.t("anatomy.other"), choices(true), state.other, (other) => set({ other })),
    AYN.select(app.t("anatomy.length"), [256, 1024, 4096, 32768, 131072].map((n) => [n, n.toLocaleString("en")]), state.length, (length) => set({ length }))),
  AYN.el("div", { class: "split" }, state.preset === YAML && area("yaml", app.t("anatomy.paste")), state.other === YAML && area("otherYaml", app.t("anatomy.paste"))),
  AYN.el("details", { open: Boolean(state.patterns) }, AYN.el("summary", { text: app.t("anatomy.try") }), AYN.el("textarea", { rows: 2, class: "mono yaml-field", spellcheck: "false", placeholder: "causal & window(16) | global(0)", "aria-label": app.t("anatomy.try"), on: { change: (event) => set({ patterns: event.target.value }) } }, state.patterns)));
};

AYN.view("anatomy", {
  order: 70, input: false,
  async open(root, app) {
    const place = AYN.el("div", { class: "stack" }), bar = AYN.el("div");
    const state = { preset: app.params.preset ?? "transformer-base", other: app.params.other ?? "", length: Number(app.params.length ?? 1024), yaml: "", otherYaml: "", patterns: app.params.patterns ?? "" };
    let presets = null;
    const run = () => app.load(place, "anatomy", app.offline ? NO_INPUT : asked(state), (found, inner) => {
      AYN.views.anatomy.document = found;
      app.drawFoot(found);
      presets ??= found.data.presets;
      drawAll(app, found, inner);
    });
    const again = async () => {
      app.remember({ preset: state.preset === YAML ? null : state.preset, other: state.other === YAML ? null : state.other || null,
        length: state.length === 1024 ? null : state.length, patterns: state.patterns || null });
      const drawn = AYN.views.anatomy.document?.data.models[0]?.yaml ?? ""; // the field begins with what is drawn, to be edited
      if (state.preset === YAML) state.yaml ||= drawn;
      if (state.other === YAML) state.otherYaml ||= drawn;
      AYN.clear(bar, form(app, state, presets, again));
      await run();
    };
    AYN.fill(root, [AYN.title(app, "anatomy"), bar, place]);
    await run();
    presets ??= (await app.request("anatomy", {}).catch(() => null))?.data.presets ?? [];
    if (!app.offline) AYN.fill(bar, [form(app, state, presets, again)]);
  },
});
