"""Linear time-invariant state spaces, one per feature (Gu, Goel, Ré 2022, "Efficiently Modeling Long Sequences with
Structured State Spaces", eq. 3-5).

    x_t = Ā x_{t−1} + B̄ u_t        y_t = C x_t        (recurrent form)
    y = K * u, K = (C B̄, C Ā B̄, C Ā² B̄, …)             (convolutional form)

`DiagonalSystem` has a diagonal Ā, `LowRankSystem` a diagonal plus low-rank one. Both give the same three tools:
`columns` Āⁱ B̄, `rows` C Āⁱ, and `carry`, Āⁿ x. The kernel of L tokens of a diagonal system is a product of √L columns
and √L rows; that of the other follows from four such kernels. Both are exact for every L and need no other length than
that of the text; the paper's algorithm 1 finds the same K from its generating function. Tensors: u (batch, features,
time), x (batch, features, N) real, C (channels, features, N).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from allyouneed.nn.ops.power_series import circular_product, fast_length, multiply, one_over, powers

CHUNK = 256  # tokens per step of `run`: its columns and rows are held at once


class System:
    """A discretised state space. `b` (features, n), `c` (channels, features, n): complex with n = N / 2 of N conjugate
    pairs, or real with n = N."""

    def __init__(self, b: Tensor, c: Tensor) -> None:
        self.b, self.c = b, c
        self.chunks: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # chunk length -> what all chunks of it share

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Ā x, with x (batch, features, n)."""

    @abstractmethod
    def columns(self, count: int) -> Tensor:
        """Āⁱ B̄ for i below `count`: (features, n, count)."""

    @abstractmethod
    def rows(self, count: int, doublings: int = 0) -> Tensor:
        """C Ā^{i 2^doublings} for i below `count`: (channels, features, count, n)."""

    @abstractmethod
    def carry(self, x: Tensor, steps: Tensor, most: int) -> Tensor:
        """Ā^steps x for each row's number of steps (batch,), at most `most`."""

    def encode(self, x: Tensor) -> Tensor:
        """The real state (batch, features, N) as this system has it."""
        return x

    def decode(self, x: Tensor) -> Tensor:
        return x

    def real(self, y: Tensor) -> Tensor:
        """Sums over n, with the conjugates that are left out."""
        return y

    def kernel(self, length: int) -> Tensor:
        """K (channels, features, length)."""
        doublings = max(0, (length - 1).bit_length() // 2)
        size = 1 << doublings
        found = self.real(self.rows(-(-length // size), doublings) @ self.columns(size))
        return found.flatten(2)[..., :length]

    def run(self, u: Tensor, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """y (batch, features, time), and the state after each row's last real token. `real` (batch, time) bool is
        left-aligned."""
        x = self.encode(x)
        if u.shape[2] == 1:
            new = self.apply(x) + self.b * u
            x = new if real is None else new.where(real[..., None], x)
            return self.real((self.c[0] * x).sum(-1, keepdim=True)), self.decode(x)
        found = []
        for start in range(0, u.shape[2], CHUNK):
            some = None if real is None else real[:, start : start + CHUNK]
            y, x = self._run_chunk(u[..., start : start + CHUNK], x, some)
            found.append(y)
        return torch.cat(found, 2), self.decode(x)

    def _run_chunk(self, u: Tensor, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        time, device = u.shape[2], u.device
        if time not in self.chunks:
            rows = self.rows(time)[0]  # (features, time, n)
            self.chunks[time] = rows, self.real(rows @ self.b[..., None])[..., 0], self.columns(time).flip(-1)
        rows, kernel, columns = self.chunks[time]
        from_state = self.real((rows @ self.apply(x)[..., None])[..., 0])
        y = convolve(u, kernel) + from_state
        counts = torch.full((len(u),), time, device=device) if real is None else real.sum(1)
        if real is not None:  # right-aligned, after zeros
            index = torch.arange(time, device=device) - (time - counts)[:, None]
            u = u.gather(2, index.clamp(min=0)[:, None].expand_as(u)) * (index >= 0)[:, None]
        added = (columns @ u[..., None].to(x.dtype))[..., 0]
        return y, self.carry(x, counts, time) + added


class DiagonalSystem(System):
    """Ā = exp(`log_a`), complex (features, N / 2)."""

    def __init__(self, log_a: Tensor, b: Tensor, c: Tensor) -> None:
        super().__init__(b, c)
        self.log_a = log_a

    def apply(self, x: Tensor) -> Tensor:
        return self.log_a.exp() * x

    def columns(self, count: int) -> Tensor:
        steps = torch.arange(count, device=self.b.device)
        return self.b[..., None] * (self.log_a[..., None] * steps).exp()

    def rows(self, count: int, doublings: int = 0) -> Tensor:
        steps = torch.arange(count, device=self.b.device) << doublings
        return self.c[:, :, None] * (self.log_a[:, None] * steps[:, None]).exp()

    def carry(self, x: Tensor, steps: Tensor, most: int) -> Tensor:
        return x * (self.log_a * steps[:, None, None]).exp()

    def encode(self, x: Tensor) -> Tensor:
        return torch.complex(*x.chunk(2, -1))

    def decode(self, x: Tensor) -> Tensor:
        return torch.cat((x.real, x.imag), -1)

    def real(self, y: Tensor) -> Tensor:
        return 2 * y.real


class LowRankSystem(System):
    """The bilinear discretisation of A = diag(Λ) − p p*, with conjugate pairs of Λ, p, B and C (Gu et al. 2022, 3.3).

    All arguments hold one of each pair, complex (features, N / 2), C (channels, features, N / 2); `step` (features, 1).
    The system itself is real: states are real and imaginary parts, N in all.
    """

    def __init__(self, step: Tensor, diagonal: Tensor, p: Tensor, b: Tensor, c: Tensor) -> None:
        self.step, self.diagonal, self.p, self.continuous = step, diagonal, p, (b, c)
        self.inverse = 1 / (1 - step / 2 * diagonal)
        self.gain = step / (1 + step * (p.conj() * self.inverse * p).real.sum(-1, keepdim=True))
        super().__init__(_join(self._solve(step * b)), torch.cat((2 * c.real, -2 * c.imag), -1))
        self.powers: list[Tensor] = []  # Ā, Ā², Ā⁴, …: (features, N, N)

    def _solve(self, r: Tensor) -> Tensor:
        """(I − Δ/2 A)⁻¹ r by Woodbury's identity."""
        z = self.inverse * r
        return z - self.gain * (self.p.conj() * z).real.sum(-1, keepdim=True) * self.inverse * self.p

    def apply(self, x: Tensor) -> Tensor:
        z = torch.complex(*x.chunk(2, -1))
        pair = 2 * (self.p.conj() * z).real.sum(-1, keepdim=True)
        return _join(self._solve(z + self.step / 2 * (self.diagonal * z - self.p * pair)))

    def power(self, doublings: int) -> Tensor:
        """Ā^(2^doublings)."""
        if not self.powers:
            features, n = self.b.shape
            units = torch.eye(n, dtype=self.b.dtype, device=self.b.device)[:, None].expand(-1, features, -1)
            self.powers.append(self.apply(units).permute(1, 2, 0))
        while len(self.powers) <= doublings:
            self.powers.append(self.powers[-1] @ self.powers[-1])
        return self.powers[doublings]

    def columns(self, count: int) -> Tensor:
        found, doublings = self.b[..., None], 0
        while found.shape[-1] < count:
            found = torch.cat((found, self.power(doublings) @ found), -1)
            doublings += 1
        return found[..., :count]

    def rows(self, count: int, doublings: int = 0) -> Tensor:
        found = self.c[:, :, None]
        while found.shape[2] < count:
            found = torch.cat((found, found @ self.power(doublings)), 2)
            doublings += 1
        return found[:, :, :count]

    def kernel(self, length: int) -> Tensor:
        """The kernel K by power series in z: with Ā = diag(d) + u v* (Woodbury's identity again),

            C (I − zĀ)⁻¹ B̄ = C E B̄ + z (C E u) (v* E B̄) / (1 − z v* E u),    E = diag(1 / (1 − z d))

        whose terms are kernels of diagonal systems. No matrix of N² elements is needed. In double precision, since the
        first two terms nearly cancel: diag(d) decays slower than Ā."""
        step, (diagonal, p, b, c) = self.step.double(), (x.to(torch.complex128) for x in self.parts)
        inverse = 1 / (1 - step / 2 * diagonal)
        gain = step / (1 + step * (p.conj() * inverse * p).real.sum(-1, keepdim=True))
        z = inverse * step * b
        b = z - gain * (p.conj() * z).real.sum(-1, keepdim=True) * inverse * p
        d, doublings = 2 * inverse - 1, max(0, (length - 1).bit_length() // 2)
        far = d.conj()
        for _ in range(doublings):
            far = far * far
        low, high = powers(d, 1 << doublings), powers(far, -(-length >> doublings))  # (features, size, n)
        # Re Σ left dⁱ right, i = high + low, is a real product: of the conjugates of one side with the other
        left = 2 * torch.stack((*c, p.conj() * inverse), 1).conj()  # (features, channels + 1, n)
        rows = _as_real(left[:, :, None] * high[:, None]).flatten(1, 2)
        found = (rows @ _as_real(right[:, None] * low).mT for right in (b, -gain * inverse * p))
        (*direct, state), (*out, loop) = (
            part.unflatten(1, (left.shape[1], -1)).flatten(2)[..., :length].unbind(1) for part in found
        )  # (features, length) each
        around = multiply(state, one_over(loop))
        kernels = [
            one + nn.functional.pad(multiply(other, around), (1, -1)) for one, other in zip(direct, out, strict=True)
        ]
        return torch.stack(kernels).to(self.step.dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.diagonal, self.p, *self.continuous

    def carry(self, x: Tensor, steps: Tensor, most: int) -> Tensor:
        for doublings in range(most.bit_length()):
            further = (self.power(doublings) @ x[..., None])[..., 0]
            x = further.where((steps >> doublings & 1).bool()[:, None, None], x)
        return x


def convolve(u: Tensor, kernel: Tensor, backward: Tensor | None = None) -> Tensor:
    """y_t = Σ_{s ≤ t} K_{t−s} u_s (+ Σ_{s > t} K'_{s−t−1} u_s) by FFT; u (batch, features, time), kernels (features,
    time)."""
    time = u.shape[-1]
    size = fast_length(2 * time)
    if backward is None:
        return circular_product(u, kernel, size, time)
    later = nn.functional.pad(backward.flip(-1), (size - time, 0))
    return circular_product(u, nn.functional.pad(kernel, (0, size - time)) + later, size, time)


def _as_real(z: Tensor) -> Tensor:
    """(…, n) complex to (…, 2 n)."""
    return torch.view_as_real(z).flatten(-2)


def _join(z: Tensor) -> Tensor:
    return torch.cat((z.real, z.imag), -1)


def hippo(states: int) -> tuple[Tensor, Tensor, Tensor]:
    """Λ, p and B of HiPPO-LegS (eq. 2, theorem 1), one of each conjugate pair: A = V (Λ − p p*) V*, complex128
    (states / 2,)."""
    n = torch.arange(states, dtype=torch.double)
    b, p = (2 * n + 1).sqrt(), (n + 0.5).sqrt()
    both = torch.outer(b, b)
    skew = (both.triu(1) - both.tril(-1)) / 2  # A + p pᵀ + ½ I
    values, vectors = torch.linalg.eigh(-1j * skew)  # ascending, in pairs ±
    half = states // 2
    basis = vectors[:, half:].conj().T
    return -0.5 + 1j * values[half:], basis @ p.to(basis.dtype), basis @ b.to(basis.dtype)
