"""T5: scores (whole and step by step), gradients and greedy answers of Hugging Face's T5ForConditionalGeneration."""

import pytest
import torch
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

CASES = {
    "small": dict(d_model=24, num_heads=3, d_kv=8, d_ff=40, num_layers=2),
    "heads wider than the model, few buckets": dict(
        d_model=20,
        num_heads=3,
        d_kv=11,
        d_ff=33,
        num_layers=3,
        num_decoder_layers=1,
        relative_attention_num_buckets=6,
        relative_attention_max_distance=5,
        layer_norm_epsilon=1e-3,
    ),
    "gated": dict(d_model=30, num_heads=4, d_kv=5, d_ff=17, num_layers=2, feed_forward_proj="gated-gelu"),
    "gated silu": dict(d_model=22, num_heads=2, d_kv=9, d_ff=19, num_layers=1, feed_forward_proj="gated-silu"),
}


def theirs(name, tied=True):
    return T5ForConditionalGeneration(
        T5Config(**CASES[name], vocab_size=31, dropout_rate=0.0, tie_word_embeddings=tied, decoder_start_token_id=0)
    ).eval()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scaled", [True, False])
def test_scores_and_gradients(name, scaled, tmp_path, record_difference):
    """Without its scale, as T5 1.1 has it; transformers ties the head of both."""
    outputs, gradients = trials.encoder_decoder(theirs(name, scaled), tmp_path)
    record_difference("T5", "transformers T5ForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_an_untied_head(tmp_path, record_difference):
    """The files of T5 1.1 have a matrix of their own for the head."""
    model = theirs("gated", tied=False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    outputs, gradients = trials.encoder_decoder(model, tmp_path)
    record_difference("T5", "transformers T5ForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
    assert not parity.ours(model, tmp_path).config.embed.tied


@pytest.mark.parametrize("name", CASES)
def test_the_encoder_alone(name, tmp_path, record_difference):
    encoder = T5EncoderModel(T5Config(**CASES[name], vocab_size=31, dropout_rate=0.0)).eval()
    outputs, gradients = trials.encoder(encoder, tmp_path)
    record_difference("T5", "transformers T5EncoderModel", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_greedy_answers(seed, tmp_path):
    model = theirs("small")
    norm = model.decoder.final_layer_norm
    found, expected = trials.greedy(model, norm, tmp_path, start=0, end=1, seed=seed)
    assert found == expected


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(UserError, match="feed_forward_proj: 'gated-laplace'"):
        FAMILIES["t5"].tree(T5Config(feed_forward_proj="gated-laplace").to_dict())
