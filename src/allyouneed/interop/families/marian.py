"""Marian (Junczys-Dowmunt et al. 2018) as in the OPUS-MT models (Tiedemann, Thottingal 2020): the paper's
Transformer with all sines before all cosines."""

from __future__ import annotations

from allyouneed.interop.families import bart
from allyouneed.interop.hf.feature_order import model_with_sines_first, sines_first
from allyouneed.interop.hf.weight_table import EquivalentModel

SINUSOIDS = """
embed.positions: {kind: sinusoidal, order: halves}
ignore max_position_embeddings
"""
# the published models' position tables have 512 rows; ours are computed
FIELDS = bart.MODEL + bart.POST_NORM + SINUSOIDS + """
kind = architectures |class [Marian, {MTModel: encoder-decoder, ForConditionalGeneration: encoder-decoder,
    Model: encoder-decoder}]
vocab = vocab_size, decoder_vocab_size, two_vocabularies, share_encoder_decoder_embeddings |vocabularies separate
static_position_embeddings in [true]
-> {max_position_embeddings: 512}
?? {vocab_size: 58101}
"""  # fmt: skip
EQUIVALENT = EquivalentModel(sines_first, model_with_sines_first)  # the paper interleaves sines and cosines
FAMILY = bart.family("marian", "Marian", FIELDS, ignore=("model.*.embed_positions.weight",), equivalent=EQUIVALENT)
