"""Embedding positions against Marian, Whisper, BART and RoBERTa of transformers."""

import math

import pytest
import torch

from allyouneed.nn.positions.absolute import Learned, Learned2D, Sinusoidal
from attention_layers import max_difference


@pytest.mark.parametrize("width", [4, 6, 32])
def test_whispers_sinusoids(width):
    from transformers.models.whisper.modeling_whisper import sinusoids

    found = Sinusoidal(order="halves", closed=True).build(width)(torch.arange(60)[None])[0]
    difference = max_difference(found, sinusoids(60, width))
    assert difference < 1e-5  # farther places differ more: their angles are in single precision


@pytest.mark.parametrize("width", [4, 7, 32])
def test_marians_sinusoids(width):
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    expected = MarianSinusoidalPositionalEmbedding(600, width).create_weight()
    found = Sinusoidal(order="halves").build(width)(torch.arange(600)[None])[0]
    difference = max_difference(found, expected)
    assert difference < 1e-6


@pytest.mark.parametrize(("width", "slowest"), [(8, 100.0), (3, 100.0), (2, 1.0)])
def test_the_last_wavelength_of_closed_sinusoids_is_the_base(width, slowest):
    """In units of 2π; one plane alone is the fastest."""
    found = Sinusoidal(closed=True, base=100.0, order="halves").build(width)(torch.tensor([[50]]))[0, 0]
    assert found[(width + 1) // 2 - 1].item() == pytest.approx(math.sin(50 / slowest), abs=1e-6)


def test_barts_learned_positions():
    from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

    theirs = BartLearnedPositionalEmbedding(10, 6)
    config = Learned(length=10, offset=2)
    ours = config.build(6)
    ours.load_state_dict(theirs.state_dict())
    assert config.cost(6).parameters == sum(p.numel() for p in theirs.parameters()) == 72
    places = torch.arange(10)[None]
    assert torch.equal(ours(places), theirs(places))
    assert torch.equal(ours(places[:, 3:]), theirs(places[:, 3:], past_key_values_length=3))


def test_robertas_learned_positions():
    """Their first two rows are for padding; a sentence begins at the third."""
    from transformers import RobertaConfig
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    config = RobertaConfig(vocab_size=9, hidden_size=6, max_position_embeddings=12, pad_token_id=1, type_vocab_size=1)
    theirs = RobertaEmbeddings(config).eval()
    ours = Learned(length=10, offset=2).build(6)
    ours.load_state_dict(theirs.position_embeddings.state_dict())
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 3, 4, 5, 6]])
    with torch.no_grad():
        said = theirs.word_embeddings(tokens) + theirs.token_type_embeddings(torch.zeros_like(tokens))
        expected = theirs(tokens)
        difference = max_difference(theirs.LayerNorm(said + ours(torch.arange(10)[None])), expected)
    assert difference < 1e-6


@pytest.mark.parametrize("join", ["beside", "add"])
@pytest.mark.parametrize(("width", "first"), [(6, 0), (7, 2)])
def test_grid_positions(join, width, first):
    """Row by row; positions before the grid have their own vectors (Dosovitskiy et al. 2021, D.4)."""
    config = Learned2D(rows=3, columns=5, first=first, join=join)
    module = config.build(width)
    found = module(torch.arange(config.limit)[None])[0]
    assert found.shape == (first + 15, width)
    for place in range(first):
        assert torch.equal(found[place], module.first.weight[place])
    for row in range(3):
        for column in range(5):
            r, c = module.rows.weight[row], module.columns.weight[column]
            expected = r + c if join == "add" else torch.cat((r, c))
            assert torch.equal(found[first + 5 * row + column], expected)
    assert config.cost(width).parameters == sum(p.numel() for p in module.parameters())
