"""Qwen2 (Yang et al. 2024): Llama with a bias for queries, keys and values; some layers may see a window."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs

KINDS = {"full_attention": "causal", "sliding_attention": "causal & window({})"}


def patterns(config: Reader, usual: list[str] | None = None) -> list[tuple[str, int]]:
    """Which pattern so many layers in a row have; `usual`: the kinds of layers where the config does not say them."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    sliding = config.get("use_sliding_window", window is not None) and window is not None
    first = config.get("max_window_layers", 0)
    kinds = (
        config.get("layer_types")
        or usual
        or ["sliding_attention" if sliding and number >= first else "full_attention" for number in range(count)]
    )
    unknown = sorted(set(kinds) - set(KINDS))
    config.problems.extend(f"layer_types: {kind!r} is not known here ({', '.join(KINDS)} are)" for kind in unknown)
    words = [KINDS.get(kind, "causal").format(window) for kind in kinds]
    return [(word, len(list(run))) for word, run in groupby(words)]


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    bias = {"q": True, "k": True, "v": True, "out": False}
    channel = llama.swiglu(config, bias=False)
    layers = [
        {
            "repeat": count,
            "wiring": "pre-norm",
            "mixer": llama.attention(config, pattern=pattern, bias=bias),
            "channel": channel,
        }
        for pattern, count in patterns(config)
    ]
    return llama.decoder(config, layers)


def kinds(said: Said) -> dict[str, Any]:
    """The way back of `patterns`."""
    window = llama.window(said)
    plain = [layer.get("mixer.pattern") == "causal" for layer in said.layers("decoder")]
    return {
        "layer_types": ["full_attention" if full else "sliding_attention" for full in plain],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def back(said: Said) -> Theirs:
    return {"architectures": said.writer("Qwen2ForCausalLM"), **llama.sizes(said), **llama.gated(said), **kinds(said)}


FAMILY = Family("qwen2", tree, llama.LINES, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
