"""M2M-100: scores (whole and step by step) and gradients of Hugging Face's M2M100ForConditionalGeneration.

Their table of sinusoids is computed in single precision and off by 3e-7, which is most of the differences.
"""

import pytest
from test_bart_against_transformers import CASES as BARTS
from test_bart_against_transformers import sizes
from transformers import M2M100Config, M2M100ForConditionalGeneration

import parity
import trials

CASES = BARTS | {"small": dict(d_model=32, heads=(4, 2), hidden=(40, 40), layers=(2, 2))}


def theirs(name, pad=2):
    config = M2M100Config(**sizes(**CASES[name]), pad_token_id=pad, attention_dropout=0.0)
    return M2M100ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pad", [1, 2])
def test_scores_and_gradients(name, pad, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name, pad), tmp_path)
    record_difference("M2M-100", "transformers M2M100ForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
