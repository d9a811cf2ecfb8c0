"""RoFormer (Su et al. 2021): BERT whose queries and keys are turned by their places, in pairs of neighbours."""

from __future__ import annotations

from allyouneed.interop.families.bert import (
    BODY,
    CLASSES,
    DEFAULTS,
    HARMLESS,
    HEAD,
    IGNORE,
    SPARE,
    encoder,
    head,
    named_back,
    renamed,
    untied_bias,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import refuse_other_sinusoids, sinusoids
from allyouneed.interop.hf.weight_table import Family, Theirs, Weights
from allyouneed.nn.positions.absolute import Sinusoidal


def narrower(config: Reader) -> int | None:
    """The width of token vectors, where it is not the model's."""
    inner: int = config.get("embedding_size") or config["hidden_size"]
    return None if inner == config["hidden_size"] else inner


@reading(*HARMLESS, "max_position_embeddings")  # places go on after it
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | {"vocab_size": 50000})
    rotary = {"kind": "rotary", "order": "interleaved", "values": config.get("rotary_value", False)}
    found = encoder(config, {"kind": "none"}, {"positions": rotary}, narrower(config))
    return found | {"head": head(config, found["head"], config.activation("hidden_act"))}


def back(said: Said) -> Tree:
    """Their table of angles needs to know how many places it is for, which here go on for ever."""
    return words(said, "RoFormer") | {
        "embedding_size": said.get("embed.inner", said["width"]),
        "max_position_embeddings": PLACES,
        "rotary_value": said.get("encoder.mixer.positions.values", False),
    }


PLACES = 1536  # as of the reference
TABLE = "roformer.encoder.embed_positions.weight"


def checked(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Their files hold the sines and cosines of the angles, which ours computes; others are refused."""
    config, weights = renamed(config, weights)
    if TABLE in weights:
        refuse_other_sinusoids(weights[TABLE], SINUSOIDS, "roformer: the angles")
    return config, weights


def with_angles(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    if TABLE not in weights:
        width = config["hidden_size"] // config["num_attention_heads"]
        table = sinusoids(SINUSOIDS, config["max_position_embeddings"], width)
        weights = {TABLE: table.to(next(iter(weights.values()))), **weights}
    return named_back({})({**config, "max_position_embeddings": len(weights[TABLE])}, weights)


SINUSOIDS = Sinusoidal(order="halves")
LINES = BODY.replace("bert.", "roformer.") + HEAD + CLASSES + "embed.widen.* = roformer.embeddings_project.*"
FAMILY = Family(
    "roformer",
    tree,
    untied_bias(LINES, "cls.predictions"),
    IGNORE,
    before=checked,
    spare=(*SPARE, TABLE),
    back=back,
    after=with_angles,
)
