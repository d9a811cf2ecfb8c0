"""The reversible wiring: its formula, the gradients of the plain computation, and the memory it keeps."""

import gc

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import STACKS, Model
from allyouneed.nn.wiring import reversible
from allyouneed.nn.wiring.reversible import Reversible
from any_part import CASES, WIDTH, build, pack, possible, tree
from wired import wired

COMMON = Common(width=WIDTH)
TENSORS = (torch.Tensor, nn.Parameter)
TARGET = [[1, 5, 6, 7, 2, 9, 3], [1, 9, 4]]
SOURCE = [[4, 5, 8], [8, 7, 6, 2]]


@pytest.fixture
def plainly(monkeypatch):
    """The plain computation: everything is kept, nothing is computed twice."""

    def do():
        monkeypatch.setattr(reversible, "checkpoint_half", lambda half, x, way: half(x, False))

    return do


@pytest.mark.parametrize("join", ["mean", "concat"])
@pytest.mark.parametrize("sublayers", [1, 2, 3])
def test_the_reversible_wiring_equals_its_formula(join, sublayers):
    """y1 = x1 + f(norm(x2)), y2 = x2 + g(norm(y1)), and a third changes y1 again."""
    torch.manual_seed(0)
    wiring = Reversible(join=join)
    blocks = [wiring.build(COMMON, sublayers, Depth(0, 3, "decoder")).double() for _ in range(3)]
    calls = [[nn.Linear(WIDTH, WIDTH).double() for _ in range(sublayers)] for _ in range(3)]
    end = wiring.end(COMMON).double()
    modules = nn.ModuleList([*blocks, *(call for row in calls for call in row), end])
    for parameter in modules.parameters():
        nn.init.normal_(parameter)
    context = Context(TokenLayout(torch.arange(5)[None], start=0))
    x = torch.randn(2, 5, WIDTH, dtype=torch.double, requires_grad=True)
    stream = wiring.begin(x)
    for block, row in zip(blocks, calls, strict=True):
        stream = wired(block, row)(stream, context)
    found = end(stream, context)

    streams, turn = [x, x], 0
    for block, row in zip(blocks, calls, strict=True):
        for norm, call in zip(block.norms, row, strict=True):
            streams[turn] = streams[turn] + call(norm(streams[1 - turn], context))
            turn = 1 - turn
    ends = (streams[turn], streams[1 - turn])
    joined = torch.cat(ends, -1) if join == "concat" else (ends[0] + ends[1]) / 2
    expected = end.norm(joined, context)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = [x, *modules.parameters()]
    own = torch.autograd.grad(found.sin().sum(), weights, retain_graph=True)
    theirs = torch.autograd.grad(expected.sin().sum(), weights)
    for one, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    again = torch.autograd.grad(found.sin().sum(), weights)  # the way back can be gone once more
    for one, other in zip(again, own, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


MOE = {"kind": "moe", "experts": 4, "top": 2, "expert": {"kind": "ffn", "hidden": 14}, "router": {"z_loss": 0.01}}
MODELS = {
    "attention": {},
    "t5's shared table": {"encoder_mixer": {"kind": "attention", "heads": 3, "positions": "buckets"}},
    "lsh": {"mixer": {"kind": "lsh", "heads": 3, "buckets": 4, "dropout": 0.2}},
    "lsh in chunks": {"mixer": {"kind": "lsh", "heads": 3, "buckets": 4, "chunk": 2}},
    "convolution": {"mixer": {"kind": "convolution", "size": 3, "sees": "past"}},
    "experts": {"channel": MOE},
    "experts balanced by hand": {"channel": MOE | {"router": {"correction": 0.1, "scores": "sigmoid"}}},
    "batch norm": {"norm": "batch"},
}


def gradients(model, packed):
    torch.manual_seed(5)
    losses = []
    if packed:
        target, _ = pack(TARGET, [0, 0], [0, 2])
        source, _ = pack(SOURCE, [0, 0], [1, 0])
    else:
        target, source = Rows.of(TARGET), Rows.of(SOURCE)
    memory = model.encode(source, losses=losses)
    hidden = model.decode(target, memory, losses=losses)
    total = model.head(hidden).sin().sum() + 3 * sum(losses)
    weights = list(model.parameters())
    buffers = [buffer.clone() for buffer in model.buffers()]
    return total, torch.autograd.grad(total, weights, allow_unused=True), [buffers, list(model.buffers())]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_match_the_plain_computation(name, packed, plainly):
    """Dropout everywhere, an encoder behind the cross-attention, tables that layers share, losses that layers add."""
    given = tree(wiring="reversible", dropout=0.3, **MODELS[name])
    model, other = build(given).train(), build(given).train()
    total, found, buffers = gradients(model, packed)
    for before, after in zip(*buffers, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)  # the way back gathers nothing
    plainly()
    expected_total, expected, _ = gradients(other, packed)
    torch.testing.assert_close(total, expected_total, rtol=1e-12, atol=0)
    assert "experts" in name or all(gradient is not None for gradient in expected)  # an expert may have no token
    for one, other_one in zip(found, expected, strict=True):
        assert (one is None) == (other_one is None)
        if one is not None:
            torch.testing.assert_close(one, other_one, rtol=1e-9, atol=1e-9)


def reversed_(keys):
    layers = {side: [layer | {"wiring": "reversible"} for layer in keys[side]] for side in STACKS}
    return keys | layers | {"dropout": 0.3}


PARTS = ("mixer", "encoder mixer", "cross mixer", "channel")
FIRSTS = {
    " ".join(name.split(" ")[: 1 + len(part.split())]): name
    for part in PARTS
    for name in reversed(CASES)
    if name.startswith(f"{part} ")
}
EVERY = [name for name in FIRSTS.values() if possible(reversed_(CASES[name]))]


@pytest.mark.parametrize("name", EVERY)
def test_every_part_can_be_recomputed(name, plainly):
    """Also parts that plan, draw random numbers, gather or choose in the first pass."""

    def found():
        torch.manual_seed(1)
        return gradients(build(reversed_(CASES[name])).train(), packed=True)[1]

    once_more = found()
    plainly()
    for one, other in zip(once_more, found(), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_auxiliary_losses_backpropagate(plainly):
    """Upper layers without gradients are still inverted, dropout included."""
    given = tree(wiring="reversible", dropout=0.3, channel=MOE)

    def aside(model):
        torch.manual_seed(5)
        losses = []
        model.encode(Rows.of(SOURCE), losses=losses)
        first = [p for p in model.encoder.blocks[0].parameters()]
        return torch.autograd.grad(losses[0], first, allow_unused=True)

    found = aside(build(given).train())
    plainly()
    for one, other in zip(found, aside(build(given).train()), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def kept(depth, wiring):
    """Bytes of all tensors that a forward pass leaves alive behind itself."""
    keys = {"kind": "ffn", "hidden": 64}
    layer = {"repeat": depth, "share": True, "wiring": wiring, "channel": keys}
    layer["mixer"] = {"kind": "attention", "heads": 4, "pattern": "causal"}
    model = parse(Model, {"kind": "decoder", "vocab": 11, "width": 32, "decoder": [layer]}).build()
    tokens = Rows(torch.ones(2, 200, dtype=torch.long))
    gc.collect()
    before = {id(item) for item in gc.get_objects() if type(item) in TENSORS}
    total = 0

    def pack_(tensor):
        nonlocal total
        total += tensor.numel() * tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_, lambda tensor: tensor):
        out = model(Batch(tokens)).sum()
    gc.collect()
    alive = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if type(item) in TENSORS and id(item) not in before
    }
    assert out.requires_grad
    return total + sum(alive.values())


def test_saved_memory_does_not_grow_with_depth():
    two, sixteen = kept(2, "reversible"), kept(16, "reversible")
    state = torch.get_rng_state().numel()
    assert sixteen - two <= 28 * state + 1000
    assert kept(16, "pre-norm") > 5 * kept(2, "pre-norm")


def test_half_precision_inverts_in_single():
    """Streams of bfloat16 would come back different."""
    torch.manual_seed(0)
    given = tree(wiring="reversible")
    model, exact = build(given).to(torch.bfloat16), build(given)
    rows = Batch(Rows.of(TARGET), Rows.of(SOURCE))
    expected = torch.autograd.grad(exact.logits(rows).sin().sum(), list(exact.parameters()))
    found = torch.autograd.grad(model.logits(rows).sin().sum(), list(model.parameters()))
    pairs = zip(found, expected, strict=True)
    angles = [nn.functional.cosine_similarity(a.flatten().double(), b.flatten(), 0) for a, b in pairs]
    assert torch.stack(angles).median() > 0.99


def test_a_wide_end_is_refused_without_a_head():
    with pytest.raises(ConfigError, match=r"encoder\[0\].wiring: outputs 24 features; the next part needs 12"):
        parse(Model, tree(wiring={"kind": "reversible", "join": "concat"}))
