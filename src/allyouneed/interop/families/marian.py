"""Marian (Junczys-Dowmunt et al. 2018) as the OPUS-MT models have it (Tiedemann, Thottingal 2020): the paper's
Transformer with all sines before all cosines."""

from __future__ import annotations

from allyouneed.interop.families.bart import (
    CHANGES,
    DEFAULTS,
    HARMLESS,
    IGNORE,
    LINES,
    SPARE,
    completed,
    tree_with,
    undone,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.feature_order import sines_first, with_sines_first
from allyouneed.interop.hf.weight_table import Alike, Family


@reading(*HARMLESS, "max_position_embeddings")  # places go on after it
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | {"vocab_size": 58101})
    config.only("static_position_embeddings", True)
    positions = {"kind": "sinusoidal", "order": "halves"}
    return tree_with(config, positions, "post-norm", norm=False)


def back(said: Said) -> Tree:
    vocab = said["vocab"]
    return words(said, "MarianMTModel") | {
        "decoder_vocab_size": vocab["target"] if isinstance(vocab, dict) else vocab,
        "share_encoder_decoder_embeddings": not isinstance(vocab, dict),
        "max_position_embeddings": PLACES,
    }


PLACES = 512  # as of the reference: theirs fills a table, ours counts on
IGNORED = (*IGNORE, "model.*.embed_positions.weight")
ALIKE = Alike(sines_first, with_sines_first)  # the paper's order is another
FAMILY = Family("marian", tree, LINES, IGNORED, CHANGES, completed, SPARE, back, undone, ALIKE)
