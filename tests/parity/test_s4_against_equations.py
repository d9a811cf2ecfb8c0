"""S4 and S4D against the papers' equations, written out in double precision, feature by feature and token by token."""

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.state_space.s4 import S4
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.state_space import LowRankSystem, hippo
from any_part import build
from parity import difference

WIDTH, STATES, VOCAB = 4, 6, 11


def pairs(x):
    """Both of each conjugate pair, from (…, N / 2, 2)."""
    one = torch.complex(x[..., 0], x[..., 1])
    return torch.cat((one, one.conj()), -1)


def discretised(module, feature):
    """Ā and B̄ of one feature: the bilinear rule (S4, eq. 3), or zero-order hold (S4D, eq. 4)."""
    step = module.log_step[feature].exp()
    values = pairs(torch.stack((-module.log_decay[feature].exp(), module.frequency[feature]), -1))
    b, eye = pairs(module.b[feature]), torch.eye(len(values), dtype=torch.complex128)
    if module.p is None:
        return torch.diag((step * values).exp()), ((step * values).exp() - 1) / values * b
    p = pairs(module.p[feature])
    a = torch.diag(values) - torch.outer(p, p.conj())
    inverse = torch.linalg.inv(eye - step / 2 * a)
    return inverse @ (eye + step / 2 * a), inverse @ (step * b)


def scan(module, u, channel=0):
    """Eq. 3, a recurrence: C x_t of every token, u (time, width)."""
    found = []
    for feature in range(u.shape[1]):
        a, b = discretised(module, feature)
        c, x, outputs = pairs(module.c[channel, feature]), torch.zeros(len(b), dtype=torch.complex128), []
        for value in u[:, feature]:
            x = a @ x + b * value
            outputs.append((c * x).sum().real)
        found.append(torch.stack(outputs))
    return torch.stack(found, 1)


def closed(module, y, u):
    y = torch.nn.functional.gelu(y + module.skip * u)
    values, gates = (y @ module.out.weight.T + module.out.bias).chunk(2, -1)
    return values * gates.sigmoid()


def later(module, u):
    """The second kernel, from the end, over the tokens after each."""
    return torch.cat((scan(module, u.flip(0), 1).flip(0)[1:], torch.zeros_like(u[:1])))


@pytest.mark.parametrize("keys", [{}, {"matrix": "diagonal"}, {"sees": "around"}], ids=str)
def test_outputs_and_gradients_are_those_of_the_recurrence(keys, record_difference):
    torch.manual_seed(0)
    module = S4(state=STATES, **keys).build(Common(width=WIDTH)).double()
    with torch.no_grad():
        module.log_step.add_(2)  # steps up to 0.7: the state changes within the text
    u = torch.randn(37, WIDTH, dtype=torch.double, requires_grad=True)
    found = module(u[None], Context(TokenLayout(torch.arange(37)[None], start=0)))[0]
    mixed = scan(module, u) + (later(module, u) if keys.get("sees") == "around" else 0)
    expected = closed(module, mixed, u)
    weights = [u, *module.parameters()]
    own, theirs = (torch.autograd.grad(y.sin().sum(), weights) for y in (found, expected))
    outputs = difference(found, expected)
    gradients = max(difference(one, other) for one, other in zip(own, theirs, strict=True))
    assert outputs < 1e-10 and gradients < 1e-8
    record_difference("S4", "the papers' equations", outputs, gradients)


def test_the_preset_narrowed(record_difference):
    given = preset_tree("s4") | {"vocab": VOCAB, "width": WIDTH, "decoder": "mix, feed"}
    for layer in given["layers"].values():
        layer["mixer"] |= {"state": STATES}
    given["layers"]["feed"]["channel"] |= {"hidden": 7}
    model = build(parse(Model, given))
    tokens = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(0))
    x = model.embed.tokens.weight[tokens]

    def norm(part, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], part.weight, part.bias)

    for block in model.decoder.blocks:
        u = norm(block.wiring.norms[0], x)
        x = x + closed(block.sublayers["mixer"], scan(block.sublayers["mixer"], u), u)
    feed = block.sublayers["channel"]
    inner = norm(block.wiring.norms[1], x) @ feed.up.weight.T + feed.up.bias
    x = x + torch.nn.functional.gelu(inner) @ feed.down.weight.T + feed.down.bias
    expected = norm(model.decoder.end, x) @ model.embed.tokens.weight.T
    found = model.logits(Batch(Rows(tokens[None])))[0]
    own, theirs = (torch.autograd.grad(y.sin().sum(), list(model.parameters())) for y in (found, expected))
    outputs = difference(found, expected)
    gradients = max(difference(one, other) for one, other in zip(own, theirs, strict=True))
    assert outputs < 1e-9 and gradients < 1e-8
    record_difference("S4", "the papers' equations", outputs, gradients)


def test_the_initial_matrix_is_hippo_and_its_kernel_that_of_the_generating_function():
    """Eq. 2 in its own basis: A lower triangular, B = √(2n + 1). Kernel: C Āⁱ B̄ (eq. 5), and its generating function at
    the roots of unity, Σ K_i zⁱ = C (I − Ā^L z^L) (I − Ā z)⁻¹ B̄ (lemma C.2, algorithm 1)."""
    states, length, step = 8, 50, 0.07
    n = torch.arange(states, dtype=torch.double)
    root = (2 * n + 1).sqrt()
    a = -(torch.outer(root, root).tril(-1) + torch.diag(n + 1))
    eye = torch.eye(states, dtype=torch.double)
    left = torch.linalg.inv(eye - step / 2 * a)
    a_bar, b_bar = left @ (eye + step / 2 * a), left @ (step * root)
    c = torch.randn(states, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([c @ torch.linalg.matrix_power(a_bar, i) @ b_bar for i in range(length)])

    values, p, b = hippo(states)
    skew = a + torch.outer((n + 0.5).sqrt(), (n + 0.5).sqrt()) + eye / 2
    basis = torch.linalg.eigh(-1j * skew)[1][:, states // 2 :]
    basis = basis * (b / (basis.conj().T @ (root + 0j))).conj()  # an eigenvector is known up to its phase
    steps = torch.full((1, 1), step, dtype=torch.double)
    ours = LowRankSystem(steps, values[None], p[None], b[None], ((c + 0j) @ basis)[None, None])
    torch.testing.assert_close(ours.kernel(length)[0, 0], expected, atol=1e-12, rtol=0)

    z = torch.exp(-2j * torch.pi * torch.arange(length, dtype=torch.double) / length)  # z^L = 1
    last = c @ (eye - torch.linalg.matrix_power(a_bar, length)) + 0j
    spectrum = torch.stack([last @ torch.linalg.inv(eye - a_bar * one) @ (b_bar + 0j) for one in z])
    torch.testing.assert_close(torch.fft.ifft(spectrum).real, expected, atol=1e-12, rtol=0)
