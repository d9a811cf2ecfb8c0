"use strict";
/* Curves, bars and trees.

   AYN.curve({series: [{name, x, y}], xLabel, yLabel, label, log, marks: [{x, label}], onSelect(x)})
     an SVG line chart with a legend; `log`: logarithmic y; `marks`: vertical lines. The numbers follow as a table.
   AYN.bars(rows, {label, signed, format, onSelect(index)})
     rows: [{name, value, note}]; `signed`: zero in the middle. Names may be strings or nodes.
   AYN.tree(nodes, {label, render(node) -> nodes, children(node), open(node), onSelect(node), dim(node)})
     a tree for keyboards and screen readers: arrow keys move, open and close. Default children: node.children. */

AYN.ticks = (low, high, count = 5) => {
  const raw = (high - low || 1) / count;
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(raw))).find((one) => one >= raw) ?? raw;
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) found.push(Number(x.toPrecision(10)));
  return found;
};

AYN.curve = ({ series, xLabel = "", yLabel = "", label = "", log = false, marks = [], onSelect }) => {
  const width = innerWidth < 700 ? 380 : 640, height = 240, left = 56, bottom = 34, top = 10, right = 12;
  const scaleY = (y) => (log ? Math.log10(Math.max(y, 1e-30)) : y);
  const usable = series.map((one) => ({ ...one, points: Array.from(one.x, (x, n) => [x, scaleY(one.y[n])]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)) }));
  const [minX, maxX] = AYN.range(usable.flatMap((one) => one.points.map(([x]) => x)).concat(marks.map((one) => one.x)));
  let [minY, maxY] = AYN.range(usable.flatMap((one) => one.points.map(([, y]) => y)));
  if (minY === maxY) [minY, maxY] = [minY - 0.5, maxY + 0.5];
  const px = (x) => left + (x - minX) / (maxX - minX || 1) * (width - left - right);
  const py = (y) => height - bottom - (y - minY) / (maxY - minY) * (height - top - bottom);
  const svg = AYN.svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": AYN.plain(label) });
  for (const y of AYN.ticks(minY, maxY, 4)) {
    svg.append(AYN.svg("line", { class: "axis", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      AYN.svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, AYN.format(log ? 10 ** y : y)));
  }
  for (const x of AYN.ticks(minX, maxX, 6)) svg.append(AYN.svg("text", { x: px(x), y: height - bottom + 16, "text-anchor": "middle" }, AYN.format(x).replace(/\.0+$/, "")));
  svg.append(AYN.svg("text", { x: (left + width - right) / 2, y: height - 2, "text-anchor": "middle" }, xLabel));
  for (const mark of marks) svg.append(AYN.svg("line", { class: "axis", x1: px(mark.x), x2: px(mark.x), y1: top, y2: height - bottom, "stroke-dasharray": "3 3" }), AYN.svg("text", { x: px(mark.x) + 3, y: top + 10 }, AYN.plain(mark.label ?? "")));
  usable.forEach((one, n) => svg.append(AYN.svg("path", { class: `line series-${n % 4}`, d: one.points.map(([x, y], at) => `${at ? "L" : "M"}${px(x).toFixed(2)} ${py(y).toFixed(2)}`).join("") })));
  if (onSelect) svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    onSelect(minX + ((event.clientX - box.left) * width / box.width - left) / (width - left - right) * (maxX - minX));
  });
  const legend = series.map((one, n) => AYN.el("span", { class: "legend-line" },
    AYN.svg("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, AYN.svg("path", { class: `line series-${n % 4}`, d: "M0 4H24" })), AYN.text(one.name)));
  const rows = Array.from(series[0]?.x ?? [], (x, n) => [x, ...series.map((one) => one.y[n])]);
  return AYN.el("figure", { class: "chart" }, AYN.el("div", { class: "row" }, yLabel && AYN.el("span", { class: "small soft", text: yLabel }), legend), svg,
    AYN.el("details", { class: "small" }, AYN.el("summary", { text: AYN.app.t("heatmap.table") }),
      AYN.table([xLabel || "x", ...series.map((one) => one.name)], rows, { numeric: series.map((_, n) => n).concat(series.length), label: AYN.plain(label) })));
};

AYN.bars = (rows, { label = "", signed = false, format = AYN.format, onSelect } = {}) => {
  const most = Math.max(...rows.map((one) => Math.abs(one.value)).filter(Number.isFinite), 1e-30);
  const root = AYN.el("div", { class: "bars", role: "list", "aria-label": AYN.plain(label) });
  rows.forEach((one, index) => {
    const size = Math.min(1, Math.abs(one.value) / most) * (signed ? 50 : 100) || 0;
    const fill = AYN.el("span", { class: one.value < 0 ? "fill negative" : "fill",
      style: signed ? { width: `${size}%`, left: one.value < 0 ? `${50 - size}%` : "50%" } : { width: `${size}%`, left: "0" } });
    const name = one.name instanceof Node ? one.name : AYN.text(one.name);
    root.append(AYN.el("div", { class: "row-button", role: "listitem" },
      onSelect ? AYN.button(name, () => onSelect(index), { class: "quiet name" }) : AYN.el("span", { class: "name" }, name),
      AYN.el("span", { class: "track", "aria-hidden": "true" }, fill, signed && AYN.el("span", { class: "zero", style: { left: "50%" } })),
      AYN.el("span", { class: "num" }, one.note ?? format(one.value))));
  });
  return root;
};

AYN.tree = (nodes, { label = "", render, children = (node) => node.children ?? [], open = () => true, onSelect, dim = () => false } = {}) => {
  const root = AYN.el("ul", { class: "tree", role: "tree", "aria-label": AYN.plain(label) });
  const branch = (node) => {
    const inner = children(node);
    const item = AYN.el("li", { role: "treeitem", tabindex: -1, "aria-expanded": inner.length ? String(open(node)) : null, "aria-selected": onSelect && "false", class: dim(node) && "dim" });
    const twist = AYN.el("span", { class: "twist", "aria-hidden": "true" });
    const list = inner.length ? AYN.el("ul", { role: "group" }, inner.map(branch)) : null;
    item.toggle = (wanted) => {
      if (!list) return;
      item.setAttribute("aria-expanded", String(wanted));
      list.hidden = !wanted;
      twist.textContent = wanted ? "▾" : "▸";
    };
    item.append(AYN.el("div", { class: "item" }, twist, render(node)));
    if (list) item.append(list);
    item.toggle(open(node));
    item.choose = () => {
      root.querySelectorAll("[aria-selected=true]").forEach((one) => one.setAttribute("aria-selected", "false"));
      if (onSelect) (item.setAttribute("aria-selected", "true"), onSelect(node));
    };
    twist.addEventListener("click", (event) => (event.stopPropagation(), item.toggle(item.getAttribute("aria-expanded") !== "true")));
    item.firstChild.addEventListener("click", () => (focusOn(item), item.choose()));
    return item;
  };
  const visible = () => [...root.querySelectorAll("[role=treeitem]")].filter((item) => !item.parentElement.closest("ul[hidden]"));
  const focusOn = (item) => {
    root.querySelectorAll("[tabindex='0']").forEach((one) => one.setAttribute("tabindex", "-1"));
    item.setAttribute("tabindex", "0");
    item.focus();
  };
  AYN.fill(root, nodes.map(branch));
  root.querySelector("[role=treeitem]")?.setAttribute("tabindex", "0");
  root.addEventListener("keydown", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (event.target !== item) return;
    const shown = visible(), at = shown.indexOf(item), wide = item.getAttribute("aria-expanded");
    const above = item.parentElement.closest("[role=treeitem]");
    const run = {
      ArrowDown: () => shown[at + 1] && focusOn(shown[at + 1]),
      ArrowUp: () => shown[at - 1] && focusOn(shown[at - 1]),
      ArrowRight: () => (wide === "false" ? item.toggle(true) : wide === "true" && focusOn(shown[at + 1])),
      ArrowLeft: () => (wide === "true" ? item.toggle(false) : above && focusOn(above)),
      Home: () => focusOn(shown[0]), End: () => focusOn(shown.at(-1)),
      Enter: () => item.choose(), " ": () => item.choose(),
    }[event.key];
    if (run) (event.preventDefault(), event.stopPropagation(), run());
  });
  return root;
};
