"""RoBERTa: scores and gradients of Hugging Face's RobertaForMaskedLM."""

import pytest
from transformers import RobertaConfig, RobertaForMaskedLM

import parity
import trials

CASES = {
    "small": dict(hidden_size=24, num_attention_heads=3, intermediate_size=40, type_vocab_size=1, pad_token_id=1),
    "odd, another padding token, untied": dict(
        hidden_size=35,
        num_attention_heads=7,
        intermediate_size=19,
        hidden_act="gelu_new",
        pad_token_id=2,
        layer_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
}


def theirs(name):
    config = RobertaConfig(
        **CASES[name],
        num_hidden_layers=2,
        vocab_size=31,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return RobertaForMaskedLM(config).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    model = theirs(name)
    outputs, gradients = trials.encoder(model, tmp_path, model.config.type_vocab_size)
    record_difference("RoBERTa", "transformers RobertaForMaskedLM", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
