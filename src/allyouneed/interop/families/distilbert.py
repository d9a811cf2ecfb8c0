"""DistilBERT (Sanh et al. 2019): BERT with half the layers and no token types.

Sinusoidal positions (`sinusoidal_pos_embds`) are stored as a table too, and read as one.
"""

from __future__ import annotations

from allyouneed.interop.families.bert import head, head_fields, normalize_names, restore_names
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

DEFAULTS = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "n_layers": 6,
    "n_heads": 12,
    "dim": 768,
    "hidden_dim": 3072,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "activation": "gelu",
    "tie_word_embeddings": True,
}


@strict_config("qa_dropout", "sinusoidal_pos_embds", "tie_weights_", "output_past")
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    norm = {"kind": "layer", "eps": 1e-12}
    activation = config.activation("activation")
    vocabulary = {"kind": "vocabulary", "bias": True, "transform": {"activation": activation, "norm": norm}}
    found = head(config, vocabulary, "relu", "seq_classif_dropout")
    return {
        "kind": "encoder",
        "vocab": config["vocab_size"],
        "width": config["dim"],
        "dropout": config["dropout"],
        "norm": norm,
        "embed": {
            "positions": {"kind": "learned", "length": config["max_position_embeddings"]},
            "scale": "none",
            "tied": config["tie_word_embeddings"],
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
                "channel": {"kind": "ffn", "hidden": config["hidden_dim"], "activation": activation},
            }
        ],
        "head": found | {"dropout": None} if found["kind"] == "tags" else found,
    }


def hf_config(ours: ModelTree) -> Tree:
    return {
        "vocab_size": ours["vocab"],
        "max_position_embeddings": ours["embed.positions.length"],
        "n_layers": ours.depth("encoder"),
        "n_heads": ours["encoder.mixer.heads"],
        "dim": ours["width"],
        "hidden_dim": ours["encoder.channel.hidden"],
        "dropout": ours.get("dropout", 0.0),
        "attention_dropout": ours.get("encoder.mixer.dropout", 0.0),
        "activation": ours.activation("encoder.channel.activation"),
        "tie_word_embeddings": ours.get("embed.tied", True),
    } | head_fields(ours, "DistilBert", "seq_classif_dropout")


LINES = """
embed.tokens.weight = distilbert.embeddings.word_embeddings.weight
embed.positions.weight = distilbert.embeddings.position_embeddings.weight
embed.norm.* = distilbert.embeddings.LayerNorm.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = LAYER.attention.q_lin.* + LAYER.attention.k_lin.* + LAYER.attention.v_lin.*
encoder.blocks.{n}.sublayers.mixer.out.* = LAYER.attention.out_lin.*
encoder.blocks.{n}.sublayers.channel.up.* = LAYER.ffn.lin1.*
encoder.blocks.{n}.sublayers.channel.down.* = LAYER.ffn.lin2.*
encoder.blocks.{n}.wiring.norms.0.* = LAYER.sa_layer_norm.*
encoder.blocks.{n}.wiring.norms.1.* = LAYER.output_layer_norm.*
head.weight = vocab_projector.weight
head.bias = vocab_projector.bias
head.transform.linear.* = vocab_transform.*
head.transform.norm.* = vocab_layer_norm.*
head.hidden.* = pre_classifier.*
head.classes.* = classifier.*
head.tags.* = classifier.*
""".replace("LAYER", "distilbert.transformer.layer.{n}")
IGNORED_WEIGHTS = ("*.position_ids", "vocab_projector.weight")
FAMILY = Family(
    "distilbert", tree, LINES, IGNORED_WEIGHTS, prepare=normalize_names, hf_config=hf_config, finish=restore_names({})
)
