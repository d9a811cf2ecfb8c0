"""Marian: scores (whole and step by step) and gradients of Hugging Face's MarianMTModel."""

import judge
import pytest
import torch
import trials
from test_bart_against_transformers import CASES, sizes
from transformers import MarianConfig, MarianMTModel

from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

ENDS = dict(pad_token_id=1, decoder_start_token_id=1)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    theirs = MarianMTModel(MarianConfig(**sizes(**CASES[name]), **ENDS)).eval()
    outputs, gradients = trials.encoder_decoder(theirs, tmp_path)
    record_difference("Marian", "transformers MarianMTModel", outputs, gradients)
    assert outputs < judge.TOLERANCE and gradients < judge.TOLERANCE


def test_two_vocabularies(tmp_path, record_difference):
    config = MarianConfig(
        **sizes(**CASES["small"]), **ENDS, decoder_vocab_size=23, share_encoder_decoder_embeddings=False
    )
    outputs, gradients = trials.encoder_decoder(MarianMTModel(config).eval(), tmp_path)
    record_difference("Marian", "transformers MarianMTModel", outputs, gradients)
    assert outputs < judge.TOLERANCE and gradients < judge.TOLERANCE


def test_a_bias_of_the_logits_is_kept(tmp_path):
    theirs = MarianMTModel(MarianConfig(**sizes(**CASES["small"]), **ENDS)).eval()
    judge.randomise(theirs)
    theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    model = judge.ours(theirs, tmp_path)
    assert trials.step_by_step(model, theirs, trials.Rows.of(trials.SOURCES, pad=1)) < judge.TOLERANCE


def test_learned_places_are_refused_by_name():
    with pytest.raises(UserError, match="static_position_embeddings: False"):
        FAMILIES["marian"].tree(MarianConfig().to_dict() | {"static_position_embeddings": False})
