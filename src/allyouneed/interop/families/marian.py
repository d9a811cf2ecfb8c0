"""Marian (Junczys-Dowmunt et al. 2018) as in the OPUS-MT models (Tiedemann, Thottingal 2020): the paper's
Transformer with all sines before all cosines."""

from __future__ import annotations

from allyouneed.interop.families.bart import Variant
from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.feature_order import model_with_sines_first, sines_first
from allyouneed.interop.hf.weight_table import EquivalentModel


def sinusoids(config: ConfigReader) -> Tree:
    return {"kind": "sinusoidal", "order": "halves"}


def fields(ours: ModelTree) -> Tree:
    vocab = ours["vocab"]
    return {
        "decoder_vocab_size": vocab["target"] if isinstance(vocab, dict) else vocab,
        "share_encoder_decoder_embeddings": not isinstance(vocab, dict),
    }


EQUIVALENT = EquivalentModel(sines_first, model_with_sines_first)  # the paper interleaves sines and cosines
FAMILY = Variant(
    "marian",
    "MarianMTModel",
    sinusoids,
    "post-norm",
    defaults={"vocab_size": 58101},
    required={"static_position_embeddings": True},
    table=512,  # of the published models
    fields=fields,
    ignored_weights=("model.*.embed_positions.weight",),
    equivalent=EQUIVALENT,
).family()
