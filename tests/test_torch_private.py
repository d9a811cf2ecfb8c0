"""The private torch APIs in use exist in the installed torch and compute what their plain definitions do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import allyouneed
from allyouneed import torch_private

SOURCE = Path(allyouneed.__file__).parent
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_version__)|\btorch\.ops\.|from torch(\.\w+)*\._|import torch(\.\w+)*\._|_aten\("
)
VERSION = str(torch.__version__)  # a plain string, which xdist can send


@pytest.fixture(autouse=True)
def _say_the_version(record_property: pytest.FixtureRequest) -> None:
    record_property("torch", VERSION)  # type: ignore[operator]


def test_no_other_module_uses_private_torch() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRIVATE.search(line.split("#")[0])
    ]
    assert not found


@pytest.mark.parametrize(
    "name",
    [
        "ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "_int_mm",
        "_scaled_mm",
        "_foreach_norm",
        "_foreach_lerp_",
        "_make_per_channel_quantized_tensor",
        "cpu._is_vnni_supported",
        "ops.quantized.linear_prepack",
        "ops.quantized.linear_dynamic",
        "ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32",
    ],
)
def test_this_torch_has_every_private_api(name: str) -> None:
    """Where one is missing the fallback below runs, slower: this test names it and the version."""
    found: object = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    assert found is not None, f"torch {VERSION} has no torch.{name}"


def given(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_flash_attention_on_cpu_and_its_gradients(masked: bool, kv_heads: int) -> None:
    q, k, v = given(3, 4, 7, 10), given(3, kv_heads, 9, 10), given(3, kv_heads, 9, 10)
    mask = None
    if masked:
        mask = torch.zeros(3, 1, 7, 9).masked_fill(given(3, 1, 7, 9) > 0.5, -1e9)
    out, lse = torch_private.cpu_flash_attention(q, k, v, mask, 0.3)
    expected, sums = torch_private.plain_attention(q, k, v, mask, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, sums, rtol=1e-5, atol=1e-5)
    if kv_heads != 4:
        return
    gradient = given(3, 4, 7, 10).flip(0)
    grads = torch_private.cpu_flash_attention_backward(gradient, q, k, v, out, lse, mask, 0.3)
    plain = torch_private.plain_attention_backward(gradient, q, k, v, out, lse, mask, 0.3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch_private.plain_attention(*leaves, mask, 0.3)[0].backward(gradient)
    for found, definition, leaf in zip(grads, plain, leaves, strict=True):
        torch.testing.assert_close(found, definition, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(definition, leaf.grad, rtol=1e-4, atol=1e-5)


def test_integer_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((17, 64), (64, 24)))
    expected = (x.long() @ y.long()).int()
    assert torch.equal(torch_private.int8_matmul(x, y), expected)
    monkeypatch.delattr(torch, "_int_mm")
    assert torch.equal(torch_private.int8_matmul(x, y), expected)


def test_norms_of_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [given(3, 4), given(11), given(2, 2, 2)]
    expected = torch.stack([tensor.norm() for tensor in tensors])
    torch.testing.assert_close(torch.stack(torch_private.tensor_norms(tensors)), expected)
    monkeypatch.delattr(torch, "_foreach_norm")
    torch.testing.assert_close(torch.stack(torch_private.tensor_norms(tensors)), expected)


def test_moving_towards_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, others = [given(3), given(2, 4)], [given(3), given(2, 4)]
    expected = [tensor + 0.25 * (other - tensor) for tensor, other in zip(tensors, others, strict=True)]
    for _ in range(2):
        moved = [tensor.clone() for tensor in tensors]
        torch_private.move_towards(moved, others, 0.25)
        torch.testing.assert_close(moved, expected)
        monkeypatch.delattr(torch, "_foreach_lerp_", raising=False)


@pytest.mark.skipif(not torch_private.has_fbgemm(), reason="this torch has no FBGEMM")
def test_packed_8_bit_linear_maps() -> None:
    codes = torch.randint(-127, 128, (24, 32), dtype=torch.int8)
    step, bias = given(24).abs() / 100 + 1e-3, given(24)
    packed, bare = torch_private.pack_linear(codes, step, (bias, None))
    x = given(1, 32)
    dynamic = torch_private.quantized_operator("linear_dynamic")
    weight = codes.float() * step[:, None]
    for one, extra in ((packed, bias), (bare, 0.0)):
        expected = x @ weight.T + extra
        error = (dynamic(x, one, not torch_private.has_vnni()) - expected).abs().max()
        assert error < 0.05 * expected.abs().max()


def test_vnni_as_the_processor_says() -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists():
        pytest.skip("no /proc/cpuinfo")
    assert torch_private.has_vnni() == ("avx512_vnni" in flags.read_text())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_network_lists_new_weights_once(kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[nn.RNNBase] = []  # on a GPU, listing them moves them
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: moved.append(self))
    rnn, x = kind(4, 3, batch_first=True), given(2, 5, 4)
    rnn(x)
    for name, weight in list(rnn.named_parameters()):
        rnn._parameters[name] = nn.Parameter(2 * weight.detach())
    moved.clear()
    torch_private.settle_rnn_weights(rnn)
    assert moved == [rnn]
    other = kind(4, 3, batch_first=True)
    other.load_state_dict(rnn.state_dict())
    moved.clear()
    torch.testing.assert_close(rnn(x)[0], other(x)[0])
    assert not moved


def test_the_recompile_limit_only_rises() -> None:
    import torch._dynamo.config as dynamo

    before = dynamo.recompile_limit
    torch_private.raise_recompile_limit(before + 3)
    torch_private.raise_recompile_limit(1)
    assert dynamo.recompile_limit == before + 3
    dynamo.recompile_limit = before


def test_a_constant_to_the_compiler_is_what_torch_marks() -> None:
    ours, theirs = torch_private.constant_to_the_compiler(lambda: 0), torch.compiler.assume_constant_result(lambda: 0)
    assert vars(ours) == vars(theirs) != {}
