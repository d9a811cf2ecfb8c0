"use strict";
/* The walk: the way of one input through the model, box by box, and of its answer, step by step (look/views/walk.py).
   Boxes of a block are drawn when the block is opened: a model of a hundred blocks stays light. */

const OPEN = 1; // blocks of each stack that are open at first

/** Boxes in the order of computation, cut into runs that share stack and block. */
const sections = (boxes) => {
  const found = [];
  for (const box of boxes) {
    const key = `${box.stack ?? box.name.split(".")[0]}|${box.block}`;
    if (found.at(-1)?.key !== key) found.push({ key, stack: box.stack, block: box.block, boxes: [] });
    found.at(-1).boxes.push(box);
  }
  return found;
};

const shape = (sizes) => sizes.join(" × ") || "1";

const role = (name) => {
  const last = name.split(".").at(-1);
  return /^(in|\d+)$/.test(last) ? "stream" : ["mixer", "cross", "channel"].includes(last) ? "sub" : "inner";
};

const facts = (app, box) => AYN.el("p", { class: "facts" },
  AYN.el("span", {}, app.t("walk.shape"), " ", AYN.el("b", { class: "num", text: shape(box.shape) })),
  box.kind && AYN.el("span", {}, box.slot, " ", AYN.el("b", { text: box.kind })),
  box.position !== null && AYN.el("span", { text: app.t("walk.position", { position: box.position }) }));

const csvButton = (app, box) => AYN.button(app.t("walk.csv"), async (event) => {
  const button = event.target;
  button.disabled = true;
  try {
    const found = await app.ask("value", { site: box.name });
    AYN.download(`${box.name}.csv`, AYN.csv(AYN.tensor(found.data.tensor)));
  } catch (error) {
    button.after(app.failure(error));
  }
  button.disabled = false;
}, { class: "quiet", "aria-label": `${app.t("walk.csv")}: ${box.name}` });

const drawBox = (app, box) => AYN.el("article", { class: `box ${role(box.name)}`, data: { site: box.name } },
  AYN.el("header", { class: "row" }, AYN.el("h4", { class: "mono", text: box.name }), csvButton(app, box)),
  AYN.el("p", {}, AYN.formula(box.formula || app.t("walk.value"))),
  facts(app, box),
  box.numbers.length ? AYN.numbers(box.numbers.map((x) => x ?? -Infinity)) : AYN.el("p", { class: "small soft", text: app.t("walk.large") }),
  (box.paper || box.file) && AYN.el("p", { class: "small soft source" }, box.paper && AYN.text(box.paper),
    box.equation && [" ", AYN.el("span", { class: "tag accent", text: box.equation })], " ", box.file && AYN.el("code", { text: box.file })));

const sectionTitle = (app, section) => {
  const part = section.boxes[0].name.split(".")[0];
  if (section.stack === null) return app.known(`walk.part.${part}`, part);
  const stack = AYN.stackName(app, section.stack);
  return section.block === null ? app.t("walk.end", { stack }) : app.t("walk.block", { stack, block: section.block });
};

const drawSection = (app, section, open) => {
  const inside = AYN.el("div", { class: "flow" });
  const root = AYN.el("details", { class: "panel section", open }, AYN.el("summary", {}, AYN.el("h3", { class: "inline", text: sectionTitle(app, section) }),
    " ", AYN.el("span", { class: "tag", text: app.t("walk.boxes", { count: section.boxes.length }) })), inside);
  const fill = () => inside.childElementCount || AYN.fill(inside, section.boxes.map((box) => drawBox(app, box)));
  if (open) fill();
  root.addEventListener("toggle", () => root.open && fill());
  return root;
};

const drawTokens = (app, data, pick) => AYN.panel(app.t("walk.tokens"), AYN.el("p", { class: "soft small", text: app.t("walk.tokens.about") }),
  Object.entries(data.tokens).map(([stack, tokens]) => {
    const at = Math.min(Number(app.params.position ?? 0), tokens.length - 1);
    return AYN.el("div", {}, AYN.el("h3", { class: "small soft", text: AYN.stackName(app, stack) }),
      AYN.tokens(tokens, { label: AYN.stackName(app, stack), selected: at, onSelect: pick }));
  }));

const candidates = (app, answer) => AYN.bars(answer.candidates.map((one) => ({ name: AYN.el("span", {}, AYN.tokenText(one)), value: Math.exp(one.log_prob), note: (100 * Math.exp(one.log_prob)).toFixed(1) + " %" })),
  { label: app.t("walk.candidates") });

const cacheRow = (app, state, most) => {
  const sizes = Object.entries(state.tensors).map(([name, sides]) => `${name} ${shape(sides)}`).join(", ");
  return [state.site, AYN.el("span", { class: "nowrap", text: app.known(`state.${state.kind}`, state.word) }), AYN.el("span", { class: "nowrap", text: sizes }),
    AYN.el("span", { class: "meter", style: { "--part": String(state.bytes / (most || 1)) }, "aria-hidden": "true" }), state.bytes.toLocaleString("en")];
};

const drawStep = (app, data, place, number) => {
  const step = data.steps[number];
  const tokens = data.tokens[data.answerStack];
  const answer = data.answers.find((one) => one.position === step.position);
  const most = Math.max(...data.steps.at(-1).states.map((one) => one.bytes), 1);
  AYN.clear(place,
    AYN.tokens(tokens, { label: app.t("walk.read"), later: step.position + 1, selected: step.position, onSelect: () => {} }),
    AYN.el("div", { class: "split" },
      AYN.el("div", { class: "stack" }, AYN.el("h3", { text: app.t("walk.choice") }),
        answer ? [AYN.el("p", {}, app.t("walk.chosen"), " ", AYN.chip(answer), " ", AYN.el("span", { class: "num soft", text: `log p = ${AYN.format(answer.log_prob)}` })), candidates(app, answer)]
          : AYN.el("p", { class: "soft", text: app.t("walk.no.answer") })),
      AYN.el("div", { class: "stack" }, AYN.el("h3", { text: app.t("walk.cache", { bytes: step.bytes.toLocaleString("en") }) }),
        AYN.table([app.t("walk.site"), app.t("walk.kind"), app.t("walk.tensors"), "", app.t("walk.bytes")], step.states.map((one) => cacheRow(app, one, most)), { numeric: [4], label: app.t("walk.states") }))));
};

const drawSteps = (app, data) => {
  const place = AYN.el("div", { class: "stack" });
  let number = Math.min(Number(app.params.step ?? 0), data.steps.length - 1);
  const shown = AYN.el("output", { class: "num" });
  const back = AYN.button(app.t("walk.back"), () => go(number - 1));
  const next = AYN.button(app.t("walk.next"), () => go(number + 1), { class: "primary" });
  const go = (wanted) => {
    number = Math.max(0, Math.min(wanted, data.steps.length - 1));
    back.disabled = number === 0;
    next.disabled = number === data.steps.length - 1;
    const step = data.steps[number];
    shown.textContent = app.t(step.read > 1 ? "walk.prefill" : "walk.step", { number: number + 1, of: data.steps.length, count: step.read });
    app.remember({ step: number || null });
    drawStep(app, data, place, number);
    app.announce(shown.textContent);
  };
  const root = AYN.panel(app.t("walk.steps"), AYN.el("p", { class: "soft", text: app.t("walk.steps.about") }), AYN.el("div", { class: "row" }, back, next, shown), place);
  go(number);
  return root;
};

AYN.view("walk", {
  order: 20,
  params: (app) => ({ position: Number(app.params.position ?? 0) }),
  render(root, found, app) {
    const data = { ...found.data };
    data.answerStack = Object.keys(data.tokens).at(-1);
    const flow = AYN.el("div", { class: "walk" });
    const draw = (boxes) => {
      const open = new Set([...flow.querySelectorAll("details[open]")].map((one) => one.dataset.key));
      const parts = sections(boxes);
      const first = !flow.childElementCount;
      AYN.clear(flow, parts.map((one) => {
        const section = drawSection(app, one, first ? one.stack === null || one.block === null || one.block < OPEN : open.has(one.key));
        section.dataset.key = one.key;
        return section;
      }));
    };
    const pick = async (position) => {
      app.remember({ position });
      try {
        const next = await app.ask("walk", { position });
        draw(next.data.boxes);
        app.python(next.python);
        const fresh = drawTokens(app, next.data, pick);
        const focused = tokens.contains(document.activeElement);
        const stack = [...tokens.querySelectorAll(".tokens")].findIndex((one) => one.contains(document.activeElement));
        tokens.replaceWith(fresh);
        tokens = fresh;
        if (focused) fresh.querySelectorAll(".tokens")[stack]?.querySelector("[tabindex='0']")?.focus();
      } catch (error) {
        tokens.append(app.failure(error));
      }
    };
    let tokens = drawTokens(app, data, pick);
    AYN.fill(root, [AYN.title(app, "walk"), tokens, Object.entries(data.media ?? {}).map(([stack, media]) => AYN.panel(AYN.stackName(app, stack), AYN.media(app, media))),
      data.steps.length ? drawSteps(app, data) : data.answers.length ? AYN.panel(app.t("walk.choice"), data.answers.slice(0, 8).map((one) => AYN.el("div", { class: "stack" }, AYN.el("p", {}, app.t("walk.chosen"), " ", AYN.chip(one)), candidates(app, one)))) : null,
      AYN.el("h2", { text: app.t("walk.flow") }), flow]);
    draw(data.boxes);
  },
});
