"""Marian (Junczys-Dowmunt et al. 2018) as in the OPUS-MT models (Tiedemann, Thottingal 2020): the paper's
Transformer with all sines before all cosines."""

from __future__ import annotations

from allyouneed.interop.families.bart import (
    DEFAULTS,
    IGNORED_KEYS,
    IGNORED_WEIGHTS,
    LINES,
    PRESERVED_WEIGHTS,
    TRANSFORMS,
    build_tree,
    config_fields,
    finish,
    prepare,
)
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.feature_order import model_with_sines_first, sines_first
from allyouneed.interop.hf.weight_table import EquivalentModel, Family


@strict_config(*IGNORED_KEYS, "max_position_embeddings")  # positions are computed, not limited
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS | {"vocab_size": 58101})
    config.require("static_position_embeddings", True)
    positions = {"kind": "sinusoidal", "order": "halves"}
    return build_tree(config, positions, "post-norm", norm=False)


def hf_config(ours: ModelTree) -> Tree:
    vocab = ours["vocab"]
    return config_fields(ours, "MarianMTModel") | {
        "decoder_vocab_size": vocab["target"] if isinstance(vocab, dict) else vocab,
        "share_encoder_decoder_embeddings": not isinstance(vocab, dict),
        "max_position_embeddings": DEFAULT_POSITIONS,
    }


DEFAULT_POSITIONS = 512  # of the published models; theirs is a table, ours is computed
IGNORED = (*IGNORED_WEIGHTS, "model.*.embed_positions.weight")
EQUIVALENT = EquivalentModel(sines_first, model_with_sines_first)  # the paper interleaves sines and cosines
FAMILY = Family("marian", tree, LINES, IGNORED, TRANSFORMS, prepare, PRESERVED_WEIGHTS, hf_config, finish, EQUIVALENT)
