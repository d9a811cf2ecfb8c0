"""RWKV-4 (Peng et al. 2023): a norm after the embedding, shares of the token before, a decay for each feature."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Change, Family, Theirs

# how long a text their CUDA kernel takes at once; halvings that change how numbers are written, not what they are
HARMLESS = ("context_length", "rescale_every")


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    width = config["hidden_size"]
    norm = {"kind": "layer", "eps": config.only("layer_norm_epsilon", 1e-5)}  # their last norm always has this one
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
    return headed(config, found)


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


def back(said: Said) -> Theirs:
    return {
        "architectures": said.writer("RwkvForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": said.depth("decoder"),
        "attention_hidden_size": said.get("decoder.mixer.hidden") or said["width"],
        "intermediate_size": said["decoder.channel.hidden"],
        "layer_norm_epsilon": said["norm.eps"],
        "rescale_every": 0,
        "tie_word_embeddings": said["embed.tied"],
    }


FAMILY = Family(
    "rwkv",
    tree,
    LINES,
    ignore=["head.weight"],
    before=chained(prefixed("rwkv.", "head."), own_head("head.weight", "rwkv.embeddings.weight")),
    back=back,
    after=unprefixed("rwkv."),
    changes={"flat": Change(lambda tensor, config: tensor.flatten(), lambda tensor, config: tensor[None, None])},
)
