"""The sums of RWKV-4 against the recurrence, one token after another (Peng et al. 2023, eq. 16 and appendix D)."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.rwkv import RWKV, RWKVChannel
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops import wkv
from allyouneed.nn.ops.wkv import initial_state, prefix_states, run_wkv, wkv_output
from allyouneed.nn.states.recurrent import TAIL
from allyouneed.nn.states.window import MAX_TRIM
from any_part import build, tree


def plain(k, v, w, u, state):
    """Appendix D, token by token; (m, a, b) as ours."""
    m, a, b = state
    rows = []
    for t in range(k.shape[1]):
        top = torch.maximum(m, u + k[:, t])
        old, new = (m - top).exp(), (u + k[:, t] - top).exp()
        rows.append((old * a + new * v[:, t]) / (old * b + new))
        top = torch.maximum(m - w.exp(), k[:, t])
        old, new = (m - w.exp() - top).exp(), (k[:, t] - top).exp()
        m, a, b = top, old * a + new * v[:, t], old * b + new
    return torch.stack(rows, 1), (m, a, b)


def given(time, spread=1.0, dtype=torch.double):
    dice = torch.Generator().manual_seed(time)
    k, v = (torch.randn(3, time, 10, generator=dice, dtype=torch.double).to(dtype) for _ in range(2))
    w, u = (torch.randn(10, generator=dice, dtype=torch.double).to(dtype) for _ in range(2))
    # from features that hardly forget to such that do at once
    w = torch.linspace(-6, 4, 10, dtype=dtype) + 0.1 * w
    return [tensor.requires_grad_() for tensor in ((k * spread).detach(), v, w.detach(), u)]


@pytest.mark.parametrize("time", [1, 2, 3, 63, 100, 257])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.double, 1e-9), (torch.float32, 1e-5)], ids=["double", "single"]
)
def test_outputs_states_and_gradients_match_the_recurrence(time, dtype, tolerance):
    """Gradients relative to the largest: those of w and u are sums over all tokens."""
    inputs = k, v, w, u = given(time, dtype=dtype)
    begin = initial_state(3, 10, k)
    _, begin = plain(*(tensor.detach()[:, :3] if tensor.dim() == 3 else tensor.detach() for tensor in inputs), begin)
    expected, after = plain(k, v, w, u, begin)
    sums = prefix_states(begin, k, v, w.exp())
    found = wkv_output(sums, k, v, u)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    for own, other in zip(sums, after, strict=True):
        torch.testing.assert_close(own[:, -1], other, atol=tolerance, rtol=tolerance)
    own, other = (torch.autograd.grad(y.sin().sum(), inputs, materialize_grads=True) for y in (found, expected))
    for one, two in zip(own, other, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance * max(1.0, two.abs().max().item()), rtol=0)


def test_large_keys_do_not_overflow():
    """e^300 overflows single precision; the weighted average does not."""
    inputs = k, v, w, u = given(100, spread=300.0, dtype=torch.float32)
    found = wkv_output(prefix_states(initial_state(3, 10, k), k, v, w.exp()), k, v, u)
    exact = [tensor.detach().double() for tensor in inputs]
    expected, _ = plain(*exact, initial_state(3, 10, exact[0]))
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)  # exponents of 300 end with 3e-5
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), inputs))


def test_initial_decays_cover_all_rates():
    mixer = RWKV().build(Common(width=64))
    forgotten = torch.exp(-mixer.decay.exp())
    assert forgotten.min() < 1e-6 and forgotten.max() > 0.99
    assert mixer.mix_k.min() >= 0 and mixer.mix_k.max() <= 1


def test_state_size_is_constant_and_trimming_is_limited():
    model = build(tree(mixer="rwkv", channel={"kind": "rwkv-channel", "hidden": 7}))
    dice = torch.Generator().manual_seed(0)
    source, target = Rows.of([[1, 2], [3, 4]]), torch.randint(1, 11, (2, 400), generator=dice)
    with torch.no_grad():
        whole = model.decode(Rows(target), model.encode(source))
        states = model.start(source)
        model.advance(Rows(target[:, :250], lengths=torch.tensor([250, 240])), states)
        size = states.bytes
        model.advance(Rows(target[:, 240:390], lengths=torch.tensor([0, 150])), states)
    own = [layer["mixer"] for layer in states.layers]
    assert states.bytes - sum(s.bytes for layer in states.layers for s in layer.values() if s.shared) > 0
    assert states.bytes == size
    assert {state.bytes for state in own} == {8 * 2 * (2 * (12 + 3 * 12) + TAIL * 12)}
    assert {layer["channel"].bytes for layer in states.layers} == {8 * 2 * 12 * (1 + MAX_TRIM)}
    with pytest.raises(ValueError, match=f"can trim at most {MAX_TRIM} tokens"):
        states.trim(250)
    states.select([1])
    states.trim(390 - MAX_TRIM)
    with torch.no_grad():
        rest = model.advance(Rows(target[1:, 390 - MAX_TRIM :]), states)
    torch.testing.assert_close(rest, whole[1:, 390 - MAX_TRIM :])


def test_channel_mixing_can_be_shared_but_not_an_expert():
    channel, ffn = {"kind": "rwkv-channel", "hidden": 7}, {"kind": "ffn", "hidden": 7}
    with pytest.raises(ConfigError, match=r"channel\.expert: reads the previous token"):
        parse(Model, tree(channel={"kind": "moe", "experts": 3, "expert": channel}))
    assert parse(Model, tree(channel={"kind": "moe", "experts": 3, "expert": ffn, "shared": channel}))


def test_parameters_are_counted():
    common = Common(width=6)
    for part, cost in (
        (RWKV(hidden=10), RWKV(hidden=10).cost(common, 5)),
        (RWKVChannel(hidden=9), RWKVChannel(hidden=9).cost(common)),
    ):
        assert sum(p.numel() for p in part.build(common).parameters()) == cost.parameters


@pytest.mark.parametrize("segment", [1, 7, 32, 99])
@pytest.mark.parametrize("ragged", [False, True])
def test_segments_equal_the_whole(monkeypatch, segment, ragged):
    k, v, w, u = given(100)
    lengths = torch.tensor([100, 40, 0])
    real = torch.arange(100) < lengths[:, None] if ragged else None
    seen = torch.ones(3, 100, dtype=torch.bool) if real is None else real
    found = []
    for size in (10**9, segment):
        monkeypatch.setattr(wkv, "SEGMENT", size)
        y, sums = run_wkv(initial_state(3, 10, k), k, v, w.exp(), u, real)
        value = (y * seen[..., None] * torch.linspace(-1, 1, 10)).square().sum() + sum(x.sum() for x in sums[1:])
        found.append([y * seen[..., None], *sums, *torch.autograd.grad(value, (k, v, w, u))])
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-9)
