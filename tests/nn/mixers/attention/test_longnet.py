"""LongNet's tiles against its dense form; its equations are in tests/parity/test_longnet_against_oracle.py."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention import longnet
from allyouneed.nn.mixers.attention.longnet import CountedFlex, LongNet, PerHeadGroups
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.attention.block_sparse import attend_with_lse
from allyouneed.nn.ops.attention.dense import DenseAttention, ScoreMod, dense_mask
from allyouneed.nn.states.window import WindowKVCache
from any_part import build, pack
from host_sync import NoHostSync

HEADS, HEAD_WIDTH = 4, 3


def module_of(sees="past", segments=(4, 12), dilations=(1, 3), **keys):
    config = LongNet(heads=HEADS, head_width=HEAD_WIDTH, segments=segments, dilations=dilations, sees=sees, **keys)
    common = parse(
        Model, {"kind": "encoder", "vocab": 5, "width": 12, "encoder": [{"channel": {"kind": "ffn", "hidden": 4}}]}
    )
    torch.manual_seed(0)
    return config.build(common).double()


def row(time):
    return TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long)))


@pytest.mark.parametrize("sees", ["past", "around"])
@pytest.mark.parametrize("positions", ["none", "rotary", "alibi"])
def test_block_sparse_matches_dense(sees, positions, monkeypatch):
    keys = {"head_width": 4} if positions == "rotary" else {}
    config = LongNet(
        **({"heads": HEADS, "head_width": 4} | keys),
        segments=(32, 96),
        dilations=(1, 4),
        sees=sees,
        positions=positions,
    )
    common = parse(
        Model, {"kind": "encoder", "vocab": 5, "width": 16, "encoder": [{"channel": {"kind": "ffn", "hidden": 4}}]}
    )
    module = config.build(common).double()
    monkeypatch.setattr("allyouneed.nn.mixers.attention.longnet.BLOCK", 8)
    monkeypatch.setattr("allyouneed.nn.mixers.attention.longnet.MIN_BLOCK_SPARSE_SCORES", 1)
    lengths = torch.tensor([201, 90])
    for rows in (Rows(torch.zeros(2, 201, dtype=torch.long), lengths), Rows(torch.zeros(2, 201, dtype=torch.long))):
        x = torch.randn(2, 201, 16, dtype=torch.double, requires_grad=True)
        layout = TokenLayout.of(rows)
        real = torch.ones(2, 201, 1) if layout.real is None else layout.real[..., None]
        results = []
        for way in ("tiles", "dense"):
            context = Context(layout)
            if way == "dense":
                monkeypatch.setattr("allyouneed.nn.mixers.attention.longnet.MIN_BLOCK_SPARSE_SCORES", 10**9)
            out = module(x, context) * real
            plans = list(context.memo.values())
            assert any(isinstance(plan, PerHeadGroups) for plan in plans) == (way == "tiles")
            monkeypatch.setattr("allyouneed.nn.mixers.attention.longnet.MIN_BLOCK_SPARSE_SCORES", 1)
            results.append([out, *torch.autograd.grad((out * out.cos()).sum(), [x, *module.parameters()])])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def decoder(**keys):
    mixer = {"kind": "longnet", "heads": 3, "segments": [3, 6], "dilations": [1, 2]} | keys
    layer = {"repeat": 2, "mixer": mixer, "wiring": "pre-norm"}
    return build(
        {"kind": "decoder", "vocab": 11, "width": 12, "embed": {"positions": "sinusoidal"}, "decoder": [layer]}
    )


def test_kv_cache_is_bounded_by_the_longest_segment():
    model = decoder()
    tokens = torch.randint(1, 11, (1, 150), generator=torch.Generator().manual_seed(0))
    states, sizes, found = model.start(1), [], []
    with torch.no_grad():
        for at in range(150):
            found.append(model.head(model.advance(Rows(tokens[:, at : at + 1]), states)))
            sizes.append(states.bytes)
        torch.testing.assert_close(torch.cat(found, 1), model.logits(Batch(Rows(tokens))), atol=1e-9, rtol=0)
    assert all(isinstance(state, WindowKVCache) for layer in states.layers for state in layer.values())
    assert sizes[-1] == sizes[-70] == 8 * model.config.cost(150).state_constant


def test_long_sentences_in_packed_rows():
    model = decoder(segments=[64, 128], dilations=[1, 3])
    sentences = [torch.randint(1, 11, (size,)).tolist() for size in (900, 5, 40)]
    rows, places = pack(sentences, [0, 0, 0], [0, 2, 1])
    with torch.no_grad():
        found = model.logits(Batch(rows))
        for tokens, (line, span) in zip(sentences, places, strict=True):
            alone = model.logits(Batch(Rows(torch.tensor([tokens]))))[0]
            torch.testing.assert_close(found[line, span], alone, atol=1e-9, rtol=0)


def test_weights_can_be_recorded():
    model = decoder()
    weights = model.attention(Batch(Rows(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]))))[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3, 7, dtype=torch.double))
    assert not weights.triu(1).any()
    assert (weights[0, 0, 6] > 0).tolist() == [False] * 6 + [True]  # place 6 begins a segment of both branches


def test_unequal_numbers_of_segments_and_dilations_are_refused():
    with pytest.raises(ConfigError, match="2 segments but 1 dilations; set one of each per branch"):
        decoder(dilations=[1])
    with pytest.raises(ConfigError, match="tokens attend to their whole segment; set sees: past"):
        decoder(sees="around")


class _PlainWithLSE:
    """Attention within a segment by the definition, in place of a kernel that has no gradients on CPU."""

    def __init__(self, pattern, queries, keys):
        self.dense = DenseAttention(dense_mask(pattern, queries, keys), queries.positions, keys.positions)

    def with_lse(self, q, k, v, scale):
        return attend_with_lse(self.dense, q, k, v, 0.0, ScoreMod(scale))


@pytest.mark.parametrize(
    ("time", "heads", "branches", "keys"),
    [
        (64, 4, ((16, 1), (32, 4)), {}),
        (45, 3, ((8, 2), (20, 6), (64, 16)), {}),  # odd lengths, fewer heads than first tokens
        (48, 5, ((12, 1), (24, 3)), {"offsets": "blocks"}),
        (48, 4, ((16, 1), (48, 4)), {"sees": "around"}),
        (32, 2, ((16, 2),), {}),  # tokens that a head leaves out
    ],
)
def test_dilated_segments_match_the_definition(time, heads, branches, keys, monkeypatch):
    """Branches as dense batches: outputs and gradients of the gathered ones."""
    monkeypatch.setattr(longnet, "flex", _PlainWithLSE)
    segments, dilations = zip(*branches, strict=True)
    config = LongNet(heads=heads, head_width=16, segments=segments, dilations=dilations, **keys)
    module = config.build(Common(width=16 * heads))
    layout = TokenLayout.of(Rows(torch.zeros(2, time, dtype=torch.long)))
    torch.manual_seed(time)
    q, k, v = (torch.randn(2, heads, time, 16, dtype=torch.double, requires_grad=True) for _ in range(3))
    noise = torch.randn(2, heads, time, 16, dtype=torch.double)
    dilated = module.dilated(layout, layout)
    assert dilated is not None
    found, exact = (
        (out := execute(q, k, v, 0.0, ScoreMod(0.25)), *torch.autograd.grad((out * noise).sum(), (q, k, v)))
        for execute in (dilated, module.dense(layout, layout))
    )
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    ("heads", "branches", "keys"),
    [
        (4, ((32, 1), (128, 4)), {}),
        (3, ((7, 1), (30, 3)), {}),  # no segment covers the others
        (5, ((20, 2), (60, 1), (50, 7)), {"offsets": "blocks"}),
        (2, ((16, 1), (64, 2)), {"sees": "around"}),
    ],
)
def test_packed_rows_count_keys_inside_the_kernel(heads, branches, keys, monkeypatch):
    """The outputs of the definition; the plan is made without the host, as in a captured training step. (Gradients need
    the kernel: bench/check/gpu.py.)"""
    monkeypatch.setattr("allyouneed.nn.ops.attention.flex._compiled_flex", lambda: flex_attention)
    segments, dilations = zip(*branches, strict=True)
    config = LongNet(heads=heads, head_width=16, segments=segments, dilations=dilations, **keys)
    module = config.build(Common(width=16 * heads))
    sentences = [[1] * 100, [1] * 37, [1] * 1, [1] * 150]
    rows, _ = pack(sentences, [0, 0, 1, 1], [0, 3, 0, 2])
    layout = TokenLayout.of(rows)
    module.counted(layout, layout)  # the warm-up of a capture
    with NoHostSync():
        counted = module.counted(layout, layout)
    assert isinstance(counted, CountedFlex)
    torch.manual_seed(heads)
    q, k, v = torch.randn(3, 2, heads, layout.time, 16, dtype=torch.double)
    real = layout.real[:, None, :, None]
    found, exact = (way(q, k, v, 0.0, ScoreMod(0.25)).where(real, 0) for way in (counted, module.dense(layout, layout)))
    torch.testing.assert_close(found, exact)


def test_packed_rows_where_heads_skip_tokens_are_gathered():
    layout = TokenLayout.of(pack([[1] * 100, [1] * 100], [0, 0], [0, 0])[0])
    assert module_of(segments=(16, 64), dilations=(2, 4)).counted(layout, layout) is None
    assert module_of(segments=(16, 64), dilations=(1, 4)).counted(layout, layout) is not None


def test_segments_that_do_not_divide_the_longest_are_cached():
    model = decoder(segments=[4, 10], dilations=[1, 2])
    tokens = torch.randint(1, 11, (1, 150), generator=torch.Generator().manual_seed(0))
    states, found = model.start(1), []
    with torch.no_grad():
        for at in range(150):
            found.append(model.head(model.advance(Rows(tokens[:, at : at + 1]), states)))
        torch.testing.assert_close(torch.cat(found, 1), model.logits(Batch(Rows(tokens))), atol=1e-9, rtol=0)


def test_segments_that_padding_would_enter_are_gathered():
    config = LongNet(heads=2, segments=(16,), dilations=(2,), sees="around")
    layout = TokenLayout.of(Rows(torch.zeros(1, 40, dtype=torch.long)))
    assert config.build(Common(width=32)).dilated(layout, layout) is None
