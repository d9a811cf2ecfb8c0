"""MPT (MosaicML 2023): ALiBi, no biases anywhere."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs

# theirs has no learned positions and hidden layers of four times the width, whatever it says; the rest tells how and
# where it was trained
HARMLESS = (
    "expansion_ratio",
    "emb*_pdrop",
    "embedding_fraction",
    "fc_type",
    "init_*",
    "learned_pos_emb",
    "max_seq_len",
    "tokenizer_name",
)
UNUSED = ("attn_impl", "attn_uses_sequence_id", "is_encoder_decoder")


def positions(config: Reader) -> Tree:
    config.only("alibi", True)
    return {"kind": "alibi", "octaves": config.get("alibi_bias_max", 8)}


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    inside, width, heads = config.inside("attn_config"), config["d_model"], config["n_heads"]
    config.only("no_bias", True)
    config.only("norm_type", "low_precision_layernorm", "layernorm")
    inside.only("attn_type", "multihead_attention")
    drop = inside.get("attn_pdrop", 0.0)
    mixer = {
        "kind": "attention",
        "heads": heads,
        "pattern": "causal",
        "positions": positions(inside),
        "scores": {"kind": "scaled-dot", "scale": inside.get("softmax_scale")},
        "bias": False,
        "dropout": drop,
    }
    inside.finish(*UNUSED)
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("resid_pdrop", 0.0),
        "norm": {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5), "bias": False},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", True)},
        "decoder": [
            {
                "repeat": config["n_layers"],
                "wiring": "pre-norm",
                "mixer": mixer,
                "channel": {"kind": "ffn", "hidden": 4 * width, "activation": "gelu", "bias": False},
            }
        ],
    }
    return headed(config, found)


LINES = """
embed.tokens.weight = transformer.wte.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.weight = transformer.blocks.{n}.norm_1.weight
decoder.blocks.{n}.wiring.norms.1.weight = transformer.blocks.{n}.norm_2.weight
decoder.blocks.{n}.sublayers.mixer.qkv.weight = transformer.blocks.{n}.attn.Wqkv.weight
decoder.blocks.{n}.sublayers.mixer.out.weight = transformer.blocks.{n}.attn.out_proj.weight
decoder.blocks.{n}.sublayers.channel.up.weight = transformer.blocks.{n}.ffn.up_proj.weight
decoder.blocks.{n}.sublayers.channel.down.weight = transformer.blocks.{n}.ffn.down_proj.weight
decoder.end.weight = transformer.norm_f.weight
"""


def back(said: Said) -> Theirs:
    inside = {
        "alibi": said.get("decoder.mixer.positions.kind") == "alibi",
        "alibi_bias_max": int(said["decoder.mixer.positions.octaves"]),
        "softmax_scale": said.get("decoder.mixer.scores.scale"),
    }
    return {
        "architectures": said.writer("MptForCausalLM"),
        "vocab_size": said["vocab"],
        "d_model": said["width"],
        "n_layers": said.depth("decoder"),
        "n_heads": said["decoder.mixer.heads"],
        "layer_norm_epsilon": said["norm.eps"],
        "resid_pdrop": said["dropout"],
        "tie_word_embeddings": said["embed.tied"],
        "attn_config": inside,
    }


FAMILY = Family(
    "mpt",
    tree,
    LINES,
    ["lm_head.weight"],
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.wte.weight")),
    back=back,
    after=unprefixed("transformer."),
)
