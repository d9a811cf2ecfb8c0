"use strict";
/* Use it: the model does its task (look/views/use.py). Greedy and sampled answers are streamed by /v1/completions; the document then
   shows the same answer in detail: alternatives for each word, the beam search, alignment, the cut of sampling.

   AYN.answerPart(app, part, {onWord(index), selected})   what was read and the words of an answer, with alignment on hover
   AYN.otherAnswer(app, data)                             answers that are no text: classes, tags, fillings, vectors, segments */

const NUMBERS = ["beam", "temperature", "top_k", "top_p", "min_p", "seed", "tokens", "part"];
const SAMPLING = ["temperature", "top_k", "top_p", "min_p", "seed"];
AYN.percent = (p) => (p > 0 && p < 5e-5 ? "< 0.01 %" : `${(100 * p).toFixed(p >= 0.1 ? 0 : p >= 0.01 ? 1 : 2)} %`);
const { percent } = AYN;

/** What the hash says, as request fields. */
const wanted = (app) => {
  const found = {};
  for (const name of ["method", ...NUMBERS]) {
    const value = app.params[name];
    if (value !== undefined && value !== "") found[name] = name === "method" ? value : Number(value);
  }
  if (app.params.labels) found.labels = app.params.labels.split("\n").filter((line) => line.trim());
  if (app.params.other) found.other = app.params.other;
  if (app.params.prefix) Object.assign(found, { prefix: app.params.prefix.split(",").map(Number), target: null }); // the prefix begins with it
  return found;
};

const taskOf = (app) => (app.models.find((one) => one.id === app.state.model) ?? app.models[0])?.task;

// --- controls ----------------------------------------------------------------------------------------------------------

const number = (app, name, value, more, change) => AYN.field(app.t(`use.${name}`), AYN.el("input", { type: "number", value, size: 5, ...more,
  on: { change: (event) => change(event.target.value) } }));

const controls = (app, again) => {
  const params = wanted(app), task = taskOf(app);
  const set = (changes) => (app.remember({ prefix: null, part: null, ...changes }), again());
  const methods = [["", app.t("use.method.folder")], ["beam", app.t("use.method.beam")], ["greedy", app.t("use.method.greedy")], ["sample", app.t("use.method.sample")]];
  const clear = Object.fromEntries([...SAMPLING, "beam"].map((name) => [name, null]));
  const method = params.method ?? "";
  return AYN.el("div", { class: "row end" },
    AYN.el("div", { class: "field" }, AYN.el("span", { text: app.t("use.method") }), AYN.choice(app.t("use.method"), methods, method,
      (one) => set({ ...clear, method: one || null }))),
    method === "beam" && number(app, "beam", params.beam ?? 4, { min: 2, max: 16 }, (beam) => set({ beam })),
    method === "sample" && [["temperature", 1, { min: 0.05, max: 5, step: 0.05 }], ["top_k", "", { min: 1 }], ["top_p", "", { min: 0.01, max: 1, step: 0.01 }],
      ["min_p", "", { min: 0.01, max: 1, step: 0.01 }], ["seed", 0, { min: 0 }]].map(([name, value, more]) =>
      number(app, name, params[name] ?? value, more, (found) => set({ [name]: found || null }))),
    ["causal-lm", "prefix-lm"].includes(task) && number(app, "tokens", params.tokens ?? 60, { min: 1, max: 512 }, (tokens) => set({ tokens })));
};

/** Fields of tasks that read more than one input. */
const moreInputs = (app, task, again) => {
  const set = (name) => (event) => (app.remember({ [name]: event.target.value || null }), again());
  if (task === "image-text") return AYN.field(app.t("use.labels"), AYN.el("textarea", { rows: 3, dir: "auto", on: { change: set("labels") } }, app.params.labels ?? ""));
  if (task === "classification") return AYN.field(app.t("use.other"), AYN.el("input", { dir: "auto", size: 32, value: app.params.other ?? "", on: { change: set("other") } }));
  return null;
};

// --- streaming ---------------------------------------------------------------------------------------------------------

const streams = (app, params) => !app.offline && ["greedy", "sample"].includes(params.method) && !params.prefix && !app.state.target &&
  ["translation", "seq2seq", "causal-lm", "prefix-lm"].includes(taskOf(app));

/** The pieces of an answer as they are decoded. */
async function* pieces(app, params, signal) {
  const input = app.input();
  const body = { prompt: input.text, stream: true, model: input.model, target_lang: input.to, source_lang: input.source,
    temperature: params.method === "greedy" ? 0 : params.temperature ?? 1, max_tokens: ["causal-lm", "prefix-lm"].includes(taskOf(app)) ? params.tokens ?? 60 : undefined };
  if (params.method === "sample") for (const name of ["top_k", "top_p", "min_p"]) body[name] = params[name];
  if (params.method === "sample") body.seed = params.seed ?? 0;
  const answer = await app.fetch("v1/completions", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new AYN.Failure(event.error.message);
      yield event.choices[0]?.text ?? "";
    }
  }
}

const stream = async (app, params, place) => {
  const shown = AYN.el("p", { class: "answer", "aria-live": "off" });
  const stop = new AbortController();
  const button = AYN.button(app.t("use.stop"), () => stop.abort());
  AYN.clear(place, AYN.panel(app.t("use.answer"), shown, AYN.el("div", { class: "row" }, button)));
  place.addEventListener("ayn-leave", () => stop.abort(), { once: true });
  let text = "";
  try {
    for await (const piece of pieces(app, params, stop.signal)) {
      if (!place.isConnected && text) return stop.abort();
      text += piece;
      AYN.clear(shown, AYN.prose(text), AYN.el("span", { class: "caret", "aria-hidden": "true" }));
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  button.disabled = true;
};

// --- the answer --------------------------------------------------------------------------------------------------------

/** The tokens of a word have one weight: the mean over them. */
const attended = (tensor, first, end) => {
  const wide = tensor.shape[1], sum = new Float32Array(wide);
  for (let row = first; row < end; row++) for (let n = 0; n < wide; n++) sum[n] += tensor.values[row * wide + n] / (end - first);
  return sum;
};

AYN.answerPart = (app, part, { onWord, selected } = {}) => {
  const alignment = part.alignment && AYN.tensor(part.alignment);
  const specials = (tokens) => tokens.map((one) => ({ ...one, special: /^(<[^<>\s]{1,24}>)+$/.test(one.text) }));
  const read = AYN.tokens(specials(part.read), { label: app.t("use.read") });
  const chance = part.words.map(([first, end]) => Math.exp(part.log_probs.slice(first, end).reduce((a, b) => a + b, 0)));
  const items = part.words.map(([first, end], n) => ({ text: part.word_texts[n] ?? "", group: null, id: end - first === 1 ? part.tokens[first].id : null }));
  if (part.finished && part.log_probs.length > part.tokens.length) {
    items.push({ text: app.t("use.end"), special: true });
    chance.push(Math.exp(part.log_probs.at(-1)));
  }
  const said = AYN.tokens(items, { label: app.t("use.words"), weights: chance, under: (n) => percent(chance[n]), onSelect: onWord && ((n) => onWord(n)), selected });
  const show = (event) => {
    const index = [...said.querySelectorAll(".token")].indexOf(event.target.closest?.(".token"));
    if (index < 0 || !alignment) return;
    const [first, end] = part.words[index] ?? [part.tokens.length, part.tokens.length + 1];
    if (first >= alignment.shape[0]) return;
    const weights = attended(alignment, first, Math.min(end, alignment.shape[0]));
    const most = Math.max(...weights) || 1;
    read.paint(Array.from(weights, (x) => x / most));
  };
  said.addEventListener("mouseover", show);
  said.addEventListener("focusin", show);
  return AYN.el("div", { class: "stack" },
    AYN.el("div", {}, AYN.el("h3", { class: "small soft", text: app.t(part.continues ? "use.prompt" : "use.read") }), read),
    AYN.el("div", {}, AYN.el("h3", { class: "small soft", text: app.t("use.words") }), said),
    alignment && AYN.el("p", { class: "small soft", text: app.t("use.hover") }),
    AYN.el("p", { class: "facts" }, [["use.log_prob", part.log_prob], ["use.score", part.score]].map(([key, x]) => AYN.el("span", {}, app.t(key), " ", AYN.el("b", { class: "num", text: AYN.format(x) })))));
};

const bars = (app, label, rows) => AYN.bars(rows.map(([name, value]) => ({ name: AYN.text(name), value, note: percent(value) })), { label });

AYN.otherAnswer = (app, data) => {
  const draw = {
    classes: () => bars(app, app.t("use.classes"), data.scores),
    fillings: () => data.masks.map((mask, n) => AYN.el("div", { class: "stack" }, AYN.el("h3", { text: app.t("use.mask", { number: n + 1 }) }),
      bars(app, app.t("use.mask", { number: n + 1 }), mask.map((one) => [one.text, one.score])))),
    tags: () => AYN.tokens(data.words.map((text) => ({ text })), { label: app.t("use.tags"), under: (n) => data.tags[n], weights: data.tags.map((tag) => (tag === "O" ? 0 : 0.35)) }),
    vectors: () => [AYN.heatmap({ tensor: AYN.tensor(data.cosines), rows: data.lines, columns: data.lines, kind: "diverging", low: -1, high: 1, label: app.t("use.cosines"), name: "cosines" }),
      AYN.el("h3", { text: app.t("use.vectors") }), AYN.heatmap({ tensor: AYN.tensor(data.vectors), rows: data.lines, kind: "diverging", label: app.t("use.vectors"), name: "vectors" })],
    transcript: () => AYN.table([app.t("use.start"), app.t("use.stop.time"), app.t("use.text")], data.segments.map((one) => [one.start.toFixed(2), one.end.toFixed(2), one.text]), { numeric: [0, 1], label: app.t("use.segments") }),
  }[data.shows];
  return AYN.panel(app.t("use.answer"), AYN.el("p", { class: "answer" }, AYN.prose(data.answer)), draw?.());
};

// --- the next word -----------------------------------------------------------------------------------------------------

const cutChart = (app, cut) => {
  const probs = AYN.tensor(cut.probs).values, sampled = AYN.tensor(cut.sampled).values;
  const count = Math.min(48, cut.ids.length), wide = 14, height = 150, most = Math.max(probs[0], sampled[0], 1e-9);
  const svg = AYN.svg("svg", { viewBox: `0 0 ${count * wide} ${height + 4}`, role: "img", preserveAspectRatio: "none", class: "cut",
    "aria-label": AYN.plain(app.t("use.cut.label", { kept: cut.kept, vocab: cut.vocab, mass: percent(cut.mass) })) });
  for (let n = 0; n < count; n++) {
    const tall = (p) => Math.max(p > 0 ? 1 : 0, (p / most) * height);
    const title = AYN.svg("title", {}, AYN.plain(`${cut.texts[n]}: ${percent(probs[n])} → ${percent(sampled[n])}`));
    svg.append(AYN.svg("g", {}, title,
      AYN.svg("rect", { class: cut.kept_shown[n] ? "was" : "was dropped", x: n * wide + 1, width: wide - 2, y: height - tall(probs[n]), height: tall(probs[n]) }),
      AYN.svg("rect", { class: "now", x: n * wide + 4, width: wide - 8, y: height - tall(sampled[n]), height: tall(sampled[n]) })));
  }
  const end = cut.kept_shown.slice(0, count).lastIndexOf(true) + 1;
  if (end > 0 && end < count) svg.append(AYN.svg("line", { class: "edge", x1: end * wide, x2: end * wide, y1: 0, y2: height }));
  return svg;
};

const cutTable = (app, cut) => {
  const probs = AYN.tensor(cut.probs).values, sampled = AYN.tensor(cut.sampled).values;
  return AYN.el("details", { class: "small" }, AYN.el("summary", { text: app.t("heatmap.table") }), AYN.table([app.t("use.token"), app.t("use.before"), app.t("use.after")],
    cut.texts.map((_, n) => [AYN.el("span", {}, AYN.tokenText({ text: cut.texts[n] })), percent(probs[n]), cut.kept_shown[n] ? percent(sampled[n]) : "–"]), { numeric: [1, 2], label: app.t("use.cut") }));
};

const drawCut = (app, cut, go) => AYN.el("div", { class: "stack" }, cutChart(app, cut),
  AYN.el("p", {}, app.t("use.cut.label", { kept: cut.kept.toLocaleString("en"), vocab: cut.vocab.toLocaleString("en"), mass: percent(cut.mass) })),
  AYN.el("div", { class: "row" }, AYN.el("span", {}, app.t("use.drawn"), " ", AYN.el("b", {}, cut.drawn.end ? app.t("use.end") : AYN.tokenText(cut.drawn))),
    !cut.drawn.end && AYN.button(app.t("use.take"), () => go([cut.drawn.id]))), cutTable(app, cut));

const drawNext = (app, place, part, prefix, go) => {
  const options = { temperature: 1, ...Object.fromEntries(SAMPLING.map((name) => [name, wanted(app)[name]]).filter(([, value]) => value !== undefined)) };
  const chart = AYN.el("div", { class: "stack" });
  const ask = () => ({ ...wanted(app), ...options, method: undefined, beam: undefined, prefix, part, target: undefined });
  let timer;
  const change = (name, value) => {
    if (value === null) delete options[name];
    else options[name] = value;
    clearTimeout(timer);
    timer = setTimeout(() => app.load(chart, "next", { ...ask(), top: 0 }, (found, inner) => AYN.fill(inner, [drawCut(app, found.data.cut, go)])), 40);
  };
  const sliders = app.offline ? null : AYN.el("div", { class: "row end" },
    AYN.slider(app.t("use.temperature"), { min: 0.1, max: 2, step: 0.05, value: options.temperature, show: (x) => x.toFixed(2) }, (x) => change("temperature", x)),
    AYN.slider(app.t("use.top_k"), { min: 0, max: 50, value: options.top_k ?? 0, show: (x) => (x ? String(x) : app.t("use.off")) }, (x) => change("top_k", x || null)),
    AYN.slider(app.t("use.top_p"), { min: 0.05, max: 1, step: 0.01, value: options.top_p ?? 1, show: (x) => (x < 1 ? x.toFixed(2) : app.t("use.off")) }, (x) => change("top_p", x < 1 ? x : null)),
    AYN.slider(app.t("use.min_p"), { min: 0, max: 0.5, step: 0.01, value: options.min_p ?? 0, show: (x) => (x ? x.toFixed(2) : app.t("use.off")) }, (x) => change("min_p", x || null)),
    AYN.field(app.t("use.seed"), AYN.el("input", { type: "number", min: 0, value: options.seed ?? 0, size: 5, on: { input: (event) => change("seed", Number(event.target.value) || 0) } })));
  const first = app.offline ? { prefix, part: part || undefined } : ask();
  return app.load(place, "next", first, (found, inner) => {
    AYN.fill(chart, [drawCut(app, found.data.cut, go)]);
    const rows = found.data.choices.map((one) => ({ name: one.end ? app.t("use.end") : AYN.el("span", {}, AYN.tokenText({ text: one.word ?? one.text })), value: Math.exp(one.word_log_prob ?? one.log_prob), note: percent(Math.exp(one.word_log_prob ?? one.log_prob)) }));
    AYN.fill(inner, [AYN.el("div", { class: "split" },
      AYN.panel(app.t("use.instead"), AYN.el("p", { class: "soft small", text: app.t("use.instead.about") }),
        AYN.bars(rows, { label: app.t("use.instead"), onSelect: (n) => found.data.choices[n].ids && go(found.data.choices[n].ids) })),
      AYN.panel(app.t("use.cut"), AYN.el("p", { class: "soft small", text: app.t("use.cut.about") }), sliders, chart))]);
  });
};

// --- the beam search ---------------------------------------------------------------------------------------------------

const MOST_STEPS = 60; // of a search that are drawn
const STEP = 150, NODE = 124, LINE = 23; // pixels between steps, of a node, between candidates

const beamTree = (app, tree) => {
  const steps = Math.max(...tree.step) + 1, path = new Set(tree.path);
  const place = [], counts = [];
  tree.step.forEach((step, n) => (place[n] = (counts[step] = (counts[step] ?? 0) + 1) - 1));
  const width = steps * STEP + 20, height = Math.max(...counts) * LINE + 26;
  const svg = AYN.svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "beam", "aria-label": app.t("use.tree.label", { steps, beams: tree.beams }) });
  const x = (n) => tree.step[n] * STEP + 14, y = (n) => place[n] * LINE + 30;
  for (let step = 0; step < steps; step++) svg.append(AYN.svg("text", { class: "soft", x: step * STEP + 14, y: 12 }, String(step + 1)));
  const order = [...tree.parent.keys()].sort((a, b) => path.has(a) - path.has(b));
  for (const n of order) {
    const from = tree.parent[n];
    const kind = `${tree.fate[n]}${path.has(n) ? " best" : ""}`;
    if (from >= 0) {
      const left = x(from) + NODE - 5, right = x(n) - 5, top = y(from) - 4, low = y(n) - 4;
      svg.append(AYN.svg("path", { class: kind, d: `M${left} ${top}C${left + 14} ${top} ${right - 14} ${low} ${right} ${low}` }));
    }
  }
  for (const n of order) {
    const text = tree.end[n] ? app.t("use.end") : AYN.plain(tree.text[n].trim() || tree.text[n]);
    const short = text.length > 10 ? text.slice(0, 9) + "…" : text;
    svg.append(AYN.svg("g", { class: `${tree.fate[n]}${path.has(n) ? " best" : ""}` },
      AYN.svg("title", {}, AYN.plain(app.t("use.tree.node", { text, chance: percent(Math.exp(tree.log_prob[n])), total: AYN.format(tree.total[n]), score: AYN.format(tree.score[n]), fate: app.t(`use.fate.${tree.fate[n]}`) }))),
      AYN.svg("rect", { x: x(n) - 5, y: y(n) - 15, width: NODE, height: 20, rx: 4 }), AYN.svg("text", { x: x(n), y: y(n) }, short),
      AYN.svg("text", { class: "num", x: x(n) + NODE - 10, y: y(n), "text-anchor": "end" }, AYN.format(tree.fate[n] === "finished" ? tree.score[n] : tree.total[n]))));
  }
  return svg;
};

const beamList = (app, tree) => {
  const children = new Map();
  tree.parent.forEach((from, n) => children.set(from, [...(children.get(from) ?? []), n]));
  const path = new Set(tree.path);
  return AYN.tree(children.get(-1) ?? [], {
    label: app.t("use.tree"), children: (n) => children.get(n) ?? [], open: (n) => path.has(n), dim: (n) => tree.fate[n] === "pruned",
    render: (n) => [AYN.el("b", {}, tree.end[n] ? app.t("use.end") : AYN.tokenText({ text: tree.text[n] })), AYN.el("span", { class: "num", text: percent(Math.exp(tree.log_prob[n])) }),
      AYN.el("span", { class: "num soft", text: `Σ ${AYN.format(tree.total[n])}` }), AYN.el("span", { class: "num soft", text: `${app.t("use.score")} ${AYN.format(tree.score[n])}` }),
      AYN.el("span", { class: path.has(n) ? "tag accent" : "tag", text: app.t(`use.fate.${path.has(n) && tree.fate[n] === "finished" ? "best" : tree.fate[n]}`) })],
  });
};

/** The first steps of a long search: nodes are in the order of steps. */
const firstSteps = (tree) => {
  const count = tree.step.findIndex((step) => step >= MOST_STEPS);
  if (count < 0) return tree;
  const columns = ["parent", "step", "token", "text", "end", "log_prob", "total", "score", "fate"];
  return { ...tree, ...Object.fromEntries(columns.map((name) => [name, tree[name].slice(0, count)])), path: tree.path.filter((n) => n < count) };
};

const drawTree = (app, whole, tree = firstSteps(whole)) => AYN.panel(app.t("use.tree"), AYN.el("p", { class: "soft small", text: app.t("use.tree.about", { beams: tree.beams, penalty: tree.length_penalty }) }),
  tree !== whole && AYN.el("p", { class: "note", text: app.t("use.tree.part", { count: MOST_STEPS }) }),
  AYN.el("p", { class: "legend-row small" }, ["kept", "pruned", "finished", "best"].map((one) => AYN.el("span", { class: `swatch ${one}`, text: app.t(`use.fate.${one}`) }))),
  AYN.el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": app.t("use.tree") }, beamTree(app, tree)),
  AYN.el("details", {}, AYN.el("summary", { text: app.t("use.tree.list") }), beamList(app, tree)));

// --- the whole ---------------------------------------------------------------------------------------------------------

const drawText = (app, found, place, again) => {
  const data = found.data;
  const params = wanted(app);
  let at = Math.max(0, data.parts.findIndex((part) => part.number === (params.part ?? 0)));
  const details = AYN.el("div", { class: "stack" });
  const show = (number) => {
    const part = data.parts[number];
    if (!part) return AYN.clear(details);
    const next = AYN.el("div", { class: "stack" });
    const go = (prefix) => (ids) => (app.remember({ prefix: [...prefix, ...ids].join(","), part: part.number || null }), again());
    const onWord = (index) => {
      const begin = part.words[index]?.[0] ?? part.tokens.length;
      const prefix = part.tokens.slice(0, begin).map((one) => one.id);
      drawNext(app, next, part.number, prefix, go(prefix));
    };
    AYN.clear(details, AYN.panel(app.t("use.how"), AYN.el("p", { class: "soft small", text: app.t("use.how.about") }), AYN.answerPart(app, part, { onWord }),
      part.prefix > 0 && AYN.el("div", { class: "row" }, AYN.el("span", { class: "tag warm", text: app.t("use.forced", { count: part.prefix }) }),
        AYN.button(app.t("use.free"), () => (app.remember({ prefix: null, part: null }), again())))), next,
      part.tree && drawTree(app, part.tree),
      part.alignment && AYN.el("details", { class: "panel" }, AYN.el("summary", {}, app.t("use.alignment")), AYN.heatmap({ tensor: AYN.tensor(part.alignment), rows: [...part.tokens, { text: app.t("use.end") }], columns: part.read, label: app.t("use.alignment"), name: "alignment" })));
  };
  AYN.fill(place, [
    AYN.panel(app.t("use.answer"), AYN.el("p", { class: "answer" }, AYN.prose(data.answer)),
      AYN.el("p", { class: "facts" }, data.route?.length > 1 && AYN.el("span", {}, app.t("use.route"), " ", AYN.el("b", { text: data.route.join(" → ") })),
        data.confidence !== null && data.confidence !== undefined && AYN.el("span", {}, app.t("use.confidence"), " ", AYN.el("b", { text: percent(data.confidence) })),
        data.decoding && AYN.el("span", {}, app.t("use.method"), " ", AYN.el("b", { text: app.t(`use.method.${data.decoding.method}`) + (data.decoding.method === "beam" ? ` ${data.decoding.beam}` : "") }))),
      data.notes.map((note) => AYN.el("p", { class: "note" }, AYN.text(note)))),
    data.parts.length > 1 && AYN.select(app.t("use.part"), data.parts.map((part, n) => [n, `${n + 1}. ${part.text.slice(0, 60)}`]), at, (number) => show((at = number))),
    details]);
  show(at);
  if (data.left_out) AYN.fill(place, [AYN.el("p", { class: "note", text: app.t("use.left_out", { count: data.left_out }) })]);
};

const draw = (app, found, place, again) => {
  AYN.views.use.document = found;
  app.drawFoot(found);
  if (found.data.shows === "text") drawText(app, found, place, again);
  else AYN.fill(place, [AYN.otherAnswer(app, found.data), found.data.notes.map((note) => AYN.el("p", { class: "note" }, AYN.text(note)))]);
};

AYN.view("use", {
  order: 10,
  async open(root, app) {
    const task = taskOf(app);
    if (!app.offline && !app.params.method && ["causal-lm", "prefix-lm"].includes(task)) Object.assign(app.params, { method: "sample", temperature: "0.8" });
    const bar = AYN.el("div"), place = AYN.el("div", { class: "stack" });
    const generates = !app.offline && ["translation", "seq2seq", "causal-lm", "prefix-lm", "span-corruption"].includes(task);
    const again = () => {
      AYN.clear(bar, generates ? controls(app, again) : moreInputs(app, task, again));
      return run();
    };
    const run = async () => {
      const params = wanted(app);
      if (streams(app, params)) {
        try {
          await stream(app, params, place);
        } catch (error) {
          return AYN.clear(place, app.failure(error));
        }
        if (!place.isConnected) return; // the text has changed meanwhile
      }
      return app.load(place, "use", params, (found, inner) => draw(app, found, inner, again));
    };
    AYN.fill(root, [AYN.title(app, "use"), bar, place]);
    if (!app.offline) AYN.fill(bar, [generates ? controls(app, again) : moreInputs(app, task, again)]);
    if (!app.offline && !app.hasInput()) return AYN.fill(place, [AYN.el("p", { class: "panel", text: app.t(`input.missing.${app.inputKind()}`) })]);
    AYN.views.use.document = null;
    const done = run();
    if (!streams(app, wanted(app))) await done;
  },
  /** A document of another model, as in a replay: without controls. */
  render(root, found, app) {
    const place = AYN.el("div", { class: "stack" });
    const again = () => app.load(place, "use", wanted(app), (other, inner) => draw(app, other, inner, again));
    AYN.fill(root, [place]);
    draw(app, found, place, again);
  },
});
