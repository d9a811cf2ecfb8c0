"""A compiled decode step computes what the step does that it was recorded from, for rows of unequal length and beams
that are reordered. (On a GPU: bench/check_gpu.py, bench/family_gpu.py.)"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allyouneed
from allyouneed.errors import UserError
from allyouneed.kernels import launches
from allyouneed.runtime.cuda import compiled_step
from allyouneed.runtime.cuda.compiled_step import CompiledStep, compile_mode, compile_step, fused_step, record
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.static_cache import StaticStates
from any_part import case, first_of_each_kind
from static_steps import SOURCES, decode_both

MIXERS = first_of_each_kind(("mixer",))
QUICK = [name for name in MIXERS if name.split()[1] in ("lsh", "longnet", "mixed-chunk", "infini", "branches", "mamba")]
KERNELS = Path(allyouneed.__file__).parent / "kernels" / "triton"
NOT_IN_STEPS = ("fused_backward.py", "cross_entropy.py", "topk.py")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Recorded operators run one by one; returns how many are in each run of them."""
    sizes: list[int] = []

    def note(module: Any, inputs: Any) -> Any:
        sizes.append(len(module.graph.nodes))
        return module

    monkeypatch.setattr(compiled_step, "compile_operators", note)
    return sizes


def check(name: str) -> CompiledStep:
    made: list[CompiledStep] = []

    def compiled(step: Callable[[Tensor], Tensor], tokens: Tensor) -> CompiledStep:
        made.append(compile_step(step, tokens))
        return made[0]

    model = case(name)
    with torch.no_grad():
        decoded = decode_both(model, model, SOURCES, lambda step: step, compiled)
    torch.testing.assert_close(decoded.found, decoded.wanted, atol=2e-6, rtol=0)
    assert decoded.before == decoded.after
    return made[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_recorded_step_equals_the_plain_path(name: str, uncompiled: list[int]) -> None:
    found = check(name)
    assert found.compiled == len(uncompiled) > 0 and not found.refused


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MIXERS if not name.startswith("mixer synchronous")])
def test_a_compiled_step_equals_the_plain_path(name: str) -> None:
    assert not check(name).refused


def test_layers_of_one_kind_are_compiled_once(uncompiled: list[int]) -> None:
    counts = []
    for layers, mode in ((2, torch.no_grad), (5, torch.no_grad), (2, torch.inference_mode)):
        keys = {"repeat": layers, "wiring": "pre-norm", "mixer": {"kind": "gau", "pattern": "causal", "key_width": 4}}
        model = allyouneed.build({"kind": "decoder", "vocab": 20, "width": 8, "decoder": [keys]}).eval()
        with mode():
            step, tokens = DecodeStep(model, StaticStates(model, 2, 1, 16, 0)), torch.tensor([3, 4])
            step(tokens)
            counts.append(compile_step(step, tokens).compiled)
    assert counts[0] == counts[1] == counts[2]


def test_what_launches_kernels_is_called_as_it_was(uncompiled: list[int]) -> None:
    """Its own operators are no part of the recording, and its results are not constants."""
    state = torch.zeros(2)

    @launches
    def kernel(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state += x
        return x * 2, state

    def step(tokens: Tensor) -> Tensor:
        x = tokens.float() + 1
        doubled, sums = kernel(x.sqrt(), state)
        return (doubled + sums).exp().log()

    tokens = torch.tensor([3, 8])
    calls, _ = record(step, tokens)
    assert [call.is_launch for call in calls].count(True) == 1
    state.zero_()
    compiled = compile_step(step, tokens)
    state.zero_()
    found = [compiled(tokens + n).clone() for n in range(3)]
    state.zero_()
    torch.testing.assert_close(found, [step(tokens + n) for n in range(3)])


def test_compiled_operators_are_tried_on_inputs_that_share_memory_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An LSTM reads a view of its state before a product of matrices and writes the state after it."""
    state, weight = torch.ones(2, 3), torch.eye(3) * 2

    def step(tokens: Tensor) -> Tensor:
        old = state[0]
        product = tokens[:, None].float() * old @ weight
        product.sin_()  # read by nothing later
        state.copy_((old + product).cos())
        return (product + state).exp()

    def storages(tensors: Sequence[Tensor]) -> list[int]:
        return [[one.data_ptr() for one in tensors].index(tensor.data_ptr()) for tensor in tensors]

    def compiler(module: Any, inputs: Any) -> Any:
        def run(*given: Tensor) -> Any:
            assert storages(given) == storages(inputs)
            return module(*given)

        return run

    monkeypatch.setattr(compiled_step, "compile_operators", compiler)
    tokens = torch.tensor([3, 8])
    compiled = compile_step(step, tokens)
    assert compiled.compiled and not compiled.refused
    after = state.clone()
    state.fill_(1)
    step(tokens)
    torch.testing.assert_close(state, after)  # one step was run, and the check changed nothing


def test_a_compiler_that_fails_or_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(tokens: Tensor) -> Tensor:
        return tokens.float().sin().cos()

    tokens = torch.tensor([1, 2])
    wanted = step(tokens)
    for wrong in (lambda module, inputs: lambda *given: [x + 1 for x in module(*given)], None):
        monkeypatch.setattr(compiled_step, "compile_operators", wrong)
        found = compile_step(step, tokens)
        assert found.compiled == 0 and len(found.refused) == 1
        torch.testing.assert_close(found(tokens), wanted)

    def refuses(tokens: Tensor) -> Tensor:
        raise RuntimeError("no")

    with pytest.warns(UserWarning, match="without compiled steps: RuntimeError: no"):
        assert fused_step(refuses, tokens) is refuses


def test_the_mode_is_one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLYOUNEED_COMPILE", "always")
    with pytest.raises(UserError, match=r"unknown ALLYOUNEED_COMPILE 'always' \(allowed: on, auto, off\)"):
        compile_mode()
    monkeypatch.delenv("ALLYOUNEED_COMPILE")
    assert compile_mode() == "off"


def test_every_function_that_launches_a_kernel_says_so() -> None:
    """Otherwise a recorded step would leave its kernel out."""
    for path in sorted(KERNELS.glob("*.py")):
        if path.name in NOT_IN_STEPS:
            continue
        functions = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        inside = {node.name for node in classes if _launches(node)} | {n for n, f in functions.items() if _launches(f)}
        for _ in range(3):  # functions that call those
            inside |= {name for name, node in functions.items() if inside & _names(node)}
        for name in inside & {name for name in functions if not name.startswith("_")}:
            decorators = [ast.unparse(one) for one in functions[name].decorator_list]
            assert "launches" in decorators, f"{path.name}: {name} launches a kernel"


def _launches(node: ast.AST) -> bool:
    """`kernel[grid](…)`"""
    return any(isinstance(one, ast.Call) and isinstance(one.func, ast.Subscript) for one in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
