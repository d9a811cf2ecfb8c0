"""Longformer (Beltagy et al. 2020): RoBERTa with a window, which may differ from layer to layer, and global tokens,
which the batch has to choose; only their class for classes chooses one by itself, the first."""

from __future__ import annotations

from itertools import groupby

from allyouneed.interop.families.bert import (
    BODY,
    CLASSES,
    DEFAULTS,
    HARMLESS,
    encoder,
    head,
    learned,
    named_back,
    places,
    renamed,
    untied_bias,
    words,
)
from allyouneed.interop.families.roberta import HEAD, IGNORE, SPARE, with_gelu
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family

OTHERS = {"attention_window": 512, "pad_token_id": 1}


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    config.only("attention_mode", "longformer")
    found = encoder(config, learned(config, offset=config["pad_token_id"] + 1), {"kind": "longformer"})
    (layer,) = found["encoder"]
    said = config["attention_window"]
    windows = [said] * layer["repeat"] if isinstance(said, int) else said
    if len(windows) != layer["repeat"]:
        config.problems.append(f"attention_window: {len(windows)} windows for {layer['repeat']} layers")
    found["encoder"] = [
        layer | {"repeat": len(list(alike)), "mixer": layer["mixer"] | {"window": window}}
        for window, alike in groupby(windows)
    ]
    found["head"] = head(config, with_gelu(found["head"]), "tanh")
    if found["head"]["kind"] == "classes":
        found["embed"]["chosen"] = "first"
    return found


def back(said: Said) -> Tree:
    windows = [layer["mixer.window"] for layer in said.layers("encoder")]
    return words(said, "Longformer") | places(said) | {"attention_window": windows}


GLOBAL = """
encoder.blocks.{n}.sublayers.mixer.global_q.* = SELF.query_global.*
encoder.blocks.{n}.sublayers.mixer.global_kv.* = SELF.key_global.* + SELF.value_global.*
""".replace("SELF", "longformer.encoder.layer.{n}.attention.self")
LINES = BODY.replace("bert.", "longformer.") + GLOBAL + HEAD + CLASSES
FAMILY = Family(
    "longformer",
    tree,
    untied_bias(LINES, "lm_head"),
    IGNORE,
    before=renamed,
    spare=SPARE,
    back=back,
    after=named_back({"LongformerModel": "longformer.pooler.dense"}),
)
