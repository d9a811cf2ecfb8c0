"""A decode step with fewer launches: torch's compiler fuses the operators between our kernels and matrix products.

A step is recorded once: the operators that torch runs, and the calls that launch kernels of ours. Runs of operators
between two launches are compiled (Inductor), each distinct one once, so that all layers of a model share what they have
in common; everything else is called as recorded. States are written in place, and the compiled step is captured in the
same CUDA graph as a plain one. What the compiler refuses, or computes differently from the recorded operators, runs
operator by operator.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.linalg import vector_norm as norm_of
from torch.nn.functional import scaled_dot_product_attention

from allyouneed.errors import UserError
from allyouneed.kernels import intercept_launches
from allyouneed.runtime.cuda.kernels import NarrowLinear
from allyouneed.torch_private import compile_operators, record_operators, replace_tensors

# operators with kernels of their own, which nothing is fused with
LIBRARY: tuple[str, ...] = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_grouped_mm",
    "_scaled_mm",
    "_int_mm",
    "lstm",
    "gru",
)
LIBRARY += ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn", "_thnn", "sort", "topk")
WORTH_COMPILING = 2  # operators that launch something
LARGEST_ERROR = 0.05  # of a compiled run against its operators, relative: half precision is rounded elsewhere

MODES = ("on", "auto", "off")

Run = Callable[..., Sequence[Tensor]]


def compile_mode() -> str:
    """`ALLYOUNEED_COMPILE`: compile every captured step, those that are used for long (`auto`), or none."""
    found = os.environ.get("ALLYOUNEED_COMPILE") or "off"
    if found not in MODES:
        raise UserError(f"unknown ALLYOUNEED_COMPILE {found!r} (allowed: {', '.join(MODES)})")
    return found


class Call(NamedTuple):
    """An operator, or a function that launches kernels, and the tensors that came out of it."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    is_launch: bool

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_of((self.args, self.kwargs))

    @property
    def name(self) -> str:
        """Of an operator, without its library and overload."""
        return str(self.function.name()).split("::")[1].split(".")[0]

    @property
    def is_fused(self) -> bool:
        """An operator of no library. A product with a single row or column is a sum of products."""
        if self.is_launch or not self.function.name().startswith("aten::"):
            return False
        return not self.name.startswith(LIBRARY) or (self.name == "bmm" and is_vector_product(*self.args))

    @property
    def computes(self) -> bool:
        """Whether something is launched."""
        return not self.function.is_view and self.name not in ("empty", "new_empty", "empty_like", "_unsafe_view")

    @property
    def written(self) -> list[Tensor]:
        """Inputs of an operator that it writes in place."""
        arguments = self.function._schema.arguments
        given = [*zip(arguments, self.args, strict=False), *((a, self.kwargs.get(a.name)) for a in arguments)]
        return tensors_of([x for argument, x in given if argument.alias_info and argument.alias_info.is_write])


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    replace_tensors(value, found.append)
    return found


def is_vector_product(a: Tensor, b: Tensor) -> bool:
    return a.shape[1] == 1 or b.shape[2] == 1


def record(step: Callable[[Tensor], Tensor], tokens: Tensor) -> tuple[list[Call], Tensor]:
    """Run a step once: its calls in order, and its result."""
    calls: list[Call] = []
    inside = False  # a function that launches kernels: its operators are a part of it

    def note(function: Any, args: Any, kwargs: Any, found: Any, is_launch: bool = False) -> None:
        if not inside:
            calls.append(Call(function, args, kwargs, tensors_of(found), is_launch))

    def launch(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return function(*args, **kwargs)
        inside = True
        try:
            found = function(*args, **kwargs)
        finally:
            inside = False
        note(function, args, kwargs, found, True)
        return found

    with torch.no_grad(), WrittenOutAttention(), intercept_launches(launch), record_operators(note):
        return calls, step(tokens)


class WrittenOutAttention(NarrowLinear):
    """Attention of one query as operators, so that its mask and sums are fused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention and args[0].shape[-2] == 1:
            return attend_once(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def attend_once(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of one query (…, heads, 1, head_width); zeros where it may see no key."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q.float() * k.float()).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)  # (…, heads, keys)
    if attn_mask is not None:
        mask = attn_mask[..., 0, :]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return ((weights / total)[..., None] * v.float()).sum(-2, keepdim=True).to(v.dtype)


# --- the program ------------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    run: Run
    inputs: list[int]  # values that it reads
    outputs: list[int]
    done: list[int]  # values that nothing reads afterwards


@dataclass
class CompiledStep:
    """Called as the step that it was made of. `compiled`: distinct runs of operators that were compiled; `refused`: why
    others were not."""

    instructions: list[Instruction]
    constants: list[Tensor | None]  # values by number: weights and states; None: computed in a step
    given: int
    result: int
    compiled: int
    refused: list[str] = field(default_factory=list)

    def __call__(self, tokens: Tensor) -> Tensor:
        values: list[Any] = list(self.constants)
        values[self.given] = tokens
        for instruction in self.instructions:
            found = instruction.run(*[values[number] for number in instruction.inputs])
            for number, value in zip(instruction.outputs, found, strict=True):
                values[number] = value
            for number in instruction.done:
                values[number] = None
        result: Tensor = values[self.result]
        return result


def compile_step(step: Callable[[Tensor], Tensor], tokens: Tensor) -> CompiledStep:
    """A step over states that have been allocated; it is run once."""
    calls, result = record(step, tokens)
    groups = group_calls(calls)
    given_before = held_before(calls)
    made = {id(tensor) for call in calls for tensor in call.outputs} - given_before
    states = {storage_of(tensor) for call in calls for tensor in call.inputs if id(tensor) in given_before}
    last: dict[int, int] = {}
    for number, group in enumerate(groups):
        last |= {id(tensor): number for call in group for tensor in call.inputs}
    last[id(result)] = len(groups)
    numbers: dict[int, int] = {}
    constants: list[Tensor | None] = []

    def number_of(tensor: Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(constants)
            constants.append(None if id(tensor) in made else tensor)
        return numbers[id(tensor)]

    given, compiler, instructions = number_of(tokens), Compiler(), []
    with torch.no_grad():
        for number, group in enumerate(groups):
            inputs, outputs = ports(group)
            outputs = [tensor for tensor in outputs if last.get(id(tensor), -1) > number]
            kept = [x for x in inputs if storage_of(x) in states or last[id(x)] > number]
            run = compiler.compile(group, inputs, outputs, kept)
            read, written = [number_of(tensor) for tensor in inputs], [number_of(tensor) for tensor in outputs]
            done = [numbers[id(tensor)] for tensor in inputs if id(tensor) in made and last[id(tensor)] <= number]
            instructions.append(Instruction(run, read, written, done))
    return CompiledStep(instructions, constants, given, number_of(result), compiler.count, compiler.refused)


def held_before(calls: Sequence[Call]) -> set[int]:
    """Tensors that were read before a call returned them, if any did: it wrote them in place."""
    returned: set[int] = set()
    found: set[int] = set()
    for call in calls:
        found |= {id(tensor) for tensor in call.inputs} - returned
        returned |= {id(tensor) for tensor in call.outputs}
    return found


def group_calls(calls: Sequence[Call]) -> list[list[Call]]:
    """Runs of operators that can be fused, and everything else by itself."""
    groups: list[list[Call]] = []
    for call in calls:
        if call.is_fused and groups and groups[-1][-1].is_fused:
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def ports(group: Sequence[Call]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors from outside, and those that are made here."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for call in group:
        inputs |= {id(tensor): tensor for tensor in call.inputs if id(tensor) not in outputs}
        outputs |= {id(tensor): tensor for tensor in call.outputs if id(tensor) not in inputs}
    return list(inputs.values()), list(outputs.values())


# --- compiling --------------------------------------------------------------------------------------------------------


class Compiler:
    """Groups of calls as functions of their inputs to their outputs."""

    def __init__(self) -> None:
        self.known: dict[Any, Run] = {}
        self.count, self.refused = 0, list[str]()

    def compile(
        self, group: Sequence[Call], inputs: Sequence[Tensor], outputs: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> Run:
        """`kept`: inputs that are read after the group, now or in the next step."""
        if not group[0].is_fused:
            return as_called(group[0], inputs, outputs)
        module = graph_of(group, inputs, outputs)
        if sum(call.computes for call in group) < WORTH_COMPILING:
            return module
        written = {storage_of(tensor) for call in group for tensor in call.written}
        key = (str(module.graph), *(description(tensor) for tensor in inputs), overlaps(inputs, written))
        if key not in self.known:
            self.known[key] = self.checked(module, inputs, kept, written)
        return self.known[key]

    def checked(
        self, module: fx.GraphModule, inputs: Sequence[Tensor], kept: Sequence[Tensor], written: set[int]
    ) -> Run:
        """The compiled graph, if it computes the same on these inputs; states are not changed."""
        changed = [tensor for tensor in kept if storage_of(tensor) in written]
        try:
            compiled = compile_operators(module, inputs)
            found, wanted = (outcome(run, inputs, changed, written) for run in (compiled, module))
            for own, other in zip(found, wanted, strict=True):
                if (error := relative_error(own, other)) > LARGEST_ERROR:
                    raise ArithmeticError(f"compiled operators differ by {error:.2g}")
        except Exception as error:
            self.refused.append(f"{type(error).__name__}: {str(error)[:200]}")
            return module
        self.count += 1
        return compiled


def description(tensor: Tensor) -> Any:
    """What a compiled function assumes of an input."""
    aligned = tensor.data_ptr() % 16 == 0
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, aligned


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def overlaps(inputs: Sequence[Tensor], written: set[int]) -> Any:
    """Inputs that share memory which is written, and where: a compiled function assumes it."""
    storages = [storage_of(tensor) for tensor in inputs]
    shared = [(number, s) for number, s in enumerate(storages) if s in written and storages.count(s) > 1]
    return tuple((number, storages.index(s), inputs[number].storage_offset()) for number, s in shared)


def outcome(run: Run, inputs: Sequence[Tensor], changed: Sequence[Tensor], written: set[int]) -> list[Tensor]:
    """Copies of what comes out of a run and of the inputs that it changed; all memory is as before. Inputs that share
    memory (a state, and the view of it that was read) cannot be copied one by one."""
    storages = {storage_of(x): x.untyped_storage() for x in inputs if storage_of(x) in written}
    before = {place: storage.clone() for place, storage in storages.items()}
    try:
        return [tensor.clone() for tensor in [*run(*inputs), *changed]]
    finally:
        for place, storage in storages.items():
            storage.copy_(before[place])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Of floating-point numbers; hashes may differ where two are equal to rounding."""
    if not wanted.is_floating_point() or not wanted.numel():
        return 0.0
    wide = torch.promote_types(wanted.dtype, torch.float32)
    error, size = (norm_of(x.nan_to_num(), dtype=wide) for x in (found - wanted, wanted))
    return float(error / size.clamp(min=1e-6))


class Place(NamedTuple):
    """Of an input among the arguments of a call."""

    number: int


def as_called(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """The call, on other tensors."""
    places = {id(tensor): number for number, tensor in enumerate(inputs)}
    args, kwargs = replace_tensors((call.args, call.kwargs), lambda tensor: Place(places[id(tensor)]))
    wanted = [next(number for number, one in enumerate(call.outputs) if one is tensor) for tensor in outputs]
    function = call.function  # alone: the call holds tensors of the recorded step

    def run(*given: Tensor) -> Sequence[Tensor]:
        found = tensors_of(function(*fill(args, given), **fill(kwargs, given)))
        return [found[number] for number in wanted]

    return run


def fill(value: Any, inputs: Sequence[Tensor]) -> Any:
    if isinstance(value, Place):
        return inputs[value.number]
    if isinstance(value, dict):
        return {key: fill(one, inputs) for key, one in value.items()}
    if isinstance(value, list):
        return [fill(one, inputs) for one in value]
    if isinstance(value, tuple):
        filled = [fill(one, inputs) for one in value]
        return type(value)(*filled) if hasattr(value, "_fields") else tuple(filled)
    return value


def graph_of(group: Sequence[Call], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {id(tensor): graph.placeholder(f"x{number}") for number, tensor in enumerate(inputs)}
    for call in group:
        args, kwargs = replace_tensors((call.args, call.kwargs), lambda tensor: nodes[id(tensor)])
        if call.name == "bmm":
            node = vector_product(graph, *call.args, *args)
        else:
            node = graph.call_function(call.function, tuple(args), dict(kwargs))
        if [str(one.type) for one in call.function._schema.returns] == ["Tensor"]:
            nodes.setdefault(id(call.outputs[0]), node)
        else:
            for number, tensor in enumerate(call.outputs):
                nodes[id(tensor)] = graph.call_function(operator.getitem, (node, number))
    graph.output([nodes[id(tensor)] for tensor in outputs])
    return fx.GraphModule({}, graph)


def vector_product(graph: fx.Graph, a: Tensor, b: Tensor, left: Any, right: Any) -> fx.Node:
    """(n, 1, k) × (n, k, m) or (n, m, k) × (n, k, 1) as a sum of products."""
    if a.shape[1] == 1:
        product = graph.call_function(torch.mul, (graph.call_method("transpose", (left, 1, 2)), right))
        return graph.call_function(torch.sum, (product, 1, True))
    product = graph.call_function(torch.mul, (left, graph.call_method("transpose", (right, 1, 2))))
    return graph.call_function(torch.sum, (product, 2, True))


def fused_step(step: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """The compiled step, or the step itself where it cannot be compiled; a warning says why."""
    try:
        return compile_step(step, tokens)
    except Exception as error:
        warnings.warn(f"decoding without compiled steps: {type(error).__name__}: {error}", stacklevel=2)
        return step
