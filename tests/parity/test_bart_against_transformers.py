"""BART: scores (whole and step by step), gradients and greedy answers of transformers' BartForConditionalGeneration."""

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, BartModel

import parity
import trials

CASES = {
    "small": dict(d_model=24, heads=(3, 2), hidden=(40, 40), layers=(2, 2)),
    "odd, unlike sides, relu, scaled": dict(
        d_model=30, heads=(5, 6), hidden=(9, 33), layers=(3, 1), activation_function="relu", scale_embedding=True
    ),
    "untied": dict(d_model=20, heads=(4, 5), hidden=(17, 21), layers=(1, 2), tie_word_embeddings=False),
}


def sizes(d_model, heads, hidden, layers, **others):
    return dict(
        d_model=d_model,
        encoder_attention_heads=heads[0],
        decoder_attention_heads=heads[1],
        encoder_ffn_dim=hidden[0],
        decoder_ffn_dim=hidden[1],
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        vocab_size=31,
        max_position_embeddings=16,
        dropout=0.0,
        **others,
    )


def theirs(name, **others):
    return BartForConditionalGeneration(BartConfig(**sizes(**CASES[name], **others))).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    outputs, gradients = trials.encoder_decoder(theirs(name), tmp_path)
    record_difference("BART", "transformers BartForConditionalGeneration", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_greedy_answers(seed, tmp_path):
    model = theirs("small", scale_embedding=True)
    norm = model.model.decoder.layers[-1].final_layer_norm
    found, expected = trials.greedy(model, norm, tmp_path, start=2, end=2, seed=seed)
    assert found == expected


def test_a_bias_of_the_logits_is_kept(tmp_path):
    biased = theirs("small")
    parity.randomise(biased)
    biased.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    model = parity.ours(biased, tmp_path)
    assert torch.equal(model.head.bias, biased.final_logits_bias[0])
    assert trials.step_by_step(model, biased, trials.Rows.of(trials.SOURCES, pad=1)) < parity.TOLERANCE


def test_the_files_of_a_bare_model(tmp_path):
    bare = BartModel(BartConfig(**sizes(**CASES["small"]))).eval()
    parity.randomise(bare)
    model = parity.ours(bare, tmp_path)
    source, target = trials.Rows(torch.tensor([[5, 6, 7]])), trials.Rows(torch.tensor([[2, 8, 9, 4]]))
    expected = bare(input_ids=source.tokens, decoder_input_ids=target.tokens).last_hidden_state
    assert parity.difference(model(trials.Batch(target, source)), expected) < parity.TOLERANCE
