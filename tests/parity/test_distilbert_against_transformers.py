"""DistilBERT: scores and gradients of Hugging Face's DistilBertForMaskedLM."""

import pytest
from transformers import DistilBertConfig, DistilBertForMaskedLM

import parity
import trials

CASES = {
    "small": dict(dim=24, n_heads=3, hidden_dim=40),
    "odd, relu, untied": dict(dim=30, n_heads=5, hidden_dim=19, activation="relu", tie_word_embeddings=False),
    "sinusoids": dict(dim=20, n_heads=2, hidden_dim=33, sinusoidal_pos_embds=True),
}


def theirs(name):
    config = DistilBertConfig(
        **CASES[name], n_layers=2, vocab_size=31, max_position_embeddings=12, dropout=0.0, attention_dropout=0.0
    )
    return DistilBertForMaskedLM(config).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder(theirs(name), tmp_path)
    record_difference("DistilBERT", "transformers DistilBertForMaskedLM", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
