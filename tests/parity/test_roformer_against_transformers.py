"""RoFormer: scores and gradients of Hugging Face's RoFormerForMaskedLM."""

import pytest
import torch
from transformers import RoFormerConfig, RoFormerForMaskedLM

import parity
import trials
from allyouneed.errors import UserError

CASES = {
    "small": dict(hidden_size=24, num_attention_heads=3, intermediate_size=40),
    "odd, values turned too, narrow vectors": dict(
        hidden_size=30, num_attention_heads=5, intermediate_size=19, embedding_size=11, rotary_value=True
    ),
    "untied, relu": dict(
        hidden_size=20, num_attention_heads=2, intermediate_size=33, hidden_act="relu", tie_word_embeddings=False
    ),
}


def theirs(name):
    config = RoFormerConfig(
        **CASES[name],
        num_hidden_layers=2,
        vocab_size=31,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return RoFormerForMaskedLM(config).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    model = theirs(name)
    outputs, gradients = trials.encoder(model, tmp_path, model.config.type_vocab_size)
    record_difference("RoFormer", "transformers RoFormerForMaskedLM", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_other_angles_are_refused(tmp_path):
    model = theirs("small")
    with torch.no_grad():
        model.roformer.encoder.embed_positions.weight.add_(0.1)
    with pytest.raises(UserError, match="roformer: the angles are not sinusoids"):
        parity.ours(model, tmp_path)
