"""Three forms of retention: recurrent (the definition), parallel and chunkwise; and its decoding state."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.retention import GatedRetention, Retention
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.retention import CHUNK, chunkwise, continued, fold, initial_state
from allyouneed.nn.states.window import MAX_TRIM
from any_part import build, tree

BATCH, HEADS, KEYS, VALUES = 2, 3, 4, 5
lengths = pytest.mark.parametrize("time", [1, 7, 63, 100, 128, 300])
steady = pytest.mark.parametrize("steady", [True, False])


def inputs(time, steady, dtype=torch.double):
    torch.manual_seed(time)
    q, k = (torch.randn(BATCH, HEADS, time, KEYS, dtype=dtype) for _ in range(2))
    v = torch.randn(BATCH, HEADS, time, VALUES, dtype=dtype)
    log = torch.randn(1, HEADS, 1) if steady else torch.randn(BATCH, HEADS, time)
    log = -log.to(dtype).exp() / 4
    sums = (torch.randn(BATCH, HEADS, KEYS, VALUES, dtype=dtype), torch.randn(BATCH, HEADS, KEYS, dtype=dtype))
    for x in (q, k, v, log, sums[0]):
        x.requires_grad_()
    return q, k, v, log, sums


def recurrent(q, k, v, log, sums):
    """Eq. 6, token by token."""
    s, z = sums
    outputs, rows = [], []
    for t in range(q.shape[2]):
        a = log[:, :, t if log.shape[2] > 1 else 0].exp()
        s = a[..., None, None] * s + k[:, :, t, :, None] * v[:, :, t, None, :]
        z = a[..., None] * z + k[:, :, t]
        outputs.append((q[:, :, t, :, None] * s).sum(2))
        rows.append((q[:, :, t] * z).sum(-1))
    return torch.stack(outputs, 2), torch.stack(rows, 2), (s, z)


def parallel(q, k, v, log):
    """Eq. 5, all at once."""
    time = q.shape[2]
    since = log.expand(-1, -1, time).cumsum(-1)
    d = torch.ones(time, time).tril() * (since[..., None] - since[..., None, :]).tril().exp()
    scores = q @ k.transpose(-1, -2) * d
    return scores @ v, scores.sum(-1)


@lengths
@steady
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.double, 1e-9), (torch.float32, 1e-4)])
def test_recurrent_parallel_and_chunkwise_forms_agree(time, steady, dtype, tolerance):
    q, k, v, log, _ = inputs(time, steady, dtype)
    o, r = chunkwise(q, k, v, log)
    expected, rows, _ = recurrent(q, k, v, log, initial_state(BATCH, HEADS, KEYS, VALUES, q))
    torch.testing.assert_close((o, r), (expected, rows.detach()), atol=tolerance, rtol=0)
    torch.testing.assert_close((o, r), tuple(parallel(q, k, v, log)), atol=tolerance, rtol=0)
    own = torch.autograd.grad(o.sin().sum(), (q, k, v, log), materialize_grads=True)
    theirs = torch.autograd.grad(expected.sin().sum(), (q, k, v, log))
    torch.testing.assert_close(own, theirs, atol=100 * tolerance, rtol=1e-4)


@lengths
@steady
def test_a_continued_state_equals_the_whole_sequence(time, steady):
    q, k, v, log, sums = inputs(time, steady)
    o, r = chunkwise(q, k, v, log, sums)
    expected, rows, after = recurrent(q, k, v, log, sums)
    torch.testing.assert_close((o, r), (expected, rows.detach()), atol=1e-9, rtol=0)
    torch.testing.assert_close(fold(sums, k, v, log.expand(-1, -1, time)), after, atol=1e-9, rtol=0)
    both, again, last = continued(q, k, v, log, sums)
    torch.testing.assert_close((both, again, *last), (o, r, *after), atol=1e-9, rtol=0)
    given = (q, k, v, log, sums[0])
    wanted = torch.autograd.grad(expected.sin().sum() + after[0].cos().sum(), given)
    own = torch.autograd.grad(both.sin().sum() + last[0].cos().sum(), given)
    torch.testing.assert_close(own, wanted, atol=1e-9, rtol=1e-9)


def test_gradients_are_finite_at_zero_decay():
    q, k, v, log, _ = inputs(2 * CHUNK + 3, False)
    log = (log.detach() * 1e4).requires_grad_()
    o, _ = chunkwise(q, k, v, log)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(o.sum(), (q, k, v, log)))


@pytest.mark.parametrize("config", [Retention(heads=2, head_width=6), GatedRetention(heads=2, head_width=6)])
def test_a_long_text_is_the_same_in_any_chunks(config):
    """State chunks that differ from the sum's chunks, across positions where the state folds its tail."""
    torch.manual_seed(0)
    common = Common(width=8)
    module = config.build(common).double()
    x = torch.randn(2, 400, 8, dtype=torch.double)
    with torch.no_grad():
        whole = module(x, Context(TokenLayout(torch.arange(400)[None], start=0)))
        state, found, seen = module.new_state(), [], 0
        for size in [1, 140, 1, 1, 63, *([1] * 100), 94]:
            layout = TokenLayout(torch.arange(seen, seen + size)[None], start=seen)
            slots = TokenLayout(torch.arange(seen + size)[None], start=0)
            found.append(module(x[:, seen : seen + size], Context(layout, slots=slots), state))
            seen += size
        torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-9, rtol=0)
        state.trim(400 - MAX_TRIM)
        layout = TokenLayout(torch.arange(400 - MAX_TRIM, 400)[None], start=400 - MAX_TRIM)
        again = module(
            x[:, 400 - MAX_TRIM :], Context(layout, slots=TokenLayout(torch.arange(400)[None], start=0)), state
        )
    torch.testing.assert_close(again, whole[:, 400 - MAX_TRIM :], atol=1e-9, rtol=0)
    assert state.bytes == 8 * 2 * config.cost(common, 1).state_constant


@pytest.mark.parametrize("kind", ["retention", "gated-retention"])
def test_state_size_is_constant(kind):
    model = build(tree(mixer={"kind": kind, "heads": 3}))
    sizes = set()
    with torch.no_grad():
        states = model.start(Rows.of([[1, 2]]))
        for size in (1, 1, 50, 500, 1):
            model.advance(Rows(torch.ones(1, size, dtype=torch.long)), states)
            sizes.add(states.bytes)
    assert len(sizes) == 1


def test_mixed_stacks_decode():
    given = tree()
    layer = given["decoder"][0] | {"repeat": 1}
    named = {"retention": layer | {"mixer": {"kind": "retention", "heads": 3}}, "attention": layer}
    model = build(given | {"layers": named, "decoder": "3×retention, 1×attention"})
    source, target = Rows.of([[1, 2], [3, 4]]), torch.randint(1, 11, (2, 70))
    with torch.no_grad():
        whole = model.decode(Rows(target), model.encode(source))
        states = model.start(source)
        found = [model.advance(Rows(piece), states) for piece in target.split([40, 1, 1, 28], 1)]
    torch.testing.assert_close(torch.cat(found, 1), whole)


def test_half_precision_is_close():
    torch.manual_seed(0)
    module = Retention(heads=2).build(Common(width=16))
    x, context = torch.randn(1, 300, 16), Context(TokenLayout(torch.arange(300)[None], start=0))
    exact, rough = module(x, context), module.bfloat16()(x.bfloat16(), Context(context.queries))
    assert rough.dtype == torch.bfloat16
    assert (exact - rough).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"heads": 5}, "heads: width 12 is not divisible by 5 heads"),
        ({"heads": 4}, "head_width: 3 is odd"),
        ({"heads": 3, "head_norm": "batch"}, "head_norm: needs a norm over one token's features"),
    ],
)
def test_invalid_configs_are_refused(keys, said):
    with pytest.raises(ConfigError) as refusal:
        parse(Model, tree(mixer={"kind": "retention"} | keys))
    assert any(said in problem for problem in refusal.value.problems)
