"""Switch Transformer: scores (whole and step by step) and gradients of SwitchTransformersForConditionalGeneration."""

import pytest
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

CASES = {
    "every second layer": dict(
        d_model=24, num_heads=3, d_kv=8, d_ff=40, num_layers=4, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2
    ),
    "odd, every layer, experts that are soon full": dict(
        d_model=30,
        num_heads=4,
        d_kv=5,
        d_ff=17,
        num_layers=2,
        num_decoder_layers=1,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=1,
        num_experts=3,
        expert_capacity=2,
        router_bias=True,
        tie_word_embeddings=False,
    ),
    "no layer is asked for": dict(
        d_model=20, num_heads=2, d_kv=9, d_ff=19, num_layers=3, num_sparse_encoder_layers=0, num_sparse_decoder_layers=1
    ),
}


def theirs(name):
    options = dict(num_decoder_layers=CASES[name]["num_layers"], vocab_size=31, dropout_rate=0.0) | CASES[name]
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**options)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name), tmp_path)
    record_difference(
        "Switch Transformer", "transformers SwitchTransformersForConditionalGeneration", outputs, gradients
    )
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_another_precision_of_the_router_is_refused_by_name():
    with pytest.raises(UserError, match="router_dtype: 'bfloat16'"):
        FAMILIES["switch_transformers"].tree(SwitchTransformersConfig(router_dtype="bfloat16").to_dict())
