"""Longformer (Beltagy et al. 2020): RoBERTa with a window, which may differ between layers, and global tokens, which
the batch must mark; only their classification class marks one itself, the first."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.families.roberta import HEAD, IGNORED_WEIGHTS, PRESERVED_WEIGHTS
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED

FIELDS = bert.MODEL + bert.NO_PRETRAINING.replace(bert.ANSWERS, "") + bert.HEADS + bert.OFFSET + """
attention_mode in [longformer]
encoder.mixer: {kind: longformer}
encoder[*].mixer.window = attention_window ?? 512 |windows
head<vocabulary>.transform.activation: gelu
embed.chosen <- architectures |chosen
?? {pad_token_id: 1}
"""  # fmt: skip


def windows(config: ConfigReader, line: Line) -> int | list[int]:
    """One for all layers, or one for each."""
    given, layers = config[line.key], config["num_hidden_layers"]
    if not isinstance(given, int) and len(given) != layers:
        config.problems.append(f"attention_window: {len(given)} windows for {layers} layers")
    return given


def chosen(config: ConfigReader, line: Line) -> str | object:
    """The classification class marks the first token as global."""
    name = (config.get(line.key) or [""])[0]
    return "first" if name.endswith("ForSequenceClassification") else OMITTED


CHOSEN = Conversion(chosen)
WINDOWS = Conversion(windows, lambda ours, line: [layer["mixer.window"] for layer in ours.layers("encoder")])
GLOBAL = """
encoder.blocks.{n}.sublayers.mixer.global_q.* = SELF.query_global.*
encoder.blocks.{n}.sublayers.mixer.global_kv.* = SELF.key_global.* + SELF.value_global.*
""".replace("SELF", "longformer.encoder.layer.{n}.attention.self")
LINES = bert.BODY.replace("bert.", "longformer.") + GLOBAL + HEAD + bert.CLASSES
FAMILY = bert.family(
    "longformer",
    "Longformer",
    FIELDS,
    bert.untied_bias(LINES, "lm_head"),
    {"windows": WINDOWS, "chosen": CHOSEN},
    {"LongformerModel": "longformer.pooler.dense"},
    IGNORED_WEIGHTS,
    PRESERVED_WEIGHTS,
)
