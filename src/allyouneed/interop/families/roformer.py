"""RoFormer (Su et al. 2021): BERT with rotary positions on adjacent features."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.transforms import check_sinusoids, sinusoid_table
from allyouneed.interop.hf.weight_table import HfConfig, Weights
from allyouneed.nn.positions.absolute import Sinusoidal

# their table of angles needs a length; ours is computed, and not limited: 1536 is that of the published model
FIELDS = bert.MODEL + bert.NO_PRETRAINING + bert.HEADS + """
embed.positions: {kind: none}
embed.inner = embedding_size |inner
encoder.mixer.positions: {kind: rotary, order: interleaved}
encoder.mixer.positions.values = rotary_value ?? false
head<classes>.hidden <- hidden_act |activation
?? {vocab_size: 50000}
-> {max_position_embeddings: 1536}
ignore max_position_embeddings
"""  # fmt: skip
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
FAMILY = bert.family(
    "roformer",
    "RoFormer",
    FIELDS,
    bert.untied_bias(LINES, "cls.predictions"),
    preserve=(*bert.PRESERVED_WEIGHTS, TABLE),
    prepare=prepare,
    finish=finish,
)
