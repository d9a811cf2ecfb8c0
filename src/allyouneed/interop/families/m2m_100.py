"""M2M-100 (Fan et al. 2020): pre-norm, and tensor2tensor's sinusoids, starting after `pad_token_id`."""

from __future__ import annotations

from allyouneed.interop.families import bart
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line

# the published model's position table has 1024 rows; ours is computed
FIELDS = bart.MODEL + """
embed.positions: {kind: sinusoidal, order: halves, closed: true}
embed.positions.offset = pad_token_id ?? 1 |offset
-> {max_position_embeddings: 1024}
?? {vocab_size: 128112, scale_embedding: true, activation_function: relu, attention_dropout: 0.1}
ignore max_position_embeddings
"""  # fmt: skip


def read_offset(config: ConfigReader, line: Line) -> int:
    if config["d_model"] % 2:
        config.problems.append(f"d_model: {config['d_model']} is odd; the last feature would have no sinusoid")
    return config[line.key] + 1


FAMILY = bart.family(
    "m2m_100",
    "M2M100",
    FIELDS,
    has_bias=False,
    ignore=("model.*.embed_positions.weights",),
    conversions={"offset": Conversion(read_offset, lambda ours, line: max(ours.get(line.path, 0) - 1, 0))},
)
