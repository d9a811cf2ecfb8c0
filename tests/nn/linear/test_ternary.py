"""Two bits per weight: packing is lossless and gives the numbers of training."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bitlinear import layer, small

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.linear.bitlinear import Bit, BitLinear, quantize_ternary, quantize_tokens, rescale
from allyouneed.nn.linear.ternary import (
    PackedBitLinear,
    pack_model,
    pack_weights,
    ternary_linear_cpu,
    ternary_linear_reference,
    unpack_weights,
)
from allyouneed.nn.norms import RMSNorm
from any_part import CASES, build

SIZES = [(1, 1), (3, 5), (7, 63), (100, 33), (2560, 37)]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_packing_is_lossless(outputs, inputs, seed):
    weights = torch.randint(-1, 2, (outputs, inputs), generator=torch.Generator().manual_seed(seed))
    found = pack_weights(weights)
    assert found.shape == (outputs, -(-inputs // 4)) and found.dtype == torch.uint8
    assert unpack_weights(found, inputs).equal(weights.to(torch.int8))


def test_bit_layout():
    """Files will hold them: weight j of each quarter in byte j, the first lowest, as w + 1."""
    assert pack_weights(torch.tensor([[-1, 0, 1, 1, 0, -1, 0, 1]])).tolist() == [[0b01_01_10_00, 0b10_00_10_01]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [None, RMSNorm()])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@torch.no_grad()
def test_the_same_numbers_bit_for_bit(inputs, outputs, bias, norm, dtype):
    trained = layer(inputs, (outputs, 2), bias, norm, dtype)
    light = PackedBitLinear(trained)
    x = torch.randn(3, 11, inputs, dtype=dtype) * torch.logspace(-9, 6, 11, dtype=dtype)[:, None]
    for given_ in (x, x[0], x[0, 0], x[:, :0], x.transpose(0, 1)):
        assert light(given_).equal(trained(given_))


@torch.no_grad()
def test_row_blocks_do_not_change_results(monkeypatch):
    monkeypatch.setattr("allyouneed.nn.linear.ternary.UNPACK_BYTES", 1)  # 16 rows at a time
    light, x = PackedBitLinear(layer(63, 100)), torch.randn(5, 63)
    tokens, _ = quantize_tokens(x)
    assert ternary_linear_cpu(tokens, light.packed).equal(ternary_linear_reference(tokens, light.packed).int())


def by_tiles(whole, token_step, bytes, weight_step, tile):
    """The algorithm of kernels/triton/ternary.py in sequence: the same tiles, masks, shifts and scaling."""
    (tokens, inputs), (outputs, quarter) = whole.shape, bytes.shape
    out = torch.full((tokens, outputs), torch.nan)
    for row in torch.arange(0, outputs, tile[1])[:, None] + torch.arange(tile[1]):
        for token in torch.arange(0, tokens, tile[0])[:, None] + torch.arange(tile[0]):
            sums = torch.zeros(tile[1], tile[0], dtype=torch.int32)
            for at in torch.arange(0, quarter, tile[2])[:, None] + torch.arange(tile[2]):
                here = (row < outputs)[:, None] & (at < quarter)[None]
                block = bytes.flatten()[(row[:, None] * quarter + at).where(here, 0)].where(here, 0)
                for part in range(4):
                    weights = ((block >> (2 * part)) & 3).to(torch.int8) - 1
                    column = part * quarter + at
                    there = ((at < quarter) & (column < inputs))[:, None] & (token < tokens)[None]
                    x = whole.flatten()[(token[None] * inputs + column[:, None]).where(there, 0)].where(there, 0)
                    sums += weights.int() @ x.int()
            row_, token_ = row[row < outputs], token[token < tokens]
            steps = token_step[token_][None] * weight_step[row_][:, None]
            out[token_[:, None], row_] = (sums[: len(row_), : len(token_)].float() * steps).T
    return out


@pytest.mark.parametrize("tile", [(16, 32, 128), (16, 32, 16), (64, 64, 64)])
@pytest.mark.parametrize(("inputs", "outputs", "tokens"), [(7, 5, 1), (63, 100, 3), (258, 70, 70)])
@torch.no_grad()
def test_tiles_do_not_change_results(inputs, outputs, tokens, tile):
    trained, x = layer(inputs, outputs, bias=False), torch.randn(tokens, inputs)
    light, (whole, step) = PackedBitLinear(trained), quantize_tokens(x)
    found = by_tiles(whole.to(torch.int8), step[:, 0], light.packed, light.step, tile)
    assert found.equal(trained(x))


def word_codes(x, rate):
    """`_codes` there: words of four codes (tokens, inputs / 4), each in the lowest byte of a sum."""
    codes = ((x * rate) + 12582912.0).view(torch.int32).unflatten(-1, (-1, 4)) & 255
    return (codes << torch.tensor([0, 8, 16, 24], dtype=torch.int32)).sum(-1, dtype=torch.int32)


def dot4(digits, codes):
    """The instruction `dp4a`: unsigned bytes times signed ones."""
    return (digits.view(torch.uint8).int() * codes.view(torch.int8).int()).unflatten(-1, (-1, 4)).sum(-1)


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 5), (96, 20), (2560, 7)])
@torch.no_grad()
def test_words_give_the_same_results(inputs, outputs):
    """The algorithm of one token in kernels/triton/ternary.py: four bytes of weights and of codes at a time."""
    trained, x = layer(inputs, outputs, bias=False), torch.randn(1, inputs)
    x[0, :4] = torch.tensor([0.5, 1.5, -2.5, 127.0]) * (x.abs().max() / 127)  # halfway between two codes
    light, peak = PackedBitLinear(trained), x.abs().max()
    codes = word_codes(x, peak.reciprocal() * 127)[0]
    words = light.packed.view(torch.int32)  # (outputs, inputs / 16)
    digits = torch.cat([words >> shift & 0x03030303 for shift in (0, 2, 4, 6)], 1)
    sums = (
        torch.stack([dot4(row, codes).sum() for row in digits]) - dot4(torch.full_like(codes, 0x01010101), codes).sum()
    )
    assert (sums.float() * (peak * (1 / 127) * light.step))[None].equal(trained(x))


def test_four_weights_at_a_time():
    """`_lowest` and `_next` there, of every byte."""
    bytes = torch.arange(256, dtype=torch.uint8)
    words = bytes.view(torch.int32)
    for part in range(4):
        found = (((words & 0x03030303) + 0x7F7F7F7F) ^ -0x7F7F7F80).view(torch.int8)
        assert found.equal((bytes >> 2 * part & 3).to(torch.int8) - 1)
        words = words >> 2


@torch.no_grad()
def test_half_precision_sums_integers():
    """The sums that a bfloat16 product rounds are exact here."""
    trained, x = layer(700, 40).bfloat16(), torch.randn(5, 700).bfloat16()
    light = PackedBitLinear(trained)
    (tokens, token_step), (weights, step) = quantize_tokens(x), quantize_ternary(trained.weight, [40])
    expected = rescale(tokens.double() @ weights.double().T, token_step.double(), step, trained.bias).bfloat16()
    assert light(x).dtype == torch.bfloat16
    torch.testing.assert_close(light(x), expected, rtol=2**-8, atol=0)


def test_casting_moves_steps_without_rounding():
    light = PackedBitLinear(layer(20, 8))
    step = light.step.clone()
    light.bfloat16()
    assert light.step.dtype == torch.float32 and light.step.equal(step) and light.bias.dtype == torch.bfloat16
    assert light.to("meta").step.device.type == "meta"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("linear bit")])
@torch.no_grad()
def test_a_packed_model_gives_equal_results(name):
    model, rows = build(CASES[name]), Rows.of([[1, 5, 7, 9, 3], [2, 4], [6]])
    expected = model.logits(Batch(rows, rows))
    light = pack_model(model)
    assert light is model and not [m for m in light.modules() if isinstance(m, BitLinear)]
    assert light.logits(Batch(rows, rows)).equal(expected)


def test_a_shared_layer_stays_shared():
    config = small(decoder=[dict(small().model_dump(mode="json")["decoder"][0]) | {"repeat": 3, "share": True}])
    model = config.build()
    count = len([m for m in model.modules() if isinstance(m, BitLinear)])
    assert len([m for m in pack_model(model).modules() if isinstance(m, PackedBitLinear)]) == count == 4


@torch.no_grad()
def test_state_dict_round_trip():
    torch.manual_seed(0)
    config, rows = small(), Rows(torch.tensor([[1, 2, 3, 250]]))
    model = pack_model(config.build())
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = pack_model(config.build())
    assert not other.logits(Batch(rows)).equal(model.logits(Batch(rows)))
    other.load_state_dict(kept)
    assert other.logits(Batch(rows)).equal(model.logits(Batch(rows)))


def test_two_bits_per_weight():
    with torch.device("meta"):
        dense, light = Bit().build(2560, 6912, False), PackedBitLinear(Bit().build(2560, 6912, False))
    size = sum(tensor.numel() * tensor.itemsize for tensor in light.state_dict().values())
    assert size == 2560 * 6912 / 4 + 6912 * 4
    assert 15.9 < dense.weight.numel() * 4 / size < 16
