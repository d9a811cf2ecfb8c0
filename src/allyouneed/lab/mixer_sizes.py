"""Models of equal size for benchmarks and probes: one skeleton, and every mixer with about as many weights
as attention has, four times the square of the width.

`mixers` chooses sizes by each mixer's own keys; hidden sizes are rounded up to a multiple of a head. `UNEQUAL` names
mixers whose keys do not allow it, and why: their rows say so. Both ratios of weights, of the mixer and of the whole
model, come from the cost functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from allyouneed.config import parse
from allyouneed.nn.models.base import Model

ROTARY = {"kind": "rotary"}
STATED = 32768  # tokens of context at which constant states are compared with attention
EQUAL = 0.1  # weights may differ by this share of attention's


@dataclass(frozen=True)
class SkeletonSizes:
    width: int = 768
    heads: int = 12
    layers: int = 12
    hidden: int = 2048
    vocab: int = 32000
    rows: tuple[int, ...] = (1, 64)
    given: int = 32
    new: int = 128
    long: int = 65536
    segment: int = 1024  # tokens of a segment of infini and longnet

    @property
    def head(self) -> int:
        return self.width // self.heads

    def filled(self, weights: float) -> int:
        """The hidden size, a multiple of a head, that makes up for `weights` (in units of the square of the width)."""
        return -(-round(weights * self.width) // self.head) * self.head


CPU = SkeletonSizes(width=256, heads=4, layers=6, hidden=704, vocab=8000, rows=(1, 16), given=16, new=144)
TINY = SkeletonSizes(
    width=32, heads=4, layers=2, hidden=48, vocab=99, rows=(1, 3), given=5, new=9, long=256, segment=64
)

# mixers of the registry that cannot decode alone (they see later tokens, or need a source)
OTHERS = {"big-bird", "longformer", "linformer", "chunked-cross", "multi-step", "synchronous", "attentive-gru",
          "pooling", "spatial-mlp", "context-attention"}  # fmt: skip
CONSTANT = ("retention", "gated-retention", "rwkv", "performer", "infini", "mamba", "mamba2", "lstm", "gru", "s4",
            "ssru")  # fmt: skip
BOUNDED = ("synthesizer", "random-synthesizer", "tensorized")  # their weights hold a longest text: no long contexts
UNEQUAL = {
    "mla": "rotary features of half a head, as in the paper; with a whole head it would have 1.02",
    "lightweight-convolution": "no key adds weights",
    "lsra": "each half has half of the width",
    "s4": "only a state as large as half of the width would add enough",
    "lstm": "four gates; its state has the width of the model",
    "gru": "three gates; its state has the width of the model",
    "ssru": "two maps, without one of the output",
    "tensorized": "weights for each pair of positions",
    "separable-convolution": "one map",
    "random-synthesizer": "two maps, and a weight for each pair of positions",
    "identity": "no mixer",
    "experts": "a token uses two of eight, as many as attention's channel has",
}


def middle(s: SkeletonSizes, name: str) -> int:
    """Tokens beyond a multiple of its segments at which a mixer attends to as many keys as on average."""
    return {"infini": s.segment // 2, "longnet": s.segment + s.segment // 4, "mixed-chunk": s.head}.get(name, 0)


def mixers(s: SkeletonSizes) -> dict[str, dict[str, Any]]:
    """A setting of every mixer that decodes, by name; further settings of attention behind them."""
    heads, causal, past = {"heads": s.heads}, {"pattern": "causal"}, {"sees": "past"}
    keys = 2 * s.head  # of one head with many features
    latent = {"kv_rank": 1 << (s.width // 3).bit_length() - 1, "nope_width": s.head, "rope_width": s.head // 2}
    half = {"kind": "attention", "heads": s.heads // 2, "head_width": s.head}
    branches = {"left": half | causal, "right": {"kind": "convolution", "size": 2} | past}
    narrow_keys = heads | {"head_width": s.head // 2, "value_width": s.head}  # values twice as wide, as in the paper
    rank = -(-s.width // 16)
    found: dict[str, dict[str, Any]] = {
        "attention": heads | causal | {"positions": ROTARY},
        "infini": heads | {"segment": s.segment},
        "longnet": heads | {"segments": [s.segment // 2, 2 * s.segment], "dilations": [1, 4]} | past,
        "lsh": {"heads": round(4 / 3 * s.heads), "head_width": s.head, "buckets": 32},  # keys are the queries
        "mla": heads | causal | latent | {"value_width": s.head},
        "synthesizer": heads | causal | {"length": max(s.width, s.given + s.new)},
        "convolution": {"size": 4} | past,
        "branches": branches | {"join": "sum"},
        "mssa": {"heads": 2 * s.heads, "head_width": s.head} | causal,  # one map for queries, keys and values
        "tensorized": causal | {"length": s.given + s.new},
        "gau": causal | {"key_width": keys, "hidden": s.filled((4 - keys / s.width) / 3)},
        "mixed-chunk": {"chunk": 2 * s.head, "key_width": keys, "hidden": s.filled((4 - keys / s.width) / 3)},
        "lightweight-convolution": heads | {"size": 7} | past,
        "dynamic-convolution": {"heads": 2 * s.heads, "size": 31} | past,  # the paper's longest filters
        "lsra": heads | causal | {"size": 7},
        "performer": heads,
        "retention": narrow_keys,
        "gated-retention": narrow_keys,
        "mamba": {"hidden": s.filled(4 / (3 + (2 * rank + 55) / s.width))},  # 55: of states, filter, A, D and biases
        "mamba2": {"heads": s.filled((4 - 2 * keys / s.width) / 3) // s.head, "head_width": s.head, "state": keys},
        "rwkv": {}, "lstm": {}, "gru": {}, "s4": {}, "ssru": {}, "identity": {},
    }  # fmt: skip
    found = {name: {"kind": name} | keys for name, keys in found.items()}
    attention, shared = found["attention"], max(1, s.heads // 3)
    found |= {
        "grouped-queries": attention | {"heads": 2 * s.heads - shared, "kv_heads": shared, "head_width": s.head},
        "window": attention | {"pattern": f"causal & window({4 * s.head})"},
        "alibi": attention | {"positions": "alibi"},
        "t5": attention | {"positions": "buckets"},
        "shaw": attention | {"positions": {"kind": "shaw", "distance": 16}},
        "transformer-xl": attention  # a fifth map, of positions
        | {"positions": "transformer-xl", "heads": round(0.8 * s.heads), "head_width": s.head},
    }
    return found


def latent_sizes(s: SkeletonSizes) -> dict[str, int]:
    """Our MLA's sizes by Hugging Face's names."""
    names = {"kv_rank": "kv_lora_rank", "nope_width": "qk_nope_head_dim", "rope_width": "qk_rope_head_dim",
             "value_width": "v_head_dim"}  # fmt: skip
    return {theirs: mixers(s)["mla"][ours] for ours, theirs in names.items()}


def tree(s: SkeletonSizes, mixer: dict[str, Any], channel: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    channel = channel or {"kind": "glu", "hidden": s.hidden, "bias": False}
    layer = {"repeat": s.layers, "wiring": "pre-norm", "mixer": mixer, "channel": channel}
    common = {"kind": "decoder", "vocab": s.vocab, "width": s.width, "norm": "rms", "embed": {"tied": True}}
    return common | {"decoder": [layer]} | keys


def variants(s: SkeletonSizes) -> dict[str, dict[str, Any]]:
    """All models by name: mixers, then channels, linear maps and stacks."""
    found = {name: tree(s, mixer) for name, mixer in mixers(s).items()}
    attention = mixers(s)["attention"]
    expert = {"kind": "glu", "hidden": s.hidden // 2, "bias": False}
    found["experts"] = tree(s, attention, {"kind": "moe", "experts": 8, "top": 2, "expert": expert})
    # a map of the gate beside the two: as many weights as the gated channel
    found["rwkv-both"] = tree(s, {"kind": "rwkv"}, {"kind": "rwkv-channel", "hidden": (3 * s.hidden - s.width) // 2})
    found["yoco"] = yoco(s)
    found["bitnet-packed"] = tree(s, attention, linear="bit")
    return found


def settings(s: SkeletonSizes) -> dict[str, dict[str, Any]]:
    """All models, and further settings of attention and other mixers, which the CPU's interpreter knows."""
    known, near = mixers(s), 4 * s.head
    attention, root = known["attention"], max(2, s.head // 4)
    found = {
        "no-positions": {key: value for key, value in attention.items() if key != "positions"},
        "sparse": attention | {"pattern": f"causal & (window({root}) | strided({root}))"},
        "prefix": attention | {"pattern": f"causal & (window({near}) | global(1))"},
        "qk-norm": attention | {"qk_norm": "rms"},
        "additive": attention | {"scores": "additive", "positions": "none"},
        "separable-convolution": {"kind": "convolution", "size": 7, "sees": "past", "separable": True},
        "random-synthesizer": known["synthesizer"] | {"synthesis": "random"},
    }
    return variants(s) | {name: tree(s, mixer) for name, mixer in found.items()}


def yoco(s: SkeletonSizes) -> dict[str, Any]:
    """Half of the layers share the keys and values of the first half: two maps less in each."""
    layer = tree(s, {"kind": "gated-retention", "heads": s.heads})["decoder"][0] | {"repeat": s.layers // 2}
    cross = {"kind": "attention", "heads": s.heads, "pattern": "causal", "positions": ROTARY}
    second = {key: value for key, value in layer.items() if key != "mixer"} | {"cross": cross}
    plain = {key: value for key, value in tree(s, {}).items() if key != "decoder"}
    return plain | {"kind": "decoder-decoder", "first": [layer], "second": [second]}


@lru_cache
def skeleton(s: SkeletonSizes) -> tuple[int, int]:
    """Weights without a mixer, and with attention."""
    without, attention = (mixers(s)[name] for name in ("identity", "attention"))
    return weights(tree(s, without)), weights(tree(s, attention))


def weights(keys: dict[str, Any]) -> int:
    return int(parse(Model, keys).cost(1).parameters)  # type: ignore[type-abstract]


def ratios(s: SkeletonSizes, keys: dict[str, Any]) -> tuple[float, float]:
    """Weights of the mixers over those of attention, and of the whole model over that with attention. What differs
    in other parts counts as the mixers'."""
    (without, attention), found = skeleton(s), weights(keys)
    return (found - without) / (attention - without), found / attention
