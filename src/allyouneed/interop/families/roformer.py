"""RoFormer (Su et al. 2021): BERT with rotary positions on adjacent features."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import check_sinusoids, sinusoid_table
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights
from allyouneed.nn.positions.absolute import Sinusoidal


def embedding_width(config: ConfigReader) -> int | None:
    """The embedding width, where it differs from the model's."""
    inner: int = config.get("embedding_size") or config["hidden_size"]
    return None if inner == config["hidden_size"] else inner


@strict_config(*bert.IGNORED_KEYS, "max_position_embeddings")  # positions are computed, not limited
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(bert.DEFAULTS | {"vocab_size": 50000})
    rotary = {"kind": "rotary", "order": "interleaved", "values": config.get("rotary_value", False)}
    found = bert.encoder(config, {"kind": "none"}, {"positions": rotary}, embedding_width(config))
    return found | {"head": bert.head(config, found["head"], config.activation("hidden_act"))}


def hf_config(ours: ModelTree) -> Tree:
    """Their table of angles needs a length; ours is computed."""
    return bert.config_fields(ours, "RoFormer") | {
        "embedding_size": ours.get("embed.inner", ours["width"]),
        "max_position_embeddings": DEFAULT_POSITIONS,
        "rotary_value": ours.get("encoder.mixer.positions.values", False),
    }


DEFAULT_POSITIONS = 1536  # of the published model
TABLE = "roformer.encoder.embed_positions.weight"


def prepare(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Their files store the sines and cosines, which ours computes; a different table is refused."""
    config, weights = bert.normalize_names(config, weights)
    if TABLE in weights:
        check_sinusoids(weights[TABLE], SINUSOIDS, "roformer: the angles")
    return config, weights


def finish(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    if TABLE not in weights:
        width = config["hidden_size"] // config["num_attention_heads"]
        table = sinusoid_table(SINUSOIDS, config["max_position_embeddings"], width)
        weights = {TABLE: table.to(next(iter(weights.values()))), **weights}
    return bert.restore_names({})({**config, "max_position_embeddings": len(weights[TABLE])}, weights)


SINUSOIDS = Sinusoidal(order="halves")
LINES = (
    bert.BODY.replace("bert.", "roformer.") + bert.HEAD + bert.CLASSES + "embed.widen.* = roformer.embeddings_project.*"
)
FAMILY = Family(
    "roformer",
    tree,
    bert.untied_bias(LINES, "cls.predictions"),
    bert.IGNORED_WEIGHTS,
    prepare=prepare,
    preserve=(*bert.PRESERVED_WEIGHTS, TABLE),
    hf_config=hf_config,
    finish=finish,
)
