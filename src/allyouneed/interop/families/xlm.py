"""XLM (Lample, Conneau 2019, "Cross-lingual Language Model Pretraining"): BERT's body, a language vector added to each
token vector (figure 1) in place of BERT's segments, and a head without transform.

`langs` are our `types`. Without `langs`, their model adds no language vector, ours that of language 0.
"""

from __future__ import annotations

from allyouneed.interop.families.bert import head, head_fields
from allyouneed.interop.families.xlnet import remove_prefix
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import untie_if_different
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights

DEFAULTS = {
    "vocab_size": 30145,
    "emb_dim": 2048,
    "n_layers": 12,
    "n_heads": 16,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "gelu_activation": True,
    "n_langs": 1,
    "use_lang_emb": True,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "summary_first_dropout": 0.1,
    "tie_word_embeddings": True,
}
IGNORED_KEYS = """*_index *init_std *_n_top lang_id lang2id id2lang max_vocab min_count sinusoidal_embeddings n_words
encoder_only attention_setting share_inout_emb"""


@strict_config(*IGNORED_KEYS.split())
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    for name, value in {"causal": False, "asm": False, "is_encoder": True}.items():
        config.require(name, value)
    summary = {"type": "first", "use_proj": True, "activation": None, "proj_to_labels": True}
    for name, expected in summary.items():
        config.require(f"summary_{name}", expected)
    norm, width = {"kind": "layer", "eps": config["layer_norm_eps"]}, config["emb_dim"]
    vocabulary: Tree = {"kind": "vocabulary", "bias": True}
    found = head(config, vocabulary, "identity", "summary_first_dropout", WithLMHeadModel=vocabulary)
    if found["kind"] == "classes":
        found |= {"hidden": None}
    languages, used = config["n_langs"], config["use_lang_emb"]
    return {
        "kind": "encoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config["dropout"],
        "norm": norm,
        "embed": {
            "positions": {"kind": "learned", "length": config["max_position_embeddings"]},
            "scale": "none",
            "tied": config["tie_word_embeddings"],
            "types": languages if languages > 1 and used else None,
            "norm": norm,
        },
        "encoder": [
            {
                "repeat": config["n_layers"],
                "mixer": {
                    "kind": "attention",
                    "heads": config["n_heads"],
                    "dropout": config["attention_dropout"],
                },
                "channel": {
                    "kind": "ffn",
                    "hidden": 4 * width,
                    "activation": "gelu" if config["gelu_activation"] else "relu",
                },
            }
        ],
        "head": found | {"dropout": None} if found["kind"] == "tags" else found,
    }


def hf_config(ours: ModelTree) -> Tree:
    activation = ours.activation("encoder.channel.activation")
    return {
        "vocab_size": ours["vocab"],
        "emb_dim": ours["width"],
        "n_layers": ours.depth("encoder"),
        "n_heads": ours["encoder.mixer.heads"],
        "dropout": ours.get("dropout", 0.0),
        "attention_dropout": ours.get("encoder.mixer.dropout", 0.0),
        "gelu_activation": activation == "gelu",
        "n_langs": ours.get("embed.types", 1),
        "max_position_embeddings": ours["embed.positions.length"],
        "layer_norm_eps": ours["norm.eps"],
        "tie_word_embeddings": ours.get("embed.tied", True),
    } | head_fields(ours, "XLM", "summary_first_dropout", masks="WithLMHeadModel")


LINES = """
embed.tokens.weight = transformer.embeddings.weight
embed.positions.weight = transformer.position_embeddings.weight
embed.types.weight = transformer.lang_embeddings.weight
embed.norm.* = transformer.layer_norm_emb.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = HEADS.q_lin.* + HEADS.k_lin.* + HEADS.v_lin.*
encoder.blocks.{n}.sublayers.mixer.out.* = HEADS.out_lin.*
encoder.blocks.{n}.sublayers.channel.up.* = transformer.ffns.{n}.lin1.*
encoder.blocks.{n}.sublayers.channel.down.* = transformer.ffns.{n}.lin2.*
encoder.blocks.{n}.wiring.norms.0.* = transformer.layer_norm1.{n}.*
encoder.blocks.{n}.wiring.norms.1.* = transformer.layer_norm2.{n}.*
head.weight = pred_layer.proj.weight
head.bias = pred_layer.proj.bias
head.classes.* = sequence_summary.summary.*
head.tags.* = classifier.*
""".replace("HEADS", "transformer.attentions.{n}")


def add_prefix(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Files of the headless model omit the prefix."""
    unprefixed = not any(name.startswith("transformer.") for name in weights)
    weights = {f"transformer.{name}": tensor for name, tensor in weights.items()} if unprefixed else weights
    return untie_if_different(config, weights, "pred_layer.proj.weight", "transformer.embeddings.weight"), weights


FAMILY = Family(
    "xlm",
    tree,
    LINES,
    ("*.position_ids", "pred_layer.proj.weight"),
    prepare=add_prefix,
    hf_config=hf_config,
    finish=remove_prefix,
)
