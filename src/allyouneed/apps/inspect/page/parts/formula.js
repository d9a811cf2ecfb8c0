"use strict";
/* AYN.formula(text)   a formula in plain text as nodes: x_i and x_{i,j} are lowered, x^n and x^{n−m} raised. The text itself stays
   readable for a screen reader. */

AYN.formula = (text) => {
  const root = AYN.el("span", { class: "formula" });
  let at = 0;
  for (const match of text.matchAll(/([_^])(\{[^}]*\}|[\p{L}\p{N}]+)/gu)) {
    root.append(AYN.plain(text.slice(at, match.index)), AYN.el(match[1] === "_" ? "sub" : "sup", { text: AYN.plain(match[2].replace(/^\{|\}$/g, "")) }));
    at = match.index + match[0].length;
  }
  root.append(AYN.plain(text.slice(at)));
  return root;
};
