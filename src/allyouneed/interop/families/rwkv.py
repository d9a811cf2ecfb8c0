"""RWKV-4 (Peng et al. 2023): a norm after the embedding, token shift, a decay per feature."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform

# the limit of their CUDA kernel; rescaling that does not change the result
IGNORED_KEYS = ("context_length", "rescale_every")


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    width = config["hidden_size"]
    norm = {"kind": "layer", "eps": config.require("layer_norm_epsilon", 1e-5)}  # hard-coded in their last norm
    hidden = config.get("attention_hidden_size") or width
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "norm": norm,
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False), "norm": norm},
        "decoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": "pre-norm",
                "mixer": {"kind": "rwkv", "hidden": None if hidden == width else hidden},
                "channel": {"kind": "rwkv-channel", "hidden": config.get("intermediate_size") or 4 * width},
            }
        ],
    }
    return match_head(config, found)


LINES = """
embed.tokens.weight = rwkv.embeddings.weight
embed.norm.* = rwkv.blocks.0.pre_ln.*
head.weight = head.weight
decoder.blocks.{n}.wiring.norms.0.* = rwkv.blocks.{n}.ln1.*
decoder.blocks.{n}.wiring.norms.1.* = rwkv.blocks.{n}.ln2.*
decoder.blocks.{n}.sublayers.mixer.mix_r = rwkv.blocks.{n}.attention.time_mix_receptance |flat
decoder.blocks.{n}.sublayers.mixer.mix_k = rwkv.blocks.{n}.attention.time_mix_key |flat
decoder.blocks.{n}.sublayers.mixer.mix_v = rwkv.blocks.{n}.attention.time_mix_value |flat
decoder.blocks.{n}.sublayers.mixer.decay = rwkv.blocks.{n}.attention.time_decay
decoder.blocks.{n}.sublayers.mixer.bonus = rwkv.blocks.{n}.attention.time_first
decoder.blocks.{n}.sublayers.mixer.r.weight = rwkv.blocks.{n}.attention.receptance.weight
decoder.blocks.{n}.sublayers.mixer.k.weight = rwkv.blocks.{n}.attention.key.weight
decoder.blocks.{n}.sublayers.mixer.v.weight = rwkv.blocks.{n}.attention.value.weight
decoder.blocks.{n}.sublayers.mixer.out.weight = rwkv.blocks.{n}.attention.output.weight
decoder.blocks.{n}.sublayers.channel.mix_r = rwkv.blocks.{n}.feed_forward.time_mix_receptance |flat
decoder.blocks.{n}.sublayers.channel.mix_k = rwkv.blocks.{n}.feed_forward.time_mix_key |flat
decoder.blocks.{n}.sublayers.channel.r.weight = rwkv.blocks.{n}.feed_forward.receptance.weight
decoder.blocks.{n}.sublayers.channel.up.weight = rwkv.blocks.{n}.feed_forward.key.weight
decoder.blocks.{n}.sublayers.channel.down.weight = rwkv.blocks.{n}.feed_forward.value.weight
decoder.end.* = rwkv.ln_out.*
"""


def hf_config(ours: ModelTree) -> HfConfig:
    return {
        "architectures": ours.architectures("RwkvForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "attention_hidden_size": ours.get("decoder.mixer.hidden") or ours["width"],
        "intermediate_size": ours["decoder.channel.hidden"],
        "layer_norm_epsilon": ours["norm.eps"],
        "rescale_every": 0,
        "tie_word_embeddings": ours["embed.tied"],
    }


FAMILY = Family(
    "rwkv",
    tree,
    LINES,
    ignore=["head.weight"],
    prepare=chain(add_prefix("rwkv.", "head."), untie_head("head.weight", "rwkv.embeddings.weight")),
    hf_config=hf_config,
    finish=remove_prefix("rwkv."),
    transforms={
        "flat": TensorTransform(lambda tensor, config: tensor.flatten(), lambda tensor, config: tensor[None, None])
    },
)
