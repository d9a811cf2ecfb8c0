"""MPT (MosaicML 2023): ALiBi, no biases anywhere."""

from __future__ import annotations

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

# the implementation has no learned positions and a hidden width of 4 × d_model, whatever the config says; the rest
# concerns training
IGNORED_KEYS = (
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


def positions(config: ConfigReader) -> Tree:
    config.require("alibi", True)
    return {"kind": "alibi", "octaves": config.get("alibi_bias_max", 8)}


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    attn, width, heads = config.nested("attn_config"), config["d_model"], config["n_heads"]
    config.require("no_bias", True)
    config.require("norm_type", "low_precision_layernorm", "layernorm")
    attn.require("attn_type", "multihead_attention")
    drop = attn.get("attn_pdrop", 0.0)
    mixer = {
        "kind": "attention",
        "heads": heads,
        "pattern": "causal",
        "positions": positions(attn),
        "scores": {"kind": "scaled-dot", "scale": attn.get("softmax_scale")},
        "bias": False,
        "dropout": drop,
    }
    attn.refuse_unread(*UNUSED)
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
    return match_head(config, found)


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


def hf_config(ours: ModelTree) -> HfConfig:
    attn = {
        "alibi": ours.get("decoder.mixer.positions.kind") == "alibi",
        "alibi_bias_max": int(ours["decoder.mixer.positions.octaves"]),
        "softmax_scale": ours.get("decoder.mixer.scores.scale"),
    }
    return {
        "architectures": ours.architectures("MptForCausalLM"),
        "vocab_size": ours["vocab"],
        "d_model": ours["width"],
        "n_layers": ours.depth("decoder"),
        "n_heads": ours["decoder.mixer.heads"],
        "layer_norm_epsilon": ours["norm.eps"],
        "resid_pdrop": ours["dropout"],
        "tie_word_embeddings": ours["embed.tied"],
        "attn_config": attn,
    }


FAMILY = Family(
    "mpt",
    tree,
    LINES,
    ["lm_head.weight"],
    prepare=chain(add_prefix("transformer."), untie_head("lm_head.weight", "transformer.wte.weight")),
    hf_config=hf_config,
    finish=remove_prefix("transformer."),
)
