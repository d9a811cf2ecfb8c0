"""Decode steps of a model of each kind, by kernels, against the parts in double precision; a part of kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.check.report import LIMITS, Check

HEADS_OF = {"heads": 2}
LATENT = {"kv_rank": 20, "nope_width": 8, "rope_width": 6, "value_width": 10, "pattern": "causal"}
PAST = {"size": 3, "sees": "past"}
MIXERS: dict[str, dict[str, object]] = {
    "retention": HEADS_OF | {"value_width": 10, "head_norm": {"kind": "rms"}},
    "gated-retention": HEADS_OF,
    "rwkv": {"hidden": 40},
    "mla": {"heads": 18} | LATENT,
    "mla with a latent of queries": {"kind": "mla", "heads": 3, "query_rank": 7} | LATENT | {"kv_rank": 70},
    "performer": HEADS_OF | {"features": 20},
    "infini": HEADS_OF | {"segment": 3, "positions": "rotary"},
    "lstm": {},
    "gru": {"bias": False},
    "mamba": {"bias": True},
    "mixed-chunk": {"chunk": 3, "key_width": 6},
    "mixed-chunk without positions": {"kind": "mixed-chunk", "chunk": 2, "key_width": 40, "positions": "bias"},
    "mixed-chunk of one length": {"kind": "mixed-chunk", "chunk": 5, "hidden": 10, "positions": "rotary", "length": 7},
    "gau": {"pattern": "causal", "key_width": 6},
    "gau of one length": {"kind": "gau", "pattern": "causal", "hidden": 10, "positions": "bias", "length": 7},
    "mamba2": {"heads": 4, "groups": 2, "state": 10},
    "s4": {"state": 6},
    "S4D": {"kind": "s4", "matrix": "diagonal", "state": 10},
    "convolution": PAST,
    "separable convolution": {"kind": "convolution", "separable": True, "activation": "relu"} | PAST,
    "lightweight-convolution": {"heads": 3} | PAST,
    "dynamic-convolution": {"heads": 3} | PAST,
    "lsra": HEADS_OF | {"size": 3, "pattern": "causal"},
    "mssa": HEADS_OF | {"pattern": "causal"},
    "longnet": HEADS_OF | {"segments": [4, 40], "dilations": [2, 3]},
    "longnet in a ring": HEADS_OF | {"kind": "longnet", "segments": [2, 6], "dilations": [1, 3], "positions": "rotary"},
    "longnet of a long segment": {"kind": "longnet", "heads": 3, "segments": [3, 400], "dilations": [2, 3]},
    "lsh": HEADS_OF | {"buckets": 4},
    "lsh of six buckets": {"kind": "lsh", "heads": 3, "head_width": 5, "buckets": 6, "rounds": 3, "whole": 3},
    "lsh of one bucket": HEADS_OF | {"kind": "lsh", "buckets": 1},
    "synthesizer": HEADS_OF | {"pattern": "causal", "length": 90},
    "tensorized": {"pattern": "causal", "length": 45, "rank": 20},
    "ALiBi": {"kind": "attention", "heads": 4, "kv_heads": 2, "pattern": "causal", "positions": "alibi"},
    "T5": {"kind": "attention", "heads": 2, "pattern": "causal & (window(2) | strided(3))", "positions": "buckets"},
    "a ring": {"kind": "attention", "heads": 2, "pattern": "causal & window(3)", "positions": "rotary"},
    "a ring with ALiBi": {"kind": "attention", "heads": 2, "pattern": "causal & window(4)", "positions": "alibi"},
    "a ring and first tokens": {"kind": "attention", "heads": 2, "pattern": "causal & (window(3) | global(1))"},
    "Shaw": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": {"kind": "shaw", "distance": 2}},
    "Shaw with shared keys": {
        "kind": "attention",
        "heads": 4,
        "kv_heads": 2,
        "pattern": "causal",
        "positions": {"kind": "shaw", "distance": 3, "values": False},
    },
    "a ring with Shaw": {
        "kind": "attention",
        "heads": 2,
        "pattern": "causal & window(4)",
        "positions": {"kind": "shaw", "distance": 2},
    },
    "Transformer-XL": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": "transformer-xl"},
    "a ring with Transformer-XL": {
        "kind": "attention",
        "heads": 2,
        "pattern": "causal & window(3)",
        "positions": {"kind": "transformer-xl", "clamp": 1},
    },
    "branches": {
        "left": {"kind": "attention", "heads": 2, "pattern": "causal"},
        "right": {"kind": "convolution"} | PAST,
    },
}
# channels and linear maps, with attention
EXPERT = {"kind": "glu", "hidden": 20}
OTHERS: dict[str, dict[str, object]] = {
    "experts": {"channel": {"kind": "moe", "experts": 5, "top": 2, "expert": EXPERT, "shared": EXPERT}},
    "a capacity": {"channel": {"kind": "moe", "experts": 3, "top": 1, "expert": EXPERT, "row_capacity": 1}},
    "ternary weights": {"linear": "bit", "channel": EXPERT},
    "normed ternary weights": {"linear": {"kind": "bit", "norm": {"kind": "rms"}}, "channel": EXPERT},
}


def models() -> dict[str, dict[str, Any]]:
    """By name."""
    found: dict[str, dict[str, Any]] = {}
    for kind, keys in (MIXERS | OTHERS).items():
        mixer = {"kind": kind} | keys if kind in MIXERS else {"kind": "attention", "pattern": "causal"} | HEADS_OF
        channel = {"kind": "rwkv-channel" if kind == "rwkv" else "ffn", "hidden": 48}
        more = keys if kind in OTHERS else {}
        layer = {"repeat": 2, "wiring": "pre-norm", "mixer": mixer, "channel": more.get("channel", channel)}
        found[kind] = {"kind": "decoder", "vocab": 50, "width": 24, "linear": more.get("linear", "dense")}
        found[kind]["decoder"] = [layer]
    return found


def mixers(check: Check, cuda: bool) -> None:
    """Decode steps by kernels against the parts in double precision: logits of all steps."""
    import allyouneed as ayn
    from allyouneed.nn.linear.ternary import pack_model
    from allyouneed.nn.ops.attention import decode
    from allyouneed.runtime.cuda import kernels, mixer_kernels
    from allyouneed.runtime.cuda.decode_step import DecodeStep
    from allyouneed.runtime.cuda.static_cache import StaticStates

    patched: Any

    def run(model: torch.nn.Module, rows: int, group: int, steps: int) -> Tensor:
        found: list[Tensor] = []
        states = StaticStates(model, rows // group, group, 140, 0)
        step = DecodeStep(model, states)
        for number in range(steps):
            tokens = (torch.arange(rows, device=states.device) * 7 + number) % 50
            found.append(step(tokens).double().cpu())
            states.reorder(states.row_ids // group * group + (states.row_ids + number) % 3 % group)
        return torch.stack(found)

    print("decode steps of mixers")
    usual = mixer_kernels.usable
    for kind, keys in models().items():
        if check.models and kind not in check.models:
            continue
        torch.manual_seed(1)
        model = ayn.build(keys).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        model = model if keys["linear"] == "dense" else pack_model(model)
        for rows, group in ((1, 1), (5, 5)) if cuda else ((3, 3),):
            for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
                # several tiles and splits of the keys; what rounds or chooses experts differs too soon
                steps = 40 if cuda and dtype is torch.float32 and kind in MIXERS else 4
                with torch.no_grad():
                    exact = run(model.cpu().double(), rows, group, steps)
                    if not cuda:
                        for patched in (mixer_kernels, decode, kernels):
                            patched.usable = lambda x: x.dtype is torch.float32
                    model = model.to(check.device, dtype)
                    found = run(model, rows, group, steps)
                    mixer_kernels.usable = decode.usable = kernels.usable = usual
                text = f"{kind}, {rows} rows of {group} {str(dtype)[6:]}"
                check.report(text, [found], [exact], 3 * LIMITS[dtype])
