"use strict";
/* Any mixer as a matrix: who reads whom (look/views/mixing.py). A grid of all heads, one head large, the average, rollout, the
   pattern; routing of experts; patches over the image and frames over the spectrogram. */

const half = (app, tokens) => (Number.isFinite(tokens) ? app.t("mixing.half", { tokens: AYN.format(tokens) }) : null);

const labels = (data, stack) => (stack ? data.tokens[stack] : []);

const about = (app, data) => AYN.el("div", { class: "stack" },
  AYN.el("p", { text: app.t(`mixing.how.${data.how.replace(" ", "_")}`) }),
  AYN.el("p", { class: "facts" },
    data.residual !== null && AYN.el("span", {}, app.t("mixing.residual"), " ", AYN.el("b", { class: `num ${data.residual <= data.limit ? "up" : "down"}`, text: AYN.format(data.residual) }), ` (≤ ${AYN.format(data.limit)})`),
    data.sampled && AYN.el("span", { class: "tag warm", text: app.t("mixing.sampled") }),
    data.constant && AYN.el("span", { class: "tag", text: app.t("mixing.constant") }),
    data.state_bytes !== null && AYN.el("span", {}, app.t("mixing.state"), " ", AYN.el("b", { class: "num", text: data.state_bytes.toLocaleString("en") })),
    data.pattern && AYN.el("span", {}, app.t("mixing.pattern"), " ", AYN.el("code", {}, AYN.text(data.pattern)))));

/** What can be shown large. */
const choices = (app, data) => {
  const unit = app.t(data.channels ? "mixing.channel" : "mixing.head");
  const found = [["average", app.t("mixing.average")], ...data.heads.map((head) => [`head ${head}`, `${unit} ${head}`])];
  if (data.queries && data.how !== "jacobian") found.push(["rollout", app.t("mixing.rollout")]);
  if (data.mask) found.push(["mask", app.t("mixing.mask")]);
  return found;
};

const grid = (app, data, pick) => {
  const all = AYN.tensor(data.grid);
  const kind = AYN.range(all.values)[0] < 0 ? "diverging" : "sequential";
  return AYN.el("div", { class: "grid", role: "group", "aria-label": app.t("mixing.grid") }, data.heads.map((head, n) => AYN.button(
    [AYN.thumbnail(AYN.take(all, n), kind), `${data.channels ? app.t("mixing.channel") : app.t("mixing.head")} ${head}`, data.half_life && half(app, data.half_life[n])].filter(Boolean).map((one) => (one instanceof Node ? one : AYN.el("span", { text: one }))),
    () => pick(`head ${head}`), { data: { shown: `head ${head}` } })));
};

/** The matrix of a choice: from this document if it is there, else asked for. */
const matrixOf = async (app, data, shown) => {
  if (shown === "average") return { tensor: AYN.tensor(data.average) };
  if (shown === "mask") return { tensor: AYN.tensor(data.mask) };
  if (shown === "rollout") {
    const found = data.rollout ? data : (await app.ask("mixing", { site: data.site, rollout: true })).data;
    const stacks = Object.keys(found.rollout ?? {});
    const keys = stacks.includes(data.keys) ? data.keys : stacks[0];
    if (!keys) throw new AYN.Failure(app.t("mixing.no.rollout"));
    return { tensor: AYN.tensor(found.rollout[keys]), keys };
  }
  const head = Number(shown.split(" ")[1]), all = AYN.tensor(data.grid);
  if (!all.pooled) return { tensor: AYN.take(all, data.heads.indexOf(head)) };
  const found = await app.ask("mixing", { site: data.site, head });
  app.python(found.python);
  return { tensor: AYN.tensor(found.data.matrix) };
};

const routing = (app, data) => data.routing.map((one) => {
  const shares = AYN.tensor(one.shares);
  const flat = { ...shares, shape: [shares.shape.slice(0, -1).reduce((a, b) => a * b, 1), shares.shape.at(-1)] };
  const experts = Array.from({ length: flat.shape[1] }, (_, n) => app.t("mixing.expert", { number: n }));
  return AYN.panel(app.t("mixing.routing", { name: one.name }), AYN.el("p", { class: "soft small", text: app.t("mixing.routing.about") }),
    AYN.heatmap({ tensor: flat, rows: labels(data, data.queries), columns: experts, label: app.t("mixing.routing", { name: one.name }), low: 0, high: 1, name: one.name }));
});

/** One head large, with the tokens of the keys coloured by the chosen row. */
const large = (app, data) => {
  const place = AYN.el("div", { class: "stack" }), strip = AYN.el("div", { class: "stack" });
  let map = null, current = null;
  const row = (number) => {
    if (!current) return;
    const { tensor, keys } = current, tokens = labels(data, keys ?? data.keys), media = data.media[keys ?? data.keys];
    const factor = tensor.pooled ?? [1, 1], width = tensor.shape[1];
    const weights = Array.from(tensor.values.subarray(number * width, (number + 1) * width));
    const spread = factor[1] > 1 ? Array.from({ length: tokens.length }, (_, n) => weights[Math.floor(n / factor[1])]) : weights;
    const most = Math.max(...spread.map(Math.abs), 1e-30), query = labels(data, data.queries)[number * factor[0]];
    app.remember({ query: number });
    AYN.clear(strip, query && AYN.el("p", { class: "small soft" }, app.t("mixing.row"), " ", AYN.chip(query)),
      media && AYN.media(app, media, { weights: spread }),
      tokens.length && !media && AYN.tokens(tokens, { label: app.t("mixing.row"), weights: spread.map((x) => x / most), kind: Math.min(...spread) < 0 ? "diverging" : "sequential", under: (n) => AYN.format(spread[n]) }));
  };
  return { node: AYN.el("div", { class: "stack" }, place, strip), async show(shown) {
    try {
      current = await matrixOf(app, data, shown);
    } catch (error) {
      AYN.clear(place, app.failure(error));
      map = null;
      return;
    }
    const { tensor, keys } = current;
    const more = { rows: labels(data, data.queries), columns: labels(data, keys ?? data.keys), name: `${data.site}.${shown.replace(" ", "")}`,
      label: `${data.site}, ${choices(app, data).find(([one]) => one === shown)?.[1] ?? shown}`, kind: AYN.range(tensor.values)[0] < 0 ? "diverging" : "sequential" };
    if (map) map.show(tensor, more);
    else AYN.clear(place, (map = AYN.heatmap({ tensor, ...more, size: 640, onSelect: row })));
    row(Math.min(Number(app.params.query ?? Infinity), tensor.shape[0] - 1));
  } };
};

const draw = (root, found, app) => {
  const data = found.data, options = choices(app, data);
  let shown = options.some(([one]) => one === app.params.shown) ? app.params.shown : "average";
  const view = large(app, data);
  const select = AYN.select(app.t("mixing.show"), options, shown, (next) => pick(next));
  const heads = data.count > 1 ? grid(app, data, (next) => pick(next)) : null;
  const pick = (next) => {
    shown = next;
    app.remember({ shown: next === "average" ? null : next });
    select.querySelector("select").value = next;
    heads?.querySelectorAll("button").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.shown === next)));
    return view.show(next);
  };
  const sites = AYN.select(app.t("mixing.site"), data.sites.map((one) => [one.name, `${one.name} (${one.kind}${one.heads > 1 ? `, ${one.heads}` : ""})`]), data.site, (site) => {
    app.remember({ site, shown: null, query: null });
    app.load(root, "mixing", { site }, (next, place) => (draw(place, next, app), app.python(next.python)));
  });
  AYN.clear(root, AYN.title(app, "mixing"), AYN.el("div", { class: "row end" }, sites, select), AYN.panel(data.site, about(app, data)),
    AYN.el("div", { class: "split wide-right" }, heads && AYN.panel(app.t(data.channels ? "mixing.channels" : "mixing.heads", { shown: data.heads.length, count: data.count }), heads), AYN.panel(app.t("mixing.large"), AYN.el("p", { class: "soft small", text: app.t("mixing.axes") }), view.node)),
    routing(app, data));
  pick(shown);
};

AYN.view("mixing", {
  order: 30,
  params: (app) => ({ site: app.params.site }),
  render: draw,
});
