"""Unlimiformer against Bertsch et al. 2023, 2.1-2.3, written out: windows as in the authors' code (`window_indices`),
then for each query and head all keys and values projected, the k largest products q·k, and their softmax."""

import itertools

import pytest
import torch

from allyouneed.infer.decoding.options import Unlimited
from allyouneed.infer.retrieval.unlimited import UnlimitedModel, split_source
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from any_part import build, tree
from attention_layers import TOLERANCE, agreement

CROSS = {"kind": "attention", "heads": 3}


def windows(length, size, overlap):
    """The authors' plan: (start, end, first kept, last kept + 1) of each window."""
    margin = int(size * overlap / 2)
    if length <= size:
        return [(0, length, 0, length)]
    stride, start, end, first, last = size - 2 * margin, 0, size, 0, size - margin
    found = [(start, end, first, last)]
    while end < length:
        end = min(length, end + stride)
        start = start + stride if end < length else length - size
        first, last = max(first + stride, last), min(length, last + stride) if end < length else length
        found.append((start, end, start + (first - start), start + (last - start)))
    return found


@pytest.mark.parametrize(("size", "overlap"), [(8, 0.5), (8, 0.0), (7, 0.9), (5, 0.4)])
def test_windows_are_the_authors(size, overlap):
    model = UnlimitedModel(build(tree()), Unlimited(chunk=size, overlap=overlap), 100)
    for length in range(1, 60):
        found = [tuple(chunk) for chunk in split_source(length, model)]
        expected = windows(length, size, overlap)
        assert found[-1][3] == length and all(a[3] == b[2] for a, b in itertools.pairwise(found))
        # where the source ends a chunk exactly, theirs has kept all but its margin and adds nothing more
        assert found == expected or (found[:-1] == expected[:-1] and found[-1][:2] == expected[-1][:2])


def by_the_paper(cross, x, hidden, count):
    """x (queries, width), hidden (tokens, width)."""
    heads, width = cross.heads, cross.head_width
    q = cross.q(x).unflatten(-1, (heads, width))
    w_k, w_v = cross.kv.weight.chunk(2)
    b_k, b_v = cross.kv.bias.chunk(2)
    rows = []
    for one in q:
        found = []
        for h in range(heads):
            group = h * cross.kv_heads // heads
            own = slice(group * width, (group + 1) * width)
            keys, values = hidden @ w_k[own].T + b_k[own], hidden @ w_v[own].T + b_v[own]
            scores, nearest = (keys @ one[h]).topk(count)
            found.append((scores / width**0.5).softmax(0) @ values[nearest])
        rows.append(torch.cat(found))
    return cross.out(torch.stack(rows))


@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_attention_to_the_nearest_states(kv_heads, count, record_difference):
    model = build(tree(cross=CROSS | {"kv_heads": kv_heads}))  # in double precision
    view = UnlimitedModel(model, Unlimited(keys=count, chunk=8), 100)
    sources = [torch.randint(1, 11, (n,), generator=torch.Generator().manual_seed(n)) for n in (27, 6)]
    memory = view.encode(Rows.of([source.tolist() for source in sources]))
    x = torch.randn(2, 4, model.config.width, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    cross = model.decoder.blocks[0].sublayers["cross"]
    found = cross(x, Context(TokenLayout(torch.arange(4)[None], start=0), memory=memory))
    expected = []
    for source, row in zip(sources, x, strict=True):
        hidden = torch.zeros(len(source), model.config.width).double()
        for start, end, first, last in windows(len(source), 8, 0.5):
            states = model.encode(Rows(source[None, start:end])).hidden[0]
            hidden[first:last] = states[first - start : last - start]
        expected.append(by_the_paper(cross, row, hidden, min(count, len(source))))
    differences = agreement(found, torch.stack(expected), [x, *cross.parameters()])
    record_difference("Unlimiformer", "equations written out", *differences)
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize(
    "cross",
    [
        CROSS,
        CROSS | {"kv_heads": 1, "bias": {"k": False}},
        CROSS | {"qk_norm": "rms"},
        CROSS | {"scores": "additive"},
        CROSS | {"scores": "general", "soft_cap": 2.0},
    ],
)
def test_all_keys_are_full_cross_attention(cross):
    """In whichever way keys are searched: over hidden states, or projected where a norm or a score needs it."""
    model = build(tree(cross=cross))
    view = UnlimitedModel(model, Unlimited(keys=50, chunk=50), 100)
    source, target = Rows.of([[3, 4, 5, 6, 7, 8], [9, 2]]), torch.tensor([[1, 5, 6, 7], [1, 2, 3, 4]])
    with torch.no_grad():
        expected = model.logits(Batch(Rows(target), source))
        states = view.start(source)
        steps = [view.head(view.advance(Rows(piece), states)) for piece in target.split([2, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), expected)
        states = view.start(source)  # beams share their source
        states.repeat_rows(2)
        beams = view.head(view.advance(Rows(target.repeat_interleave(2, 0)), states))
    torch.testing.assert_close(beams, expected.repeat_interleave(2, 0))


def test_faiss_finds_what_the_exact_search_finds():
    pytest.importorskip("faiss")
    model = build(tree()).float()
    source = Rows.of([[1 + n % 10 for n in range(40)], [3, 4]])
    found = []
    for index in ("exact", "faiss"):
        view = UnlimitedModel(model, Unlimited(keys=6, chunk=8, index=index), 100)
        with torch.no_grad():
            states = view.start(source)
            states.select([1, 0])
            states.join(view.start(source))
            found.append(view.advance(Rows(torch.tensor([[1, 2]] * 4)), states))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_clusters_of_a_very_long_source(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr("allyouneed.infer.retrieval.unlimited.CLUSTERED", 30)
    model = build(tree()).float()
    view = UnlimitedModel(model, Unlimited(keys=4, chunk=8, index="faiss"), 100)
    with torch.no_grad():
        memory = view.encode(Rows(torch.randint(1, 11, (1, 900), generator=torch.Generator().manual_seed(0))))
        queries = torch.randn(1, 5, model.config.width)
        scores, nearest = memory.search(queries)
    assert scores.isfinite().all() and nearest.shape == (1, 5, 4)
    exact = (memory.hidden[0][nearest[0]] * queries[0, :, None]).sum(-1)
    torch.testing.assert_close(exact[None], scores, atol=1e-4, rtol=1e-4)
