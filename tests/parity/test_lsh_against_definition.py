"""LSH attention against its definition, written out token by token: Kitaev et al. 2020, section 2 and appendix A."""

import math

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout, WeightRequest
from allyouneed.nn.mixers.attention import lsh
from allyouneed.nn.mixers.attention.lsh import LSH, rotations
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.lsh import chunks_needed
from any_part import build, pack, tree

WIDTH, HEADS = 12, 3


def module(**keys):
    torch.manual_seed(0)
    return LSH(heads=HEADS, **({"buckets": 4} | keys)).build(Common(width=WIDTH)).double().eval()


def bucket(layer, head, round_, x):
    """argmax([xR; −xR])"""
    config = layer.config
    if config.buckets == 1:
        return 0
    shape = (config.heads, layer.head_width, config.rounds, config.buckets // 2)
    r = rotations(config.seed, shape, torch.device("cpu"))[head, :, round_].double()
    scores = [float(x.detach() @ column) for column in r.T]
    scores += [-score for score in scores]
    return max(range(len(scores)), key=scores.__getitem__)


def oracle(layer, x, meets=None):
    """One sentence x (time, width). `meets(head, round, i, j)` besides: may i look at j in this round?"""
    config, time, size = layer.config, len(x), layer.head_width
    queries, values = x @ layer.qk.weight.T, x @ layer.v.weight.T
    rows = []
    for i in range(time):
        heads = []
        for head in range(config.heads):
            own = slice(head * size, (head + 1) * size)
            q, v = queries[:, own], values[:, own]
            k = q / (q.square().sum(-1, keepdim=True) + 1e-6 * size).sqrt()
            seen = set()
            for n in range(config.rounds):
                for j in range(time):
                    allowed = j < i if config.causal else j != i
                    alike = i < config.whole or bucket(layer, head, n, q[i]) == bucket(layer, head, n, q[j])
                    if allowed and alike and (meets is None or i < config.whole or meets(head, n, i, j)):
                        seen.add(j)
            keys = sorted(seen) or [i]
            weights = torch.stack([q[i] @ k[j] for j in keys]).softmax(0)
            heads.append(sum(w * v[j] for w, j in zip(weights, keys, strict=True)))
        rows.append(layer.out.weight @ torch.cat(heads))
    return torch.stack(rows)


def run(layer, x, **layout):
    return layer(x, Context(TokenLayout(torch.arange(x.shape[1])[None], start=0, **layout)))


def heads(layer, x):
    return layer.qk(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)


def noise(*shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(3))


def agree(found, expected, weights, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    own = torch.autograd.grad(found.sin().sum(), weights, retain_graph=True)
    theirs = torch.autograd.grad(expected.sin().sum(), weights)
    assert all(gradient.abs().max() > 1e-6 for gradient in theirs)
    worst = max((one - other).abs().max().item() for one, other in zip(own, theirs, strict=True))
    assert worst < tolerance
    return worst


def always_sort(monkeypatch, chunk):
    """However short the row and however large its buckets."""
    monkeypatch.setattr(lsh, "WORTH_SORTING", 1)
    monkeypatch.setattr(lsh, "EXACT_CHUNK", chunk)

    def neighbour_chunks(self, ids, chunk, context):
        return chunks_needed(ids, chunk, context.queries.real)

    monkeypatch.setattr(lsh.LSHAttention, "neighbour_chunks", neighbour_chunks)


PLACES = [
    {"buckets": 4, "rounds": 1},
    {"buckets": 8, "rounds": 3},
    {"buckets": 1, "rounds": 1},
    {"buckets": 6, "rounds": 2, "sees": "around"},
    {"buckets": 8, "rounds": 2, "whole": 9},
    {"buckets": 8, "rounds": 1, "whole": 40},
]


@pytest.mark.parametrize("keys", PLACES, ids=str)
@pytest.mark.parametrize("sorted_", [False, True], ids=["all pairs", "sorted"])
def test_outputs_and_gradients(keys, sorted_, monkeypatch, record_difference):
    if sorted_:
        always_sort(monkeypatch, 5)
    layer, x = module(**keys), noise(1, 23, WIDTH)
    found, expected = run(layer, x)[0], oracle(layer, x[0])
    gradients = agree(found, expected, list(layer.parameters()))
    outputs = (found - expected).abs().max().item()
    record_difference("Reformer", "oracle from section 2 and appendix A", outputs, gradients)


@pytest.mark.parametrize("time", [63, 100, 129])
@pytest.mark.parametrize("keys", [{"sees": "past"}, {"sees": "around"}, {"whole": 7}], ids=str)
@pytest.mark.parametrize("rounds", [1, 4])
def test_sorting_does_not_change_results(time, keys, rounds, monkeypatch):
    """Rows of several sentences with padding between them; all gradients."""
    layer = module(buckets=6, rounds=rounds, **keys)
    x = noise(2, time, WIDTH).requires_grad_()
    segments = torch.tensor([[1] * 20 + [0] * 3 + [2] * (time - 30) + [0] * 7, [0] * 5 + [1] * (time - 5)])
    steps = torch.arange(time)
    begins = torch.tensor([[0] * 23 + [23] * (time - 23), [5] * time])
    layout = TokenLayout((steps - begins).clamp(min=0) * (segments > 0), segments, packed=True)
    weights, real = [x, *layer.parameters()], segments > 0
    expected = layer(x, Context(layout))[real]
    always_sort(monkeypatch, 16)
    agree(layer(x, Context(layout))[real], expected, weights)


@pytest.mark.parametrize("keys", [{"sees": "past"}, {"sees": "around"}, {"whole": 7}], ids=str)
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_papers_chunks_in_training(keys, rounds):
    """Eq. 6: of a bucket only what lies in the own chunk of the sorted tokens and the one before it."""
    chunk = 4
    layer = module(buckets=4, rounds=rounds, chunk=chunk, **keys).train()
    x = noise(1, 26, WIDTH)
    queries = (x[0] @ layer.qk.weight.T).unflatten(-1, (HEADS, -1))
    ranks = {}
    for head in range(HEADS):
        for n in range(rounds):
            order = sorted(range(26), key=lambda i: (bucket(layer, head, n, queries[i, head]), i))
            ranks[head, n] = {token: rank for rank, token in enumerate(order)}

    def meets(head, n, i, j):
        return 0 <= ranks[head, n][i] // chunk - ranks[head, n][j] // chunk <= 1

    limited = oracle(layer, x[0], meets)
    agree(run(layer, x)[0], limited, list(layer.parameters()))
    whole = run(layer.eval(), x)[0]
    torch.testing.assert_close(whole, oracle(layer, x[0]))
    assert (whole - limited).abs().max() > 1e-3


def test_few_buckets():
    """Otherwise everything above could pass for an attention that sees all."""
    layer, x = module(buckets=16, rounds=1), noise(1, 40, WIDTH)
    wanted = WeightRequest()
    layer(x, Context(TokenLayout(torch.arange(40)[None], start=0), record={layer: wanted}))
    weights = wanted.weights[0][0]  # (heads, queries, keys)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights > 0).sum(-1).double().mean() < 5
    diagonal = weights.diagonal(dim1=1, dim2=2)
    assert ((diagonal == 0) | (diagonal == 1)).all() and (diagonal == 1).any() and (diagonal == 0).any()


def test_long_rows_do_not_use_the_dense_mask(monkeypatch):
    layer, x = module(buckets=64, rounds=2), noise(1, 2000, WIDTH)
    with monkeypatch.context() as all_pairs:
        all_pairs.setattr(lsh, "WORTH_SORTING", 10_000)
        expected = run(layer, x)
    alike = noise(1, 1, WIDTH).expand(1, 700, WIDTH)  # all in one bucket: sorting them would be of no use
    assert (
        layer.neighbour_chunks(
            layer.hash_tokens(heads(layer, alike)), 64, Context(TokenLayout(torch.arange(700)[None]))
        )
        is None
    )
    monkeypatch.setattr(lsh.LSHAttention, "mask", None)
    torch.testing.assert_close(run(layer, x), expected)


def test_an_odd_number_of_buckets_is_refused():
    with pytest.raises(ConfigError, match=r"decoder\[0\].mixer.buckets: must be even, or 1"):
        parse(Model, tree(mixer={"kind": "lsh", "heads": 3, "buckets": 5}))


def test_first_tokens_match_causal_attention():
    mixer = {"kind": "lsh", "heads": 3, "buckets": 4, "sees": "around", "whole": 3}
    with pytest.raises(ConfigError, match=r"encoder\[0\].mixer.whole: requires sees: past"):
        parse(Model, {"kind": "encoder", "vocab": 9, "width": 12, "encoder": [{"mixer": mixer}]})


def test_the_hash_depends_on_the_seed():
    one, other, again = (module(seed=seed, buckets=16) for seed in (0, 1, 0))
    x = noise(1, 30, WIDTH)
    torch.testing.assert_close(run(one, x), run(again, x))
    assert (run(one, x) - run(other, x)).abs().max() > 1e-3


@pytest.mark.parametrize("whole", [0, 20])
def test_decoding_long_texts_matches_the_whole_pass(whole, monkeypatch):
    always_sort(monkeypatch, 4)
    model = build(tree(mixer={"kind": "lsh", "heads": 3, "buckets": 6, "rounds": 2, "chunk": 4, "whole": whole}))
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (2, 50), generator=dice)
    source, _ = pack([[1, 2, 3], [4, 5]], [0, 1], [0, 0])
    source = Rows(source.tokens)
    with torch.no_grad():
        expected = model.logits(Batch(Rows(tokens), source))
        states = model.start(source)
        found = torch.cat([model.head(model.advance(Rows(piece), states)) for piece in tokens.split(7, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert math.isfinite(float(found.sum()))
