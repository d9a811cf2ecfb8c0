"""The formula of each part, in plain text, and where the paper has it. A part that is not in the table is described by
the first sentence of its own documentation."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from allyouneed.config import Part

# (slot, kind) -> formula
PARTS: dict[tuple[str, str], str] = {
    ("embedding", "tokens"): "x = √d · E[token] + P[position]",
    ("embedding", "patches"): "z = [x_class; x¹E; …; xᴺE] + E_pos",
    ("embedding", "frames"): "x = gelu(conv₂(gelu(conv₁(mel)))) + P[position]",
    ("positions", "sinusoidal"): "P[p, 2i] = sin(p / 10000^(2i/d)),  P[p, 2i+1] = cos(p / 10000^(2i/d))",
    ("positions", "learned"): "P[p] = row p of a learned table",
    ("norm", "layer"): "y = (x − mean(x)) / √(var(x) + ε) ⊙ g + b",
    ("norm", "rms"): "y = x / √(mean(x²) + ε) ⊙ g",
    ("norm", "scale"): "y = g · x / ‖x‖",
    ("norm", "batch"): "y = (x − μ) / √(σ² + ε) ⊙ g + b, μ and σ of all tokens",
    ("token mixer", "attention"): "y = concat_h( softmax(q_h k_hᵀ / √dₖ) v_h ) W_O",
    ("token mixer", "mla"): "c = x W_DKV;  k = c W_UK, v = c W_UV;  y = concat_h( softmax(q kᵀ / √d) v ) W_O",
    ("token mixer", "mssa"): "y = Σ_h softmax(U_hᵀZ (U_hᵀZ)ᵀ) U_hᵀZ U_h",
    ("token mixer", "big-bird"): "y = softmax(q kᵀ / √dₖ over window, global and random blocks) v W_O",
    ("token mixer", "longformer"): "y = softmax(q kᵀ / √dₖ over a window and global tokens) v W_O",
    ("token mixer", "longnet"): "y = softmax(q kᵀ / √dₖ + log n_ij) v W_O, n_ij: dilated segments that hold i and j",
    ("token mixer", "lsh"): "y = softmax(q kᵀ over keys of the same hash bucket) v W_O, k = q / ‖q‖",
    ("token mixer", "linformer"): "y = softmax(q (E k)ᵀ / √dₖ) (F v) W_O",
    ("token mixer", "performer"): "y_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i) Σ_j φ(k_j)ᵀ)",
    ("token mixer", "infini"): "y = β · σ(q) M / (σ(q) z) + (1 − β) · softmax(q kᵀ / √dₖ) v",
    ("token mixer", "synthesizer"): "y = softmax(B) v W_O, B from x alone or learned",
    ("token mixer", "retention"): "o_n = Σ_{m≤n} γ^{n−m} (q_n · k_m) v_m",
    ("token mixer", "gated-retention"): "o_n = Σ_{m≤n} (Π_{m<i≤n} γ_i) (q_n · k_m) v_m",
    (
        "token mixer",
        "rwkv",
    ): "wkv_t = (Σ_{j<t} e^{k_j − (t−1−j)δ} v_j + e^{u+k_t} v_t) / (the same without v);  y = (σ(r) ⊙ wkv) W_O",
    ("token mixer", "convolution"): "y_t = act( Σ_j W_j x_{t+j} + b )",
    ("token mixer", "lightweight-convolution"): "y_i = Σ_j softmax(w_h)_j v_{i+j}",
    ("token mixer", "dynamic-convolution"): "y_i = Σ_j softmax(x_i W)_{h,j} v_{i+j}",
    ("token mixer", "lsra"): "y = [attention(x_left), convolution(x_right)]",
    ("token mixer", "lstm"): "c_t = f ⊙ c_{t−1} + i ⊙ tanh(g),  h_t = o ⊙ tanh(c_t)",
    ("token mixer", "ssru"): "c_t = f_t ⊙ c_{t−1} + (1 − f_t) ⊙ W x_t,  y_t = relu(c_t)",
    ("token mixer", "gru"): "h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}",
    ("token mixer", "multi-step"): "a_ij = softmax_j(d_i · z_j),  c_i = √m Σ_j a_ij (z_j + e_j)",
    ("channel mixer", "ffn"): "y = act(x W₁ + b₁) W₂ + b₂",
    ("channel mixer", "glu"): "y = (act(x W) ⊙ x V) W₂",
    ("channel mixer", "moe"): "y = Σ_{i ∈ top} score_i(x) · expert_i(x)",
    ("channel mixer", "rwkv-channel"): "y = σ(r) ⊙ (max(k, 0)² W_v)",
    ("channel mixer", "ista"): "y = max(0, z + η Dᵀ(z − D z) − ηλ)",
    ("wiring", "post-norm"): "x ← norm(x + f(x)), for each sub-layer f",
    ("wiring", "pre-norm"): "x ← x + f(norm(x)), for each sub-layer f",
    ("wiring", "res-post-norm"): "x ← x + norm(f(x))",
    ("wiring", "sandwich"): "x ← x + norm₂(f(norm₁(x)))",
    ("wiring", "parallel"): "x ← x + mixer(norm(x)) + channel(norm(x))",
    ("wiring", "deepnorm"): "x ← norm(α x + f(x))",
    ("wiring", "resi-dual"): "x ← norm(x + f(x)),  d ← d + f(x)",
    ("wiring", "plain"): "x ← f(x)",
    ("wiring", "no-skip"): "x ← f(norm(x))",
    ("wiring", "reversible"): "a, b ← b, a + f(norm(b))",
    ("head", "vocabulary"): "logits = x Eᵀ;  p = softmax(logits)",
    ("head", "classes"): "logits = pool(x) W + b;  p = softmax(logits)",
    ("head", "tags"): "logits = x W + b, for each token",
    ("head", "pooled"): "vector = pool(x) W",
    ("head", "none"): "the stream itself",
}

# the last name of a site inside a part -> formula
INNER: dict[str, str] = {
    "tokens": "E[token], scaled",
    "positions": "P[position]",
    "patches": "pixels of a patch · E",
    "frames": "gelu(conv₂(gelu(conv₁(mel))))",
    "in": "the residual stream before the block",
    "q": "q = x W_Q, split into heads",
    "k": "k = x W_K, split into heads",
    "v": "v = x W_V, split into heads",
    "mask": "1 where the query (row) may attend to the key (column), else 0",
    "scores": "q kᵀ, scaled, with biases; −∞ where the mask is 0",
    "weights": "softmax(scores) over the keys",
    "heads": "Σ_j weight_ij v_j, before the output projection",
    "hidden": "act(x W₁ + b₁)",
    "router": "router logits = x W_r",
    "experts": "chosen experts, best first",
    "shares": "scores of all experts, summing to 1",
    "vector": "v / ‖v‖",
    "logits": "scale · image · textᵀ",
}
INNER |= {"router.weights": "weights of the chosen experts", "router.experts": INNER["experts"]}
INNER |= {"router.shares": INNER["shares"]}

# what the paper gives for a value inside a part: (kind, name) -> equation or section
INNER_EQUATIONS: dict[tuple[str, str], str] = {
    **{("attention", name): "3.2.2" for name in ("q", "k", "v")},
    **{("attention", name): "eq. 1" for name in ("scores", "weights", "heads")},
    ("attention", "mask"): "3.2.3",
    ("ffn", "hidden"): "eq. 2",
}

EQUATION = re.compile(
    r"(?:[Ee]q\.\s*[\d–\-, ]*\d|[Ff]igure\s*\w+|[Ss]ection\s*[\d.]+|algorithm\s*\d+|\b\d\.\d(?:\.\d)?\b)"
)


class Formula(NamedTuple):
    """`formula` in plain text; `paper`: the first sentence of the part's documentation; `equation`: the equation or
    section of the formula, the first that this sentence cites."""

    formula: str
    paper: str
    equation: str


def formula_of(part: Part | type[Part] | None, inner: str = "") -> Formula:
    """The formula of a part, or of a value inside it."""
    if part is None:
        return Formula(_inner(inner), "", "")
    cls: Any = part if isinstance(part, type) else type(part)
    paper = first_sentence(cls.__doc__ or "")
    cited = EQUATION.search(paper)
    kind = str(cls.model_fields["kind"].default) if "kind" in cls.model_fields else ""
    if inner:
        return Formula(_inner(inner), paper, INNER_EQUATIONS.get((kind, inner), ""))
    return Formula(PARTS.get((cls.slot, kind), "") or paper, paper, cited[0].strip() if cited else "")


def _inner(name: str) -> str:
    for start in range(len(name.split("."))):
        if (found := INNER.get(".".join(name.split(".")[start:]))) is not None:
            return found
    return ""


def first_sentence(text: str) -> str:
    """The first paragraph's first sentence, as one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    end = re.search(r"(?<!\bet al)(?<!\beq)(?<!\bi\.e)(?<!\be\.g)\.\s+(?=[A-Z`])", paragraph)
    return paragraph if end is None else paragraph[: end.start() + 1]
