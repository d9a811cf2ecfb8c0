"""Sinusoids against the paper's formula, and the properties the paper gives as its reasons."""

import itertools
import math

import pytest
import torch

from allyouneed.errors import UserError
from allyouneed.nn.batch import Rows
from allyouneed.nn.positions.absolute import Positions, Sinusoidal
from any_part import build, plain, tree


def formula(position, width, order, base=10000.0):
    """3.5, in plain Python: PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d))."""
    vector = []
    for dimension in range(width):
        angle = position / base ** (dimension // 2 * 2 / width)
        vector.append(math.sin(angle) if dimension % 2 == 0 else math.cos(angle))
    return vector if order == "interleaved" else vector[0::2] + vector[1::2]


@pytest.mark.parametrize("order", ["interleaved", "halves"])
@pytest.mark.parametrize(("width", "base"), [(1, 10000.0), (2, 10000.0), (7, 10000.0), (64, 10000.0), (10, 100.0)])
def test_sinusoids_are_the_papers_formula(order, width, base):
    """Far positions too: an angle of 10 000 in single precision is already off by 5e-4."""
    places = [0, 1, 2, 3, 62, 63, 500, 1023, 4095, 10_001]
    found = Sinusoidal(base=base, order=order).build(width)(torch.tensor([places]))
    expected = torch.tensor([[formula(place, width, order, base) for place in places]], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinusoids_are_exact_in_half_precision_models(dtype):
    """`model.to(bfloat16)` converts buffers; frequencies of 8 bits would put token 500 somewhere else."""
    module = Sinusoidal().build(16).to(dtype)
    places = torch.arange(600)[None]
    expected = torch.tensor([[formula(place, 16, "interleaved") for place in range(600)]], dtype=torch.float64)
    torch.testing.assert_close(module(places).double(), expected, atol=torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("shift", [1, 5, 100])
def test_a_shifted_position_is_a_linear_function_of_the_position(shift):
    """3.5: "for any fixed offset k, PE(pos+k) can be represented as a linear function of PE(pos)", the same matrix
    for all positions: a rotation in each (sine, cosine) plane by k times its frequency."""
    width = 12
    module = Sinusoidal().build(width)
    rotation = torch.zeros(width, width, dtype=torch.float64)
    for plane in range(width // 2):
        angle = shift / 10000 ** (2 * plane / width)
        block = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        rotation[2 * plane : 2 * plane + 2, 2 * plane : 2 * plane + 2] = torch.tensor(block, dtype=torch.float64)
    here = module(torch.arange(200)[None])[0].double()
    there = module(torch.arange(200)[None] + shift)[0].double()
    torch.testing.assert_close(here @ rotation.T, there, atol=2e-5, rtol=0)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width, dtype=torch.float64))


def test_wavelengths_are_a_geometric_progression():
    """3.5: "from 2π to 10000 · 2π"; each plane repeats itself after its wavelength and not after half of it."""
    width, module = 8, Sinusoidal().build(8)
    wavelengths = [2 * math.pi * 10000 ** (2 * plane / width) for plane in range(width // 2)]
    ratios = [b / a for a, b in itertools.pairwise(wavelengths)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    for plane, wavelength in enumerate(wavelengths[1:], 1):
        zero, half, whole = module(torch.tensor([[0, round(wavelength / 2), round(wavelength)]]))[0, :, 2 * plane + 1]
        assert zero == 1
        assert half == pytest.approx(-1, abs=1e-2)
        assert whole == pytest.approx(1, abs=1e-2)


def test_offset_is_the_number_of_the_first_position():
    places = torch.arange(7)[None]
    found, later = (Sinusoidal(offset=offset, closed=True).build(9) for offset in (3, 0))
    assert torch.equal(found(places), later(places + 3))


def test_amplitude_is_a_factor_of_the_sinusoids():
    places = torch.arange(9)[None]
    small, usual = (Sinusoidal(amplitude=amplitude).build(8)(places) for amplitude in (0.02, 1.0))
    assert torch.allclose(small, 0.02 * usual, atol=1e-9)


def test_dot_products_grow_to_variance_head_width_and_scaling_brings_them_back():
    """3.2.1, footnote 4: components with mean 0 and variance 1 give q · k mean 0 and variance d_k.

    With n = 200 000 draws the estimate of the variance has relative deviation √((κ − 1)/n), where the kurtosis of
    the product sum is κ = 3 + 6/d_k ≤ 3.75; five deviations are below 2 %. The seed is fixed all the same.
    """
    generator = torch.Generator().manual_seed(2017)
    for head_width in (8, 64):
        q, k = torch.randn(2, 200_000, head_width, generator=generator)
        products = (q * k).sum(-1)
        assert products.var().item() == pytest.approx(head_width, rel=0.02)
        assert (products / math.sqrt(head_width)).var().item() == pytest.approx(1, rel=0.02)
        assert abs(products.mean().item()) < 5 * math.sqrt(head_width / 200_000)


@pytest.mark.parametrize("kind", Positions.registry)
def test_positions_are_independent_of_the_column(kind):
    module = plain(Positions.registry[kind]).build(6)
    places = torch.tensor([[3, 0, 5], [5, 3, 3]])
    found = module(places)
    if found is not None:
        for place in (3, 5):
            alone = module(torch.tensor([[place]]))[0, 0]
            torch.testing.assert_close(found[places == place], alone.expand(int((places == place).sum()), 6))


def learned(length):
    return build(tree(embed={"positions": {"kind": "learned", "length": length}}))


def test_learned_positions_refuse_long_sentences():
    model = learned(4)
    with pytest.raises(UserError, match="sentence of 5 tokens exceeds the model's 4 learned positions"):
        model.encode(Rows(torch.ones(1, 5, dtype=torch.long)))
    model.encode(Rows(torch.ones(1, 4, dtype=torch.long)))


def test_learned_positions_count_per_sentence():
    """A packed row may exceed the limit as long as its sentences do not; padding has no position."""
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0]])
    tokens = torch.arange(1, 13)[None] % 10 + 1
    packed = learned(4).encode(Rows(tokens, segments=segments)).hidden
    torch.testing.assert_close(packed[:, 4:6], learned(4).encode(Rows(tokens[:, 4:6])).hidden)


def test_learned_positions_cover_decoding_to_the_limit():
    """One row is at its last position while another takes in a longer chunk; only real tokens count."""
    model = learned(4)
    with torch.no_grad():
        states = model.start(Rows.of([[1, 2], [3]]))
        model.advance(Rows.of([[1, 2, 3], []]), states)
        found = model.advance(Rows.of([[4], [5, 6, 7]]), states)
        whole = model.decode(Rows.of([[1, 2, 3, 4]]), model.encode(Rows.of([[1, 2]])))
    torch.testing.assert_close(found[0, 0], whole[0, 3])


def test_embeddings_are_scaled_and_positions_added():
    """3.4: "we multiply those weights by √d_model"; the positions are added after that."""
    model, entered = build(tree()), []
    model.encoder.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    model.encode(Rows(torch.tensor([[4, 4, 8]])))
    positions = torch.tensor([formula(place, 12, "interleaved") for place in range(3)], dtype=torch.float64)
    expected = model.embed.tokens.weight[[4, 4, 8]] * 12**0.5 + positions
    torch.testing.assert_close(entered[0][0], expected, atol=1e-6, rtol=0)
