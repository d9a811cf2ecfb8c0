"""PEGASUS: scores (whole and step by step) and gradients of Hugging Face's PegasusForConditionalGeneration."""

import pytest
from test_bart_against_transformers import CASES, sizes
from transformers import PegasusConfig, PegasusForConditionalGeneration

import parity
import trials


def theirs(name, **others):
    return PegasusForConditionalGeneration(PegasusConfig(**sizes(**CASES[name]), **others)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name), tmp_path)
    record_difference("PEGASUS", "transformers PegasusForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
