"""The algorithms of kernels/triton/retention.py and wkv.py, step by step in torch, against the plain definitions.
Where there is Triton, also the kernels themselves, by its interpreter (bench/check/kernels.py)."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from allyouneed.nn.ops import retention as retain
from allyouneed.nn.ops.wkv import LEAST, initial_state, prefix_states, wkv_output

CHUNK = 4


def walked(x, y, log, ends, share, back):
    """`_walk` and `_join`: S (or its gradient) at every chunk, from its segment and from the others, and at the end.

    x, y (lines, chunks, CHUNK, …), log (lines, chunks, CHUNK).
    """
    since, chunks = log.cumsum(-1), x.shape[1]
    end = since[..., -1]
    left = (since if back else end[..., None] - since).exp()
    near, fades, totals, wholes = [None] * chunks, [None] * chunks, [], []
    starts = list(range(0, chunks, share))
    for start in starts:
        s, fade = torch.zeros_like(ends), torch.zeros_like(end[:, 0])
        inside = range(start, min(start + share, chunks))
        for chunk in reversed(inside) if back else inside:
            near[chunk], fades[chunk] = s, fade.exp()
            more = (x[:, chunk] * left[:, chunk, :, None]).transpose(1, 2) @ y[:, chunk]
            s, fade = s * end[:, chunk, None, None].exp() + more, fade + end[:, chunk]
        totals.append(s)
        wholes.append(fade.exp())
    far = [None] * len(starts)
    for number in reversed(range(len(starts))) if back else range(len(starts)):
        far[number], ends = ends, ends * wholes[number][:, None, None] + totals[number]
    found = [near[c] + fades[c][:, None, None] * far[c // share] for c in range(chunks)]
    return torch.stack(found, 1), ends


def retention(q, k, v, log, s, g, g_end, share):
    """Outputs, the last S, and the gradients of everything for output gradients g and g_end."""
    time, cut = q.shape[1], lambda x: pad(x, (0, 0, 0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
    q, k, v, g, steps = cut(q), cut(k), cut(v), cut(g), cut(log[..., None])[..., 0]
    since = steps.cumsum(-1)
    end, left = since[..., -1:], since.exp()[..., None]
    rest = (end - since).exp()[..., None]
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    faded = (since[..., None] - since[..., None, :]).masked_fill(~past, -torch.inf).exp()
    near, after = walked(k, v, steps, s, share, False)
    o = (q @ near) * left + (q @ k.mT * faded) @ v
    behind, d_s = walked(q, g, steps, g_end, share, True)
    scores = g @ v.mT * faded
    dq = (g @ near.mT) * left + scores @ k
    carried = (v @ behind.mT) * rest
    dk = carried + scores.mT @ q
    dv = (k @ behind) * rest + (q @ k.mT * faded).mT @ g
    each = (q * dq - k * dk).sum(-1)
    whole = end.exp() * (near * behind).sum((-1, -2))[..., None] + (k * carried).sum((-1, -2))[..., None]
    d_log = each.flip(-1).cumsum(-1).flip(-1) + whole
    return [x.flatten(1, 2)[:, :time] for x in (o, dq, dk, dv)] + [d_log.flatten(1)[:, :time], after, d_s]


@pytest.mark.parametrize("share", [1, 2, 5])
@pytest.mark.parametrize("time", [1, 4, 7, 30])
def test_retention_by_segments(time, share):
    torch.manual_seed(time)
    q, k, v, log = (torch.randn(3, time, width, dtype=torch.double) for width in (5, 5, 6, 1))
    log = -log[..., 0].exp() / 3
    s, g = torch.randn(3, 5, 6, dtype=torch.double), torch.randn(3, time, 6, dtype=torch.double)
    g_end = torch.randn_like(s)
    o, dq, dk, dv, d_log, after, d_s = retention(q, k, v, log, s, g, g_end, share)
    leaves = [x.requires_grad_() for x in (q, k, v, log, s)]
    lines = [x[:, None] for x in leaves]  # a head each
    sums = lines[4], torch.zeros(3, 1, 5, dtype=torch.double)
    expected, _ = retain.chunkwise(*lines[:4], sums)
    last, _ = retain.fold(sums, *lines[1:4])
    torch.testing.assert_close((o, after), (expected[:, 0], last[:, 0]), atol=1e-9, rtol=0)
    grads = torch.autograd.grad((expected[:, 0] * g).sum() + (last[:, 0] * g_end).sum(), leaves)
    torch.testing.assert_close((dq, dk, dv, d_log, d_s), grads, atol=1e-9, rtol=1e-9)


def added(sums, decay, more):
    (m, a, b), (n, c, d) = sums, more
    top = torch.maximum(m - decay, n)
    old, new = (m - decay - top).exp(), (n - top).exp()
    return top, old * a + new * c, old * b + new * d


def joined(begin, parts, counts, decay, back):
    """What was before each segment (back: what is behind it)."""
    found = [None] * len(parts)
    for number in reversed(range(len(parts))) if back else range(len(parts)):
        found[number] = begin
        begin = added(begin, decay * counts[number], parts[number])
    return found


def wkv(past, k, v, decay, bonus, g, wanted, share):
    time, zeros = k.shape[1], torch.zeros_like(k[:, 0])
    none, one = (zeros + LEAST, zeros, zeros), torch.ones_like(zeros)
    segments = [range(start, min(start + share, time)) for start in range(0, time, share)]
    counts = [len(segment) for segment in segments]
    parts = []
    for segment in segments:
        sums = none
        for t in segment:
            sums = added(sums, decay, (k[:, t], v[:, t], one))
        parts.append(sums)
    y, whole = torch.empty_like(v), torch.empty_like(v)
    for segment, sums in zip(segments, joined(past, parts, counts, decay, False), strict=True):
        for t in segment:
            top, above, below = added(sums, 0.0, (bonus + k[:, t], v[:, t], one))
            y[:, t], whole[:, t] = above / below, top + below.log()
            sums = added(sums, decay, (k[:, t], v[:, t], one))
    ends, parts = sums, []

    def term(t):
        return -whole[:, t], g[:, t], -g[:, t] * y[:, t]

    for segment in segments:
        grads = none
        for t in reversed(segment):
            grads = added(grads, decay, term(t))
        parts.append(grads)
    dk, dv, d_decay, d_bonus = (
        torch.empty_like(k),
        torch.empty_like(v),
        torch.zeros_like(decay),
        torch.zeros_like(decay),
    )
    begins = joined((-ends[0], *wanted), parts, counts, decay, True)
    for segment, (n, a, b) in reversed(list(zip(segments, begins, strict=True))):
        for t in reversed(segment):
            own, kept = (bonus + k[:, t] - whole[:, t]).exp(), (k[:, t] + n).exp()
            direct = g[:, t] * own * (v[:, t] - y[:, t])
            dk[:, t], dv[:, t] = direct + kept * (a * v[:, t] + b), g[:, t] * own + kept * a
            d_bonus += direct.sum(0)
            d_decay -= ((n - decay + whole[:, t]).exp() * (a * (y[:, t] - own * v[:, t]) + b * (1 - own))).sum(0)
            n, a, b = added((n, a, b), decay, term(t))
    kept = (n + past[0]).exp()
    return y, *ends, dk, dv, d_decay, d_bonus, kept * a, kept * b


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("share", [1, 4, 50])
@pytest.mark.parametrize("time", [1, 4, 7, 30])
def test_wkv_by_segments(time, share, begun):
    torch.manual_seed(time)
    k, v, g = 3 * torch.randn(3, 2, time, 6, dtype=torch.double)
    decay, bonus = torch.linspace(-5, 3, 6, dtype=torch.double).exp(), torch.randn(6, dtype=torch.double)
    past = initial_state(2, 6, k)
    if begun:
        past = [x[:, -1] for x in prefix_states(past, *torch.randn(2, 2, 3, 6, dtype=torch.double), decay)]
    wanted = torch.randn(2, 2, 6, dtype=torch.double).unbind()
    y, m, a, b, *grads = wkv(past, k, v, decay, bonus, g, wanted, share)
    leaves = [x.requires_grad_() for x in (k, v, decay, bonus, past[1].clone(), past[2].clone())]
    sums = prefix_states((past[0], *leaves[4:]), k, v, decay)
    expected, ends = wkv_output(sums, k, v, bonus), [x[:, -1] for x in sums]
    torch.testing.assert_close((y, m, a, b), (expected, *ends), atol=1e-9, rtol=1e-9)
    loss = (expected * g).sum() + (ends[1] * wanted[0]).sum() + (ends[2] * wanted[1]).sum()
    torch.testing.assert_close(tuple(grads), torch.autograd.grad(loss, leaves), atol=1e-9, rtol=1e-9)


if importlib.util.find_spec("triton") is not None:
    SCRIPT = Path(__file__).parents[2] / "bench" / "check" / "kernels.py"
    JOBS = re.findall(r'^    "([a-z-]+)": ', SCRIPT.read_text("utf-8"), re.MULTILINE)
    assert JOBS

    @pytest.mark.parametrize("job", JOBS)
    def test_the_kernels_by_the_interpreter(job):
        """Run in a separate process: Triton decides on import how its functions are run."""
        done = subprocess.run(
            [sys.executable, SCRIPT, "--device", "cpu", "--only", job],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize("name", ["retention", "selective_scan", "short_convolution", "wkv"])
    def test_no_kernel_is_compiled_anew_for_the_length_of_a_text(name):
        module = importlib.import_module(f"allyouneed.kernels.triton.{name}")
        text = Path(module.__file__).read_text("utf-8")
        kernels = [one for one in vars(module).values() if hasattr(one, "params") and f"{one.__name__}[" in text]
        sizes = [param for one in kernels for param in one.params if param.name in module.TEXT_SIZES]
        assert sizes and all(param.do_not_specialize for param in sizes)

    def test_attention_is_split_alike_for_all_capacities():
        from allyouneed.kernels.triton.decode_attention import split_config

        for rows, heads in ((1, 12), (3, 8), (64, 12)):
            assert len({split_config(rows, heads, 1, 128 << n) for n in range(1, 8)}) == 1
            assert split_config(rows, heads, 1, 128).shares == 1
