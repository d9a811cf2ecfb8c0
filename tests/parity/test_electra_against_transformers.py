"""ELECTRA: scores and gradients of Hugging Face's ElectraForMaskedLM."""

import pytest
from transformers import ElectraConfig, ElectraForMaskedLM

import parity
import trials

CASES = {
    "small": dict(hidden_size=24, embedding_size=10, num_attention_heads=3, intermediate_size=40),
    "odd, relu, as wide inside as outside": dict(
        hidden_size=35, embedding_size=35, num_attention_heads=5, intermediate_size=19, hidden_act="relu"
    ),
    "untied, one kind of text": dict(
        hidden_size=20,
        embedding_size=20,
        num_attention_heads=2,
        intermediate_size=33,
        type_vocab_size=1,
        tie_word_embeddings=False,
    ),
}


def theirs(name):
    config = ElectraConfig(
        **CASES[name],
        num_hidden_layers=2,
        vocab_size=31,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ElectraForMaskedLM(config).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    model = theirs(name)
    outputs, gradients = trials.encoder(model, tmp_path, model.config.type_vocab_size)
    record_difference("ELECTRA", "transformers ElectraForMaskedLM", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
