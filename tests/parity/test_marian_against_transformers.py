"""Marian: scores (whole and step by step) and gradients of Hugging Face's MarianMTModel."""

import pytest
import torch
from test_bart_against_transformers import CASES as BARTS
from test_bart_against_transformers import sizes
from transformers import MarianConfig, MarianMTModel

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

ENDS = dict(pad_token_id=1, decoder_start_token_id=1)
APART = BARTS["small"] | dict(decoder_vocab_size=23, share_encoder_decoder_embeddings=False)
CASES = BARTS | {
    "two vocabularies": APART,
    "two vocabularies, untied": APART | dict(tie_word_embeddings=False, activation_function="swish"),
}


def theirs(name):
    return MarianMTModel(MarianConfig(**sizes(**CASES[name]), **ENDS)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name), tmp_path)
    record_difference("Marian", "transformers MarianMTModel", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_a_bias_of_the_logits_is_kept(tmp_path):
    biased = theirs("small")
    parity.randomise(biased)
    biased.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    model = parity.ours(biased, tmp_path)
    assert trials.step_by_step(model, biased, trials.Rows.of(trials.SOURCES, pad=1)) < parity.TOLERANCE


def test_learned_positions_are_refused_by_name():
    with pytest.raises(UserError, match="static_position_embeddings: False"):
        FAMILIES["marian"].tree(MarianConfig().to_dict() | {"static_position_embeddings": False})
