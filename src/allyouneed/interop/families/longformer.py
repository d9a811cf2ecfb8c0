"""Longformer (Beltagy et al. 2020): RoBERTa with a window, which may differ between layers, and global tokens, which
the batch must mark; only their classification class marks one itself, the first."""

from __future__ import annotations

from itertools import groupby

from allyouneed.interop.families import bert
from allyouneed.interop.families.roberta import HEAD, IGNORED_WEIGHTS, PRESERVED_WEIGHTS, with_gelu
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

OWN_DEFAULTS = {"attention_window": 512, "pad_token_id": 1}


@strict_config(*bert.IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(bert.DEFAULTS | OWN_DEFAULTS)
    config.require("attention_mode", "longformer")
    found = bert.encoder(config, bert.learned(config, offset=config["pad_token_id"] + 1), {"kind": "longformer"})
    (layer,) = found["encoder"]
    given = config["attention_window"]
    windows = [given] * layer["repeat"] if isinstance(given, int) else given
    if len(windows) != layer["repeat"]:
        config.problems.append(f"attention_window: {len(windows)} windows for {layer['repeat']} layers")
    found["encoder"] = [
        layer | {"repeat": len(list(equivalent)), "mixer": layer["mixer"] | {"window": window}}
        for window, equivalent in groupby(windows)
    ]
    found["head"] = bert.head(config, with_gelu(found["head"]), "tanh")
    if found["head"]["kind"] == "classes":
        found["embed"]["chosen"] = "first"
    return found


def hf_config(ours: ModelTree) -> Tree:
    windows = [layer["mixer.window"] for layer in ours.layers("encoder")]
    return bert.config_fields(ours, "Longformer") | bert.position_fields(ours) | {"attention_window": windows}


GLOBAL = """
encoder.blocks.{n}.sublayers.mixer.global_q.* = SELF.query_global.*
encoder.blocks.{n}.sublayers.mixer.global_kv.* = SELF.key_global.* + SELF.value_global.*
""".replace("SELF", "longformer.encoder.layer.{n}.attention.self")
LINES = bert.BODY.replace("bert.", "longformer.") + GLOBAL + HEAD + bert.CLASSES
FAMILY = Family(
    "longformer",
    tree,
    bert.untied_bias(LINES, "lm_head"),
    IGNORED_WEIGHTS,
    prepare=bert.normalize_names,
    preserve=PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=bert.restore_names({"LongformerModel": "longformer.pooler.dense"}),
)
