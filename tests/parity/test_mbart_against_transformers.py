"""mBART: scores (whole and step by step) and gradients of Hugging Face's MBartForConditionalGeneration."""

import pytest
from test_bart_against_transformers import CASES, sizes
from transformers import MBartConfig, MBartForConditionalGeneration

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES


def theirs(name, **others):
    return MBartForConditionalGeneration(MBartConfig(**sizes(**CASES[name]), **others)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name), tmp_path)
    record_difference("mBART", "transformers MBartForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_another_wiring_is_refused_by_name():
    with pytest.raises(UserError, match="normalize_before: False"):
        FAMILIES["mbart"].tree(MBartConfig().to_dict() | {"normalize_before": False})
