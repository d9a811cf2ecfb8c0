"use strict";
/* A heat map on a canvas, with a cursor for the keyboard, a readout, a legend, the numbers as a table and as CSV.

   AYN.heatmap({tensor, rows, columns, label, kind, low, high, size, onSelect(row, column), describe(row, column, x), name})
     tensor     (rows, columns), see tensor.js; pooled tensors say so below
     rows, columns   labels of the axes: strings or tokens; drawn where there is room, spoken always
     kind       "sequential" (default) or "diverging"; low, high: ends of the scale; default: 0 or the lowest, and the highest
     size       widest drawing in CSS pixels (default 560)
     describe   the sentence about a cell; default: row → column: number
     name       of the CSV file
   Returns an element with .show(tensor, more) to replace the numbers and .move(row, column) to put the cursor somewhere.
   AYN.thumbnail(tensor, kind, low, high)   a small canvas without labels */

AYN.axisText = (one) => AYN.plain(typeof one === "object" && one !== null ? one.text : one ?? "");

/** Draw numbers into a canvas, one pixel per number. */
AYN.pixels = (tensor, kind, low, high) => {
  const [rows, columns] = tensor.shape;
  const canvas = AYN.el("canvas", { width: Math.max(1, columns), height: Math.max(1, rows) });
  const image = new ImageData(Math.max(1, columns), Math.max(1, rows));
  const colour = AYN.scale(kind);
  const table = kind === "diverging" ? Array.from({ length: 513 }, (_, n) => colour(n / 256 - 1)) : Array.from({ length: 257 }, (_, n) => colour(n / 256));
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1, span = high - low || 1;
  for (let at = 0; at < rows * columns; at++) {
    const x = tensor.values[at];
    const t = kind === "diverging" ? Math.max(-1, Math.min(1, x / most)) * 256 + 256 : Math.max(0, Math.min(1, (x - low) / span)) * 256;
    const rgb = Number.isNaN(x) ? [200, 60, 160] : table[Math.round(t)];
    image.data.set([rgb[0], rgb[1], rgb[2], 255], 4 * at);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
};

AYN.ends = (tensor, kind, low, high) => {
  const [least, most] = AYN.range(tensor.values);
  if (kind === "diverging") {
    const size = Math.max(Math.abs(low ?? least), Math.abs(high ?? most));
    return [-size, size];
  }
  return [low ?? Math.min(0, least), high ?? most];
};

AYN.thumbnail = (tensor, kind, low, high) => {
  const canvas = AYN.el("canvas", { "aria-hidden": "true" });
  const draw = () => {
    const small = AYN.pixels(tensor, kind, ...AYN.ends(tensor, kind, low, high));
    canvas.width = small.width;
    canvas.height = small.height;
    canvas.getContext("2d").drawImage(small, 0, 0);
  };
  draw();
  AYN.onTheme(canvas, draw);
  return canvas;
};

AYN.TABLE_MOST = 64;

AYN.heatmap = (options) => {
  const t = AYN.app.t;
  let { tensor, rows = [], columns = [], label = "", kind = "sequential", low, high, size = 560, onSelect, describe, name = "numbers" } = options;
  let cursor = null, layout = null, pixels = null;
  const canvas = AYN.el("canvas", { "aria-hidden": "true" });
  const cells = AYN.el("div", { class: "field-of-cells", tabindex: 0, role: "application", "aria-roledescription": t("heatmap.role"), "aria-label": `${AYN.plain(label)}. ${t("heatmap.keys")}` }, canvas);
  const readout = AYN.el("div", { class: "readout" });
  const scale = AYN.el("span", { class: "legend" });
  const pooled = AYN.el("span", { class: "tag warm", hidden: true });
  const table = AYN.el("div", { hidden: true });
  const tableButton = AYN.button(t("heatmap.table"), () => toggleTable(), { class: "quiet", "aria-expanded": "false" });
  const under = AYN.el("div", { class: "under" }, scale, pooled, tableButton,
    AYN.button(t("csv"), () => AYN.download(`${name}.csv`, AYN.csv(tensor, rows.map(AYN.axisText), columns.length ? columns.map(AYN.axisText) : null)), { class: "quiet" }));
  const root = AYN.el("div", { class: "heat" }, cells, readout, under, table);

  const sentence = (row, column) => {
    const x = tensor.values[row * tensor.shape[1] + column];
    if (describe) return describe(row, column, x);
    const factor = tensor.pooled ?? [1, 1];
    const name = (labels, at, by) => AYN.axisText(labels[at * by]) || String(at * by);
    return `${name(rows, row, factor[0])} → ${name(columns, column, factor[1])}: ${AYN.format(x)}`;
  };

  const measure = () => {
    const [height, width] = tensor.shape;
    const context = canvas.getContext("2d");
    const room = Math.max(160, Math.min(size, root.clientWidth || size));
    const font = "11px system-ui, sans-serif";
    context.font = font;
    const longest = (labels) => Math.min(84, Math.ceil(Math.max(0, ...labels.slice(0, 200).map((one) => context.measureText(AYN.axisText(one)).width))) + 8);
    let left = rows.length === height ? longest(rows) : 0;
    let top = columns.length === width ? longest(columns) : 0;
    if (left > room / 3) left = Math.floor(room / 3);
    let cell = (room - left) / Math.max(1, width);
    if (cell < 10) top = 0;
    cell = Math.min(cell, 40, 1200 / Math.max(1, height));
    if (cell < 10) left = 0;
    cell = Math.min((room - left) / Math.max(1, width), 40);
    const tall = Math.min(cell, Math.max(cell, 0), 640 / Math.max(1, height));
    return { left, top, cell, tall, font, width: left + cell * width, height: top + tall * height };
  };

  const draw = () => {
    if (!root.clientWidth && root.isConnected) return;
    const [height, width] = tensor.shape;
    layout = measure();
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(layout.width * ratio));
    canvas.height = Math.max(1, Math.round(layout.height * ratio));
    canvas.style.width = `${layout.width}px`;
    canvas.style.height = `${layout.height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(pixels, layout.left, layout.top, layout.cell * width, layout.tall * height);
    const style = getComputedStyle(document.documentElement);
    context.font = layout.font;
    context.fillStyle = AYN.isDark() ? "#a7b0bd" : "#56606c";
    context.textBaseline = "middle";
    if (layout.left && layout.tall >= 10) {
      context.textAlign = "right";
      rows.forEach((one, n) => context.fillText(AYN.fit(context, AYN.axisText(one), layout.left - 6), layout.left - 4, layout.top + (n + 0.5) * layout.tall));
    }
    if (layout.top) {
      context.textAlign = "left";
      columns.forEach((one, n) => {
        context.save();
        context.translate(layout.left + (n + 0.5) * layout.cell, layout.top - 4);
        context.rotate(-Math.PI / 2);
        context.fillText(AYN.fit(context, AYN.axisText(one), layout.top - 6), 0, 0);
        context.restore();
      });
    }
    if (cursor) {
      context.lineWidth = 2;
      context.strokeStyle = style.getPropertyValue("--warm") ? (AYN.isDark() ? "#ffb068" : "#c2570a") : "red";
      const cell = Math.max(layout.cell, 4), tall = Math.max(layout.tall, 4);
      context.strokeRect(layout.left + cursor[1] * layout.cell + (layout.cell - cell) / 2, layout.top + cursor[0] * layout.tall + (layout.tall - tall) / 2, cell, tall);
    }
  };

  const legend = () => {
    const [least, most] = AYN.ends(tensor, kind, low, high);
    const strip = { shape: [1, 65], values: Float32Array.from({ length: 65 }, (_, n) => least + (most - least) * n / 64) };
    AYN.clear(scale, AYN.format(least), AYN.pixels(strip, kind, least, most), AYN.format(most));
    pooled.hidden = !tensor.pooled;
    if (tensor.pooled) pooled.textContent = t("heatmap.pooled", { factor: tensor.pooled.join(" × "), by: t(`pooled.${tensor.by}`) });
  };

  const refresh = () => {
    pixels = AYN.pixels(tensor, kind, ...AYN.ends(tensor, kind, low, high));
    legend();
    draw();
  };

  const put = (row, column, say) => {
    const [height, width] = tensor.shape;
    cursor = [Math.min(Math.max(row, 0), height - 1), Math.min(Math.max(column, 0), width - 1)];
    const text = sentence(...cursor);
    AYN.clear(readout, AYN.text(text));
    if (say) AYN.app.announce(text);
    draw();
  };

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    if (!layout || !box.width) return null;
    const column = Math.floor(((event.clientX - box.left) * layout.width / box.width - layout.left) / layout.cell);
    const row = Math.floor(((event.clientY - box.top) * layout.height / box.height - layout.top) / layout.tall);
    return row >= 0 && column >= 0 && row < tensor.shape[0] && column < tensor.shape[1] ? [row, column] : null;
  };

  const toggleTable = () => {
    table.hidden = !table.hidden;
    tableButton.setAttribute("aria-expanded", String(!table.hidden));
    if (!table.hidden) fillTable();
  };

  const fillTable = () => {
    const [height, width] = tensor.shape;
    const shown = [Math.min(height, AYN.TABLE_MOST), Math.min(width, AYN.TABLE_MOST)];
    const head = ["", ...Array.from({ length: shown[1] }, (_, n) => AYN.axisText(columns[n]) || String(n))];
    const lines = Array.from({ length: shown[0] }, (_, row) => [AYN.axisText(rows[row]) || String(row),
      ...Array.from({ length: shown[1] }, (_, column) => tensor.values[row * width + column])]);
    AYN.clear(table, shown[0] < height || shown[1] < width ? AYN.el("p", { class: "small soft", text: t("heatmap.part", { rows: shown[0], columns: shown[1] }) }) : null,
      AYN.table(head, lines, { numeric: head.map((_, n) => n).slice(1), label: AYN.plain(label) }));
  };

  canvas.addEventListener("mousemove", (event) => {
    const at = place(event);
    if (at) put(...at);
  });
  cells.addEventListener("click", (event) => {
    const at = place(event);
    if (at) (put(...at, true), onSelect?.(...at));
  });
  cells.addEventListener("keydown", (event) => {
    const [row, column] = cursor ?? [0, -1];
    const moves = { ArrowRight: [row, column + 1], ArrowLeft: [row, column - 1], ArrowDown: [row + 1, Math.max(0, column)], ArrowUp: [row - 1, Math.max(0, column)],
      Home: [row, 0], End: [row, tensor.shape[1] - 1], PageUp: [0, Math.max(0, column)], PageDown: [tensor.shape[0] - 1, Math.max(0, column)] };
    if (moves[event.key]) (event.preventDefault(), put(...moves[event.key], true));
    if (event.key === "Enter" && cursor) (event.preventDefault(), onSelect?.(...cursor));
  });
  root.show = (next, more = {}) => {
    tensor = next;
    ({ rows = rows, columns = columns, label = label, kind = kind, low = low, high = high, describe = describe, name = name } = more);
    cells.setAttribute("aria-label", `${AYN.plain(label)}. ${t("heatmap.keys")}`);
    if (cursor && (cursor[0] >= tensor.shape[0] || cursor[1] >= tensor.shape[1])) cursor = null;
    refresh();
    if (!table.hidden) fillTable();
  };
  root.move = (row, column) => put(row, column);
  new ResizeObserver(() => draw()).observe(root);
  AYN.onTheme(root, refresh);
  refresh();
  return root;
};

/** A text shortened to a width. */
AYN.fit = (context, text, width) => {
  if (context.measureText(text).width <= width) return text;
  const chars = [...new Intl.Segmenter(undefined, { granularity: "grapheme" }).segment(text)].map((one) => one.segment);
  while (chars.length && context.measureText(chars.join("") + "…").width > width) chars.pop();
  return chars.join("") + "…";
};
