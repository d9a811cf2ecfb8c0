"use strict";
/* Numbers of a document.

   AYN.tensor(sent)          {shape, values: Float32Array, pooled, by} from {"shape", "base64"}: exact float32.
   AYN.take(tensor, index)   the part at this index of the first axis, without a copy.
   AYN.format(x)             a number in at most seven characters; AYN.exact(x): so that float32 is read back exactly.
   AYN.csv(tensor, rows, columns)   text of a tensor of any shape: one line per index of all axes but the last.
   AYN.download(name, text, type)   saves a text as a file. */

/** @typedef {{shape: number[], values: Float32Array, pooled?: number[], by?: string}} Tensor */

/** @returns {Tensor} */
AYN.tensor = (sent) => {
  const raw = atob(sent.base64);
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  const view = new DataView(bytes.buffer);
  const values = new Float32Array(bytes.length / 4);
  for (let at = 0; at < values.length; at++) values[at] = view.getFloat32(4 * at, true);
  return { shape: sent.shape, values, pooled: sent.pooled, by: sent.by };
};

/** @returns {Tensor} */
AYN.take = (tensor, index) => {
  const shape = tensor.shape.slice(1);
  const size = shape.reduce((a, b) => a * b, 1);
  return { ...tensor, shape, values: tensor.values.subarray(index * size, (index + 1) * size), pooled: tensor.pooled?.slice(1) };
};

AYN.format = (x) => {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const text = x === 0 ? "0" : size >= 1e5 || size < 1e-3 ? x.toExponential(1) : size >= 100 ? x.toFixed(1) : size >= 10 ? x.toFixed(2) : x.toFixed(3);
  return text.replace("-", "−").replace("e-", "e−").replace("e+", "e");
};

/** The shortest decimal that float32 reads back as the same number. */
AYN.exact = (x) => {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf"; // as Python and pandas read them
  for (let digits = 6; digits < 9; digits++) {
    const text = String(Number(x.toPrecision(digits)));
    if (Math.fround(Number(text)) === x) return text;
  }
  return String(Number(x.toPrecision(9)));
};

AYN.quoted = (text) => (/[",\n\r]|^[=+@-]/.test(text) && Number.isNaN(Number(text)) ? `"${text.replaceAll('"', '""')}"` : text);

AYN.csv = (tensor, rows, columns) => {
  const wide = tensor.shape.at(-1) ?? 1;
  const above = tensor.shape.slice(0, -1);
  const lines = columns ? [[...above.map(() => ""), ...columns].map(AYN.quoted).join(",")] : [];
  for (let line = 0; line * wide < tensor.values.length; line++) {
    const index = [];
    for (let axis = above.length - 1, left = line; axis >= 0; axis--) {
      index.unshift(left % above[axis]);
      left = Math.floor(left / above[axis]);
    }
    if (rows && index.length) index[index.length - 1] = AYN.quoted(AYN.plain(rows[index.at(-1)] ?? index.at(-1)));
    lines.push([...index, ...Array.from(tensor.values.subarray(line * wide, (line + 1) * wide), AYN.exact)].join(","));
  }
  return lines.join("\n") + "\n";
};

AYN.download = (name, text, type = "text/csv") => {
  const url = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const link = AYN.el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};

/** Lowest and highest finite value. */
AYN.range = (values) => {
  let low = Infinity, high = -Infinity;
  for (const x of values) if (Number.isFinite(x)) { if (x < low) low = x; if (x > high) high = x; }
  return low > high ? [0, 0] : [low, high];
};
