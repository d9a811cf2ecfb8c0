"""Multi-head attention against the paper's equations written out, and its weights on request."""

import math

import pytest
import torch

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import WeightRequest
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from any_part import MOST_CASES, build, case, pack, tree

SOURCES, TARGETS = [[1, 2, 3, 4], [5, 6]], [[1, 2, 3], [4, 5, 6, 7, 8]]


def attention_modules(model):
    return [module for module in model.modules() if isinstance(module, SelfAttention | CrossAttention)]


def run(model, source, target, record=None):
    with torch.no_grad():
        return model.head(model.decode(target, model.encode(source, record), record))


def watch(module, store):
    """The inputs of a module's projections, to compute its weights by hand."""
    return module.register_forward_pre_hook(
        lambda m, args, kwargs: store.append((args[0], kwargs["context"])), with_kwargs=True
    )


@torch.no_grad()
def by_hand(module, x, context):
    """softmax(Q K^T / √d_k) for each head (eq. 1), with loops; None where a key is hidden."""
    heads = module.heads
    if isinstance(module, SelfAttention):
        queries, keys, _ = module.qkv(x).chunk(3, -1)
        layout = context.queries
    else:
        queries, keys = module.q(x), module.kv(context.memory.hidden).chunk(2, -1)[0]
        layout = context.memory.layout
    allowed = module.pattern.mask(64, 64)
    size = queries.shape[-1] // heads
    weights = torch.zeros(x.shape[0], heads, queries.shape[1], keys.shape[1], dtype=torch.double)
    for b in range(x.shape[0]):
        for i in range(queries.shape[1]):
            qp, qs = place(context.queries, b, i)
            seen = [j for j in range(keys.shape[1]) if sees(allowed, (qp, qs), place(layout, b, j))]
            for h in range(heads):
                q, part = queries[b, i, h * size : (h + 1) * size], keys[b, :, h * size : (h + 1) * size]
                scores = [math.exp(float(q @ part[j]) / math.sqrt(size)) for j in seen]
                for j, score in zip(seen, scores, strict=True):
                    weights[b, h, i, j] = score / sum(scores)
    return weights


def place(layout, row, column):
    position = layout.positions[row if len(layout.positions) > 1 else 0, column].item()
    return position, 1 if layout.segments is None else layout.segments[row, column].item()


def sees(allowed, query, key):
    return key[1] > 0 and query[1] == key[1] and bool(allowed[query[0], key[0]])


def layouts():
    yield Rows.of(SOURCES), Rows.of(TARGETS)
    yield Rows.of(SOURCES, side="left"), Rows.of(TARGETS, side="left")
    yield pack(SOURCES, [0, 0], [0, 1])[0], pack(TARGETS, [0, 0], [1, 0])[0]


@pytest.mark.parametrize("pattern", ["causal", "causal & window(2)"])
@pytest.mark.parametrize(("source", "target"), list(layouts()), ids=["padded", "left", "packed"])
def test_recorded_weights_match_the_definition(pattern, source, target):
    model = build(tree(mixer={"kind": "attention", "heads": 3, "pattern": pattern}))
    modules = attention_modules(model)
    seen = {module: [] for module in modules}
    hooks = [watch(module, seen[module]) for module in modules]
    record = {module: WeightRequest() for module in modules}
    run(model, source, target, record)
    for hook in hooks:
        hook.remove()
    assert len(record) == 6
    for module in modules:
        ((x, context),) = seen[module]
        expected, found = by_hand(module, x, context), record[module].weights[0]
        real = (expected.sum(-1, keepdim=True) > 0).double()  # queries that are padding may show anything
        torch.testing.assert_close(found.double() * real, expected, atol=1e-6, rtol=0)
        sums = found.sum(-1, keepdim=True)[real > 0]
        torch.testing.assert_close(sums, torch.ones_like(sums))
        assert (found[(expected == 0) & (real > 0)] == 0).all()


def test_recording_is_limited_to_the_requested_heads():
    model = case("wiring post-norm")
    asked = model.decoder.blocks[1].sublayers["cross"]
    record = {asked: WeightRequest()}
    plain = run(model, Rows.of(SOURCES), Rows.of(TARGETS))
    recorded = run(model, Rows.of(SOURCES), Rows.of(TARGETS), record)
    assert torch.equal(plain, recorded)
    assert list(record) == [asked]
    assert record[asked].weights[0].shape == (2, 3, 5, 4)
    again = {asked: WeightRequest()}
    run(model, Rows.of(SOURCES), Rows.of(TARGETS), again)
    assert torch.equal(again[asked].weights[0], record[asked].weights[0])


def test_multi_head_is_the_papers_equation():
    """3.2.2: MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O, computed from the weights with no help."""
    model = build(tree())
    module = model.encoder.blocks[0].sublayers["mixer"]
    inputs, outputs = [], []
    module.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    module.register_forward_hook(lambda m, args, result: outputs.append(result))
    run(model, Rows(torch.tensor([[1, 2, 3]])), Rows(torch.tensor([[1]])))
    x, (w_q, w_k, w_v), (b_q, b_k, b_v) = inputs[0][0], module.qkv.weight.chunk(3), module.qkv.bias.chunk(3)
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        q, k, v = (x @ w[part].T + b[part] for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
        heads.append((q @ k.T / math.sqrt(4)).softmax(-1) @ v)
    expected = torch.cat(heads, -1) @ module.out.weight.T + module.out.bias
    torch.testing.assert_close(outputs[0][0], expected)


def test_head_width_may_differ_from_width_over_heads():
    wide = {"kind": "attention", "heads": 5, "head_width": 6}
    model = build(tree(mixer=wide | {"pattern": "causal"}, encoder_mixer=wide, cross=wide))
    assert model.encoder.blocks[0].sublayers["mixer"].qkv.weight.shape == (90, 12)
    record = {module: WeightRequest() for module in attention_modules(model)}
    run(model, Rows.of(SOURCES), Rows.of(TARGETS), record)
    assert all(wanted.weights[0].shape[1] == 5 for wanted in record.values())


def test_attention_dropout_works_in_training_only():
    model = build(tree(encoder_mixer={"kind": "attention", "heads": 3, "dropout": 0.5}))
    batch = Batch(Rows.of(TARGETS), Rows.of(SOURCES))
    assert torch.equal(model.logits(batch), model.logits(batch))
    model.train()
    assert not torch.equal(model.logits(batch), model.logits(batch))


@pytest.mark.parametrize("name", MOST_CASES)
def test_every_attention_module_records_weights(name):
    """Every requested module that attends records weights that sum to one, or to less where a null key takes the
    rest."""
    model = case(name)
    record = {module: WeightRequest() for module in attention_modules(model)}
    run(model, Rows.of(SOURCES), Rows.of(TARGETS), record)
    for weights in (found for wanted in record.values() for found in wanted.weights):
        sums = weights[0, :, : len(TARGETS[0])].sum(-1)
        nothing_seen = sums == 0
        if "null=True" in name:
            assert (sums <= 1 + 1e-6).all() and not nothing_seen.all()
            continue
        torch.testing.assert_close(sums[~nothing_seen], torch.ones_like(sums[~nothing_seen]))


def test_requested_layers_and_heads_are_returned_by_layer():
    model = build(tree())
    batch = Batch(Rows.of([[1, 2, 3], [4, 5]]), Rows.of([[5, 4, 3, 2], [1]]))
    every = model.attention(batch, "cross")
    assert sorted(every) == [0, 1]
    chosen = model.attention(batch, "cross", layers=[1], heads=[1])
    assert list(chosen) == [1]
    torch.testing.assert_close(chosen[1], every[1][:, 1:2], rtol=0, atol=0)
    inside = model.attention(batch, "decoder")[0]
    assert torch.equal(inside.triu(1), torch.zeros_like(inside))
    assert not torch.equal(model.attention(batch, "encoder")[0][0].triu(1), torch.zeros(1))
