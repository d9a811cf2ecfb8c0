"""MPT (MosaicML 2023): ALiBi, no biases anywhere."""

from __future__ import annotations

from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family

# theirs has no learned positions whatever it says; the rest tells how and where it was trained
HARMLESS = ("emb*_pdrop", "embedding_fraction", "fc_type", "init_*", "learned_pos_emb", "max_seq_len", "tokenizer_name")
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
    hidden = config.get("expansion_ratio", 4) * width
    return {
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
                "channel": {"kind": "ffn", "hidden": hidden, "activation": "gelu", "bias": False},
            }
        ],
    }


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
FAMILY = Family("mpt", tree, LINES, ["lm_head.weight"])
