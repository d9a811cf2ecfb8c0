"""BART: scores (whole and step by step), gradients and greedy answers of transformers' BartForConditionalGeneration."""

import judge
import pytest
import torch
import trials
from transformers import BartConfig, BartForConditionalGeneration, BartModel

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


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    theirs = BartForConditionalGeneration(BartConfig(**sizes(**CASES[name]))).eval()
    outputs, gradients = trials.encoder_decoder(theirs, tmp_path)
    record_difference("BART", "transformers BartForConditionalGeneration", outputs, gradients)
    assert outputs < judge.TOLERANCE and gradients < judge.TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_greedy_answers(seed, tmp_path):
    config = BartConfig(**sizes(**CASES["small"]), scale_embedding=True)
    theirs = BartForConditionalGeneration(config).eval()
    norm = theirs.model.decoder.layers[-1].final_layer_norm
    found, expected = trials.greedy(theirs, norm, tmp_path, start=2, end=2, seed=seed)
    assert found == expected


def test_a_bias_of_the_logits_is_kept(tmp_path):
    theirs = BartForConditionalGeneration(BartConfig(**sizes(**CASES["small"]))).eval()
    judge.randomise(theirs)
    theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    model = judge.ours(theirs, tmp_path)
    assert torch.equal(model.head.bias, theirs.final_logits_bias[0])
    assert trials.step_by_step(model, theirs, trials.Rows.of(trials.SOURCES, pad=1)) < judge.TOLERANCE


def test_the_files_of_a_bare_model(tmp_path):
    theirs = BartModel(BartConfig(**sizes(**CASES["small"]))).eval()
    judge.randomise(theirs)
    model = judge.ours(theirs, tmp_path)
    source, target = trials.Rows(torch.tensor([[5, 6, 7]])), trials.Rows(torch.tensor([[2, 8, 9, 4]]))
    expected = theirs(input_ids=source.tokens, decoder_input_ids=target.tokens).last_hidden_state
    assert judge.difference(model(trials.Batch(target, source)), expected) < judge.TOLERANCE
