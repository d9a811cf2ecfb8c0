"""Qwen3 (Yang et al. 2025): Qwen2 with normalised queries and keys, and a bias everywhere or nowhere."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.families.qwen2 import kinds, patterns
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    norm = {"kind": "rms", "eps": config["rms_norm_eps"]}
    channel = llama.swiglu(config, bias=False)
    layers = [
        {
            "repeat": count,
            "wiring": "pre-norm",
            "mixer": llama.attention(config, pattern=pattern, qk_norm=norm),
            "channel": channel,
        }
        for pattern, count in patterns(config)
    ]
    return llama.decoder(config, layers)


NORMS = """
decoder.blocks.{n}.sublayers.mixer.q_norm.weight = model.layers.{n}.self_attn.q_norm.weight
decoder.blocks.{n}.sublayers.mixer.k_norm.weight = model.layers.{n}.self_attn.k_norm.weight
"""


def back(said: Said) -> Theirs:
    bias = {"attention_bias": said.flag("decoder.mixer.bias")}
    return {
        "architectures": said.writer("Qwen3ForCausalLM"),
        **llama.sizes(said),
        **llama.gated(said),
        **kinds(said),
        **bias,
    }


FAMILY = Family("qwen3", tree, llama.LINES + NORMS, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
