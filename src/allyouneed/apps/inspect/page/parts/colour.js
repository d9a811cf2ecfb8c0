"use strict";
/* Colour scales. Both are ordered in lightness and safe for colour-blind readers; zero is the colour of the page.

   AYN.scale("sequential" | "diverging")   f(t) -> [r, g, b], t in 0…1 (sequential) or −1…1 (diverging)
   AYN.paint(node, t, kind)                sets --weight and --ink of a token, so that its text stays readable
   AYN.onTheme(node, f)                    calls f when the theme changes, as long as the node is on the page */

AYN.SCALES = {
  light: {
    sequential: [[247, 249, 251], [189, 215, 238], [107, 166, 214], [33, 102, 172], [8, 36, 84]],
    negative: [[247, 249, 251], [253, 208, 153], [240, 145, 55], [179, 88, 6], [104, 46, 2]],
  },
  dark: {
    sequential: [[25, 29, 35], [28, 62, 104], [44, 107, 170], [110, 171, 235], [218, 237, 255]],
    negative: [[25, 29, 35], [92, 48, 8], [160, 87, 18], [235, 150, 66], [255, 226, 190]],
  },
};

AYN.isDark = () => {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

AYN.mix = (stops, t) => {
  const place = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((from, n) => Math.round(from + (stops[low + 1][n] - from) * (place - low)));
};

AYN.scale = (kind) => {
  const scales = AYN.SCALES[AYN.isDark() ? "dark" : "light"];
  if (kind !== "diverging") return (t) => AYN.mix(scales.sequential, t);
  return (t) => AYN.mix(t < 0 ? scales.negative : scales.sequential, Math.abs(t));
};

AYN.luminance = (rgb) => rgb.map((c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);

AYN.paint = (node, t, kind) => {
  const set = () => {
    const rgb = AYN.scale(kind)(t);
    node.style.setProperty("--weight", `rgb(${rgb.join(" ")})`);
    node.style.setProperty("--ink", AYN.luminance(rgb) > 0.179 ? "#000000" : "#ffffff");
  };
  set();
  AYN.onTheme(node, set);
};

/** @type {Set<{node: WeakRef<Node>, run: () => void}>} */
const listeners = new Set();
AYN.onTheme = (node, run) => listeners.add({ node: new WeakRef(node), run });
AYN.themeChanged = () => {
  for (const one of listeners) {
    const node = one.node.deref();
    if (!node || (!node.isConnected && node.dataset?.kept === undefined)) listeners.delete(one);
    else one.run();
  }
};
