"""A family of models as a table: their config as our tree, and for each of our weights those of theirs it is made of.

A line of the table reads `ours = theirs`. `{n}` stands for a number that both sides share, `*` for `weight` and `bias`:

    decoder.blocks.{n}.sublayers.mixer.out.* = model.layers.{n}.self_attn.o_proj.*

Several of theirs are joined row by row with `+`, and after a `|` come changes by name (`T` transposes; a family may
have its own):

    decoder.blocks.{n}.sublayers.mixer.qkv.* = h.{n}.attn.q.* + h.{n}.attn.k.* + h.{n}.attn.v.*
    decoder.blocks.{n}.sublayers.mixer.qkv.weight = h.{n}.attn.c_attn.weight |T

`name[{e}]` takes one entry of a stacked tensor. What is missing, left over or of the wrong shape is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.nn.model import Model

Theirs = Mapping[str, Any]  # their config
Weights = Mapping[str, Tensor]
Change = Callable[[Tensor, Mapping[str, Any]], Tensor]  # (their tensor, their config) -> what ours is made of
TRANSPOSE: Change = lambda tensor, config: tensor.T  # noqa: E731  # a table entry, not a function to call by name


@dataclass(frozen=True)
class Term:
    """One tensor of theirs, by a name that may hold `{n}` and `*`."""

    name: str
    entry: str | None
    changes: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Term:
        name, *changes = (word.strip() for word in text.split("|"))
        found = re.fullmatch(r"(.+?)(?:\[(.+)\])?", name)
        assert found is not None
        return cls(found[1], found[2], tuple(changes))


@dataclass(frozen=True)
class Rule:
    ours: re.Pattern[str]
    theirs: tuple[Term, ...]

    @classmethod
    def of(cls, line: str) -> Rule:
        ours, _, theirs = line.partition(" = ")
        escaped = re.escape(ours.strip()).replace(r"\*", "(?P<kind>weight|bias)")
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", escaped)
        return cls(re.compile(pattern), tuple(Term.of(term) for term in theirs.split(" + ")))


@dataclass(frozen=True)
class Family:
    """`tree(config)` gives our model's tree; `lines` is the table; `ignore` names weights of theirs that say nothing
    (buffers, copies of tied matrices) by patterns with `*`. `before(config, weights)` gives both as the table expects
    them, where names are old or where only the weights tell what a config leaves open."""

    name: str
    tree: Callable[[Mapping[str, Any]], dict[str, Any]]
    lines: str | Callable[[Mapping[str, Any]], str]
    ignore: Sequence[str] = ()
    changes: Mapping[str, Change] = field(default_factory=dict)
    before: Callable[[Theirs, Weights], tuple[Theirs, Weights]] | None = None

    def rules(self, config: Mapping[str, Any]) -> list[Rule]:
        text = self.lines if isinstance(self.lines, str) else self.lines(config)
        return [Rule.of(line) for line in text.splitlines() if " = " in line]

    def convert(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
        """Our model with their weights."""
        if self.before is not None:
            config, weights = self.before(config, weights)
        model = parse(Model, self.tree(config), self.name).build()  # type: ignore[type-abstract]
        self.fill(model, config, weights)
        return model.eval()

    def fill(self, model: nn.Module, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        rules, used, problems = self.rules(config), set[str](), []
        once = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if once[id(tensor)] == name}
        with torch.no_grad():
            for name, tensor in own.items():
                names, found = self._made_of(name, rules, config, weights)
                used |= set(names)
                missing = [theirs for theirs in names if theirs not in weights]
                if not names:
                    problems.append(f"{name}: the table of {self.name} does not say what it is made of")
                elif missing:
                    problems.append(f"{', '.join(missing)}: missing (for our {name})")
                elif found is not None and found.shape != tensor.shape:
                    problems.append(f"{', '.join(names)}: {tuple(found.shape)}, our {name} is {tuple(tensor.shape)}")
                elif found is not None:
                    tensor.copy_(found)
        over = [name for name in weights if name not in used and not any(fnmatchcase(name, p) for p in self.ignore)]
        problems += [f"{name}: left over" for name in over]
        if problems:
            raise UserError(f"{self.name}: the weights do not fit\n  " + "\n  ".join(problems))

    def _made_of(
        self, name: str, rules: Sequence[Rule], config: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[list[str], Tensor | None]:
        """The names of theirs that make this weight of ours, and the weight; None where some are missing."""
        for rule in rules:
            if match := rule.ours.fullmatch(name):
                filled = match.groupdict()
                names = [_filled(term.name, filled) for term in rule.theirs]
                if any(theirs not in weights for theirs in names):
                    return names, None
                parts = [
                    self._changed(weights[theirs], term, filled, config)
                    for theirs, term in zip(names, rule.theirs, strict=True)
                ]
                return names, torch.cat(parts) if len(parts) > 1 else parts[0]
        return [], None

    def _changed(self, tensor: Tensor, term: Term, filled: Mapping[str, str], config: Mapping[str, Any]) -> Tensor:
        if term.entry is not None:
            tensor = tensor[int(_filled(term.entry, filled))]
        for name in term.changes:
            tensor = TRANSPOSE(tensor, config) if name == "T" else self.changes[name](tensor, config)
        return tensor


def _filled(name: str, values: Mapping[str, str]) -> str:
    text = name.replace("*", values.get("kind") or "*")
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], text)
