"""mT5: scores (whole and step by step) and gradients of Hugging Face's MT5ForConditionalGeneration."""

import pytest
from test_t5_against_transformers import CASES
from transformers import MT5Config, MT5ForConditionalGeneration

import parity
import trials


def theirs(name):
    return MT5ForConditionalGeneration(MT5Config(**CASES[name], vocab_size=31, dropout_rate=0.0)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name), tmp_path)
    record_difference("mT5", "transformers MT5ForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
