"""Names of the values inside a model ("sites"), the same in Python, in documents and on the page.

    embed, source_embed (+ .tokens, .positions)     vectors of the input
    encoder.0.in                                    the stream before block 0
    encoder.0.mixer.norm                            the norm of a sub-layer (post_norm: the second one of a sandwich)
    encoder.0.mixer, .cross, .channel               a sub-layer's output, before the residual addition
    encoder.0.mixer.q .k .v .scores .weights .heads inside attention; other mixers have v and heads = M v
    encoder.0.channel.hidden, .router               inside a feed-forward network, of experts
    encoder.0                                       the stream after block 0; .2: its second tensor, if it has two
    encoder.end                                     the norm that closes the stack
    head                                            the output of the head

A stack has the name of the model's field: encoder, decoder; first, second (YOCO); image.encoder, text.encoder (CLIP).
A value that is computed several times in a run has `@1`, `@2`, … after its name, from the second time on.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

BLOCK = re.compile(r"(?P<stack>.*?)\.blocks\.(?P<number>\d+)(?:\.(?P<rest>.*))?")


class SiteNames:
    """Names of the modules of a model. `scope`: the blocks that are running, the innermost last."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.renamed: dict[int, str] = {}
        self.scope: list[tuple[str, int]] = []
        self.norms: dict[str, str] = {}
        for path, module in model.named_modules():
            if hasattr(module, "sublayers") and hasattr(module, "wiring"):
                self._name_norms(path, module)

    def _name_norms(self, path: str, block: Any) -> None:
        """Norms of a wiring in the order of the sub-layers: one for all, one each or two each."""
        norms, sublayers = list(getattr(block.wiring, "norms", ())), list(block.sublayers)
        each = len(norms) // len(sublayers)
        for number in range(len(norms)):
            if each * len(sublayers) == len(norms):
                name = sublayers[number // each] + (".norm" if number % each == 0 else ".post_norm")
            else:
                name = "norm" if len(norms) == 1 else f"norm.{number}"
            self.norms[f"{path}.wiring.norms.{number}"] = name

    def of(self, part: Any, inner: str = "") -> str | None:
        """The name of a value that a part offers; None for parts that are no module of the model."""
        if id(part) in self.renamed:
            base = self.renamed[id(part)] if inner else self.renamed.pop(id(part))
        elif (path := self.paths.get(id(part))) is None:
            return None
        else:
            base = self._site(path)
        return ".".join(filter(None, (base, inner)))

    def site_of(self, part: Any) -> str | None:
        """The name of a module's output, without using up a name that its next call has."""
        path = self.paths.get(id(part))
        return None if path is None else self._site(path)

    def block(self, stack: Any, number: int) -> tuple[str, int]:
        return self.paths[id(stack)], number

    def _site(self, path: str) -> str:
        """The path of a module without the names of containers. Blocks that share weights have the path of the first
        one: the number is that of the running block."""
        found = BLOCK.fullmatch(path)
        if found is None:
            return path
        stack, number = found["stack"], int(found["number"])
        if self.scope and self.scope[-1][0] == stack:
            number = self.scope[-1][1]
        rest = self.norms.get(path) or (found["rest"] or "").removeprefix("sublayers.").removeprefix("wiring.")
        return ".".join(filter(None, (stack, str(number), rest)))


def split_stream(stream: Any) -> list[Tensor]:
    """The tensors of a stream: one, or two with ResiDual and reversible wirings."""
    if isinstance(stream, Tensor):
        return [stream]
    if isinstance(stream, tuple | list):
        return [value for value in stream if isinstance(value, Tensor)]
    assert is_dataclass(stream)
    return [getattr(stream, name) for name in _tensor_fields(stream)]


def join_stream(stream: Any, tensors: list[Tensor]) -> Any:
    """The same stream with other tensors."""
    if isinstance(stream, Tensor):
        return tensors[0]
    if isinstance(stream, tuple | list):
        left = iter(tensors)
        return type(stream)(next(left) if isinstance(value, Tensor) else value for value in stream)
    return replace(stream, **dict(zip(_tensor_fields(stream), tensors, strict=True)))


def _tensor_fields(stream: Any) -> list[str]:
    return [field.name for field in fields(stream) if isinstance(getattr(stream, field.name), Tensor)]
