"use strict";
/* What a stack reads when it is not a text, with weights of its tokens laid over it.

   AYN.media(app, media, {weights, label, onSelect(token)})
     media    {kind: "image", values: (channels, height, width), first, rows, columns}   tokens from `first` on are patches
              {kind: "sound", values: (mels, time), step}                                each token covers `step` frames of 10 ms
     weights  one number per token of the stack; the strongest is opaque
   Returns an element with .paint(weights).
   AYN.stackName(app, stack)   "Encoder", or the stack's own name */

AYN.stackName = (app, stack) => app.known(`stack.${stack}`, stack);

AYN.picture = (tensor) => {
  const [channels, height, width] = tensor.shape;
  const plane = height * width, image = new ImageData(width, height);
  const ends = [0, 1, 2].map((c) => AYN.range(tensor.values.subarray(Math.min(c, channels - 1) * plane, (Math.min(c, channels - 1) + 1) * plane)));
  for (let at = 0; at < plane; at++) {
    for (let c = 0; c < 3; c++) {
      const [low, high] = ends[c];
      image.data[4 * at + c] = 255 * (tensor.values[Math.min(c, channels - 1) * plane + at] - low) / (high - low || 1);
    }
    image.data[4 * at + 3] = 255;
  }
  const canvas = AYN.el("canvas", { width, height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
};

/** Low frequencies below. */
AYN.spectrogram = (tensor) => {
  const [mels, time] = tensor.shape;
  const turned = new Float32Array(tensor.values.length);
  for (let row = 0; row < mels; row++) turned.set(tensor.values.subarray(row * time, (row + 1) * time), (mels - 1 - row) * time);
  const flipped = { shape: [mels, time], values: turned };
  return AYN.pixels(flipped, "sequential", ...AYN.range(turned));
};

AYN.media = (app, media, { weights, label, onSelect } = {}) => {
  const tensor = AYN.tensor(media.values), image = media.kind === "image";
  const wide = image ? 336 : 720;
  const height = image ? Math.round(wide * tensor.shape[1] / tensor.shape[2]) : 160;
  const canvas = AYN.el("canvas", { width: wide * 2, height: height * 2, role: "img", "aria-label": label ?? app.t(`media.${media.kind}`) });
  const root = AYN.el("figure", { class: `media ${media.kind}` }, canvas, AYN.el("figcaption", { class: "small soft", text: app.t(`media.${media.kind}.about`) }));
  let shown = weights;
  const frames = image ? 0 : tensor.shape[1] * (tensor.pooled?.[1] ?? 1);
  const cell = (token) => {
    if (!image) return [token * media.step / frames, 0, media.step / frames, 1];
    const place = token - media.first;
    return place < 0 ? null : [place % media.columns / media.columns, Math.floor(place / media.columns) / media.rows, 1 / media.columns, 1 / media.rows];
  };
  const draw = () => {
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.globalAlpha = 1;
    context.drawImage(image ? AYN.picture(tensor) : AYN.spectrogram(tensor), 0, 0, canvas.width, canvas.height);
    if (!shown) return;
    const most = Math.max(...Array.from(shown, Math.abs), 1e-30);
    Array.from(shown).forEach((weight, token) => {
      const box = cell(token);
      if (!box) return;
      const place = [box[0] * canvas.width, box[1] * canvas.height, box[2] * canvas.width + 0.5, box[3] * canvas.height + 0.5];
      context.globalAlpha = 0.5;
      context.fillStyle = AYN.isDark() ? "#000" : "#fff";
      context.fillRect(...place);
      context.globalAlpha = 0.7 * Math.abs(weight) / most;
      context.fillStyle = weight < 0 ? "#1557b0" : "#c2570a";
      context.fillRect(...place);
    });
    context.globalAlpha = 1;
  };
  if (onSelect) {
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect(), x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
      onSelect(image ? media.first + Math.floor(y * media.rows) * media.columns + Math.floor(x * media.columns) : Math.floor(x * frames / media.step));
    });
  }
  root.paint = (next) => ((shown = next), draw());
  AYN.onTheme(canvas, draw);
  draw();
  return root;
};
