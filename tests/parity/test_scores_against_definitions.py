"""Scores against their papers written out with loops, soft-capped ones against Gemma 2 of transformers, and dropout of
weights against its definition."""

import math

import pytest
import torch

from allyouneed.errors import UserError
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.mixers.attention.attention import Attention
from any_part import build, tree
from attention_layers import (
    TOLERANCE,
    agreement,
    build_mixer,
    differences,
    hidden,
    max_difference,
    randomise_module,
    rows,
)

LENGTHS, SOURCES = [9, 5, 1], [4, 8, 3]
WIDTH, HEADS = 12, 3
EXACT = 1e-10  # in double precision: a definition has no rounding of its own to forgive


def pair_score(kind, module, h, q, k, j):
    """The score of one query and one key of head h (Luong et al. 2015, 3.1; Bahdanau et al. 2015, A.1.2); key j of its
    sentence."""
    weight = getattr(module.scores, "weight", None)
    if kind == "scaled-dot":
        return q @ k / math.sqrt(len(q))
    if kind == "dot":
        return q @ k
    if kind == "general":
        return q @ weight[h] @ k
    if kind == "additive":
        return weight[h] @ torch.tanh(q + k)
    assert kind == "location"
    return (q @ weight[h])[j]


def written_out(kind, module, q, k, v, causal, cap=None, bias=None):
    """softmax(scores) v with loops; q (queries, inner), k and v (keys, inner) of one sentence."""
    q, k, v = (part.unflatten(-1, (module.heads, -1)) for part in (q, k, v))
    out = []
    for i in range(len(q)):
        seen = range(i + 1) if causal else range(len(k))
        together = []
        for h in range(module.heads):
            scores = torch.stack([pair_score(kind, module, h, q[i, h], k[j, h], j) for j in seen])
            if bias is not None:
                scores = scores + torch.stack([bias(h, i, j) for j in seen])
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            together.append(scores.softmax(0) @ v[: len(seen), h])
        out.append(torch.cat(together))
    return module.out(torch.stack(out))


KINDS = ["scaled-dot", "dot", "general", "additive", {"kind": "location", "length": 9}]


def exact_rows(lengths, seed=1):
    x, layout, _ = rows(lengths, WIDTH, seed)
    return x.double(), layout


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", KINDS, ids=str)
def test_self_attention_is_the_definition(scores, causal, cap, record_difference):
    keys = {"kind": "attention", "heads": HEADS, "scores": scores, "soft_cap": cap}
    module = randomise_module(build_mixer(WIDTH, keys | {"pattern": "causal" if causal else "full"}), size=0.5).double()
    x, layout = exact_rows(LENGTHS)
    found = module(x, Context(layout))
    kind = scores if isinstance(scores, str) else scores["kind"]
    for row, length in enumerate(LENGTHS):
        q, k, v = module.qkv(x[row, :length]).chunk(3, -1)
        expected = written_out(kind, module, q, k, v, causal, cap)
        difference = agreement(found[row, :length], expected, list(module.parameters()))
        record_difference(f"{kind} scores", "equations written out", *difference)
        assert max(difference) < EXACT


@pytest.mark.parametrize("scores", KINDS, ids=str)
def test_cross_attention_is_the_definition(scores, record_difference):
    module = Attention(heads=HEADS, scores=scores).build_cross(Common(width=WIDTH)).eval()
    randomise_module(module, size=0.5).double()
    x, layout = exact_rows(LENGTHS)
    source, source_facts = exact_rows(SOURCES, seed=5)
    found = module(x, Context(layout, memory=Memory(source, source_facts)))
    kind = scores if isinstance(scores, str) else scores["kind"]
    for row, (length, source_length) in enumerate(zip(LENGTHS, SOURCES, strict=True)):
        k, v = module.kv(source[row, :source_length]).chunk(2, -1)
        expected = written_out(kind, module, module.q(x[row, :length]), k, v, causal=False)
        difference = agreement(found[row, :length], expected, list(module.parameters()))
        record_difference(f"{kind} scores", "equations written out", *difference)
        assert max(difference) < EXACT


@pytest.mark.parametrize("positions", ["alibi", "buckets"])
@pytest.mark.parametrize("scores", ["general", "additive"])
def test_biases_are_added_to_any_scores(scores, positions):
    keys = {"kind": "attention", "heads": HEADS, "scores": scores, "positions": positions, "pattern": "causal"}
    module = randomise_module(build_mixer(WIDTH, keys), size=0.5).double()
    x, layout = exact_rows(LENGTHS)
    q, k, v = module.qkv(x[0]).chunk(3, -1)

    def bias(h, i, j):
        one, other = torch.tensor([[i]]), torch.tensor([[j]])
        return module.relative.bias(q.new_zeros(1, HEADS, 1, 4), one, other, 1.0)[0, h, 0, 0]

    expected = written_out(scores, module, q, k, v, True, bias=bias)
    difference = agreement(module(x, Context(layout))[0], expected, list(module.parameters()))
    assert max(difference) < EXACT


def test_general_scores_with_rotary_depend_on_distance_only():
    """W is applied before the query is turned; after it, W would mix planes that turn at different speeds."""
    keys = {"kind": "attention", "heads": 1, "scores": "general", "positions": "rotary", "pattern": "causal"}
    module = randomise_module(build_mixer(8, keys)).double()
    x = torch.randn(1, 2, 8, dtype=torch.double)
    near = module(x, Context(TokenLayout(torch.tensor([[0, 3]]))))
    far = module(x, Context(TokenLayout(torch.tensor([[1000, 1003]]))))
    other = module(x, Context(TokenLayout(torch.tensor([[0, 4]]))))
    assert max_difference(far, near) < 1e-9
    assert max_difference(other, near) > 1e-4


def test_location_scores_refuse_longer_sentences():
    location = {"kind": "attention", "heads": HEADS, "scores": {"kind": "location", "length": 4}}
    model = build(tree(mixer=location | {"pattern": "causal"}, encoder_mixer=location, cross=location))
    message = "sentence of 5 tokens exceeds the 4 positions of location scores"
    with pytest.raises(UserError, match=message):
        model.encode(Rows.of([[1, 2, 3, 4, 5]]))
    with torch.no_grad():
        states = model.start(Rows.of([[1, 2, 3, 4], [1]]))
        model.advance(Rows.of([[1, 2, 3], []]), states)
        model.advance(Rows.of([[1], [2, 3, 4]]), states)  # only real tokens count, not the padded chunk
        with pytest.raises(UserError, match=message):
            model.advance(Rows.of([[1], [2]]), states)


def test_soft_capped_scores_are_gemma2s(record_difference):
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding

    width, lengths = 20, [13, 7, 1]
    config = Gemma2Config(
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=1,
        query_pre_attn_scalar=11,
        attn_logit_softcapping=2.0,
        layer_types=["full_attention"],
    )
    config._attn_implementation = "eager"
    theirs, tables = randomise_module(Gemma2Attention(config, 0)), Gemma2RotaryEmbedding(config)
    ours = build_mixer(
        width,
        {
            "kind": "attention",
            "heads": 4,
            "kv_heads": 2,
            "head_width": 6,
            "soft_cap": 2.0,
            "scores": {"kind": "scaled-dot", "scale": 11**-0.5},
            "positions": "rotary",
            "pattern": "causal",
            "bias": False,
        },
    )
    _, layout, real = rows(lengths, width)

    def convert(get):
        return {
            "qkv.weight": torch.cat([get(f"{part}_proj.weight") for part in "qkv"]),
            "out.weight": get("o_proj.weight"),
        }

    def run(x):
        return theirs(x, tables(x, layout.positions), hidden(real, causal=True))[0]

    found = differences(ours, theirs, convert, run, lengths, width)
    record_difference("soft-capped scores", "transformers Gemma2Attention", *found)
    assert max(found) < TOLERANCE


@pytest.mark.parametrize("keys", [{}, {"soft_cap": 5.0}, {"positions": "alibi"}], ids=str)
def test_dropout_removes_weights_and_enlarges_the_others(keys):
    """With the identity as values, what comes out are the weights: each is 0 or w / (1 − p). Of n = 64 · 2 · 2080
    weights a share p goes; five deviations of that share are 5·√(p(1−p)/n) < 0.005."""
    time, p = 64, 0.3
    module = build_mixer(2 * time, {"kind": "attention", "heads": 2, "pattern": "causal", "dropout": p} | keys)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 2, time, time, generator=generator)
    v = torch.eye(time).expand(64, 2, time, time)
    layout = TokenLayout(torch.arange(time)[None], start=0)
    weights = module.attend(q, k, v, Context(layout), layout)
    module.train()
    torch.manual_seed(1)
    found = module.attend(q, k, v, Context(layout), layout)
    kept = found != 0
    torch.testing.assert_close(found, weights / (1 - p) * kept, atol=TOLERANCE, rtol=1e-4)
    seen = (weights > 1e-20).expand_as(kept)
    assert float(kept[seen].float().mean()) == pytest.approx(1 - p, abs=0.005)
