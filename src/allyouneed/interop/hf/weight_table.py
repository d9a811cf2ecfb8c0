"""A family of models as a table: their config as our tree, and for each of our weights those of theirs it is made of.

A line of the table reads `ours = theirs`. `{n}` stands for a number that both sides share, `*` for `weight` and `bias`:

    decoder.blocks.{n}.sublayers.mixer.out.* = model.layers.{n}.self_attn.o_proj.*

Several of theirs are joined row by row with `+`, and after a `|` come changes by name (`T` transposes; a family may
have its own):

    decoder.blocks.{n}.sublayers.mixer.qkv.* = h.{n}.attn.q.* + h.{n}.attn.k.* + h.{n}.attn.v.*
    decoder.blocks.{n}.sublayers.mixer.qkv.weight = h.{n}.attn.c_attn.weight |T

`name[{e}]` takes one entry of a stacked tensor. What is missing, left over or of the wrong shape is reported at once.
The same lines are read from right to left (`convert`) and from left to right (`write`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import parse, tree_of
from allyouneed.errors import UserError
from allyouneed.interop.hf.config_writer import Said, differences, meaning
from allyouneed.mapped import give_back
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model

Theirs = Mapping[str, Any]  # their config
Weights = Mapping[str, Tensor]
Turn = Callable[[Tensor, Theirs], Tensor]
Step = Callable[[Theirs, Weights], tuple[Theirs, Weights]]


@dataclass(frozen=True)
class Change:
    """`there` makes what ours is made of from a tensor of theirs, `back` undoes it; both may look at their config."""

    there: Turn
    back: Turn


ROUNDING = 1_000_000  # parameters of small models that may be made of nothing, such as biases of zero
TRANSPOSE = Change(lambda tensor, config: tensor.t(), lambda tensor, config: tensor.t())


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

    def filled(self, values: Mapping[str, str]) -> Term:
        entry = None if self.entry is None else _filled(self.entry, values)
        return Term(_filled(self.name, values), entry, self.changes)


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
class Alike:
    """Models that compute the same, of which a family can say one: its config and, with its weights, the model."""

    config: Callable[[Model], Model]
    model: Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Family:
    """`tree(config)` gives our model's tree, `back(said)` their config from our tree (without token ids); `lines` is
    the table. Weights of theirs that ours has no use for, by patterns with `*`: `ignore` names those that say nothing
    (buffers, copies of tied matrices), `spare` those that do (BERT's pooler), which a round trip has to keep.

    `before(config, weights)` gives both as the table expects them, where names are old or where only the weights tell
    what a config leaves open; `after` makes files of theirs again from what the table and `back` give. `alike` puts a
    model of ours into words that they have too, where it computes the same.
    """

    name: str
    tree: Callable[[Theirs], dict[str, Any]]
    lines: str | Callable[[Theirs], str]
    ignore: Sequence[str] = ()
    changes: Mapping[str, Change] = field(default_factory=dict)
    before: Step | None = None
    spare: Sequence[str] = ()
    back: Callable[[Said], Theirs] | None = None
    after: Step | None = None
    alike: Alike | None = None

    def rules(self, config: Theirs) -> list[Rule]:
        text = self.lines if isinstance(self.lines, str) else self.lines(config)
        return [Rule.of(line) for line in text.splitlines() if " = " in line]

    # --- theirs as ours -----------------------------------------------------------------------------------------------

    def convert(
        self, config: Theirs, weights: Weights, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
    ) -> nn.Module:
        """Our model with their weights: taken as they are, not copied, where ours is one of theirs unchanged. They keep
        their precision unless one is asked for."""
        if self.before is not None:
            config, weights = self.before(config, weights)
        ours = self.config(config)
        there, asked = sum(tensor.numel() for tensor in weights.values()), ours.cost().parameters
        if asked > 2 * there + ROUNDING:
            raise UserError(
                f"{self.name}: the config speaks of {asked:,} parameters, but there are {there:,}; it is not that of "
                f"these weights"
            )
        model = meta_model(ours)
        self.fill(model, config, weights, dtype, device)
        return model.eval()

    def config(self, config: Theirs) -> Model:
        """Ours, from theirs as `before` gives it."""
        return parse(Model, self.tree(config), self.name)  # type: ignore[type-abstract]

    def fill(
        self,
        model: nn.Module,
        config: Theirs,
        weights: Weights,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        used, problems, ready = set[str](), list[str](), dict[str, Tensor]()
        for name, tensor, terms in self._lines_of(model, config):
            names = [term.name for term in terms]
            used |= set(names)
            missing = [theirs for theirs in names if theirs not in weights]
            if not names:
                problems.append(f"{name}: the table of {self.name} does not say what it is made of")
            elif missing:
                problems.append(f"{', '.join(missing)}: missing (for our {name})")
            else:
                found = self._made(terms, config, weights, tensor.shape)
                if isinstance(found, str):
                    problems.append(f"{', '.join(names)}: {found}, our {name} is {tuple(tensor.shape)}")
                elif not problems:
                    ready[name] = found.to(device, dtype if found.is_floating_point() else None).contiguous()
                    if ready[name].data_ptr() != found.data_ptr():
                        give_back(found)
        over = [name for name in weights if name not in used and not _any(name, (*self.ignore, *self.spare))]
        problems += [f"{name}: left over" for name in over]
        if problems:
            raise UserError(f"{self.name}: the weights do not fit\n  " + "\n  ".join(problems))
        assign_weights(model, ready)

    def unused(self, config: Theirs, weights: Weights) -> dict[str, Tensor]:
        """What our model has no use for and a round trip has to keep, by the names that `write` expects."""
        if self.before is not None:
            config, weights = self.before(config, weights)
        model = meta_model(self.config(config))
        used = {term.name for _, _, terms in self._lines_of(model, config) for term in terms}
        return {name: weights[name] for name in weights if name not in used and _any(name, self.spare)}

    def _lines_of(self, model: nn.Module, config: Theirs) -> Iterator[tuple[str, Tensor, list[Term]]]:
        """Each weight of ours, by the first of its names, and what it is made of: nothing where the table is silent."""
        rules = self.rules(config)
        state = model.state_dict(keep_vars=True)
        once = {id(tensor): name for name, tensor in reversed(state.items())}
        for name, tensor in state.items():
            if once[id(tensor)] == name:
                found = ((rule, match) for rule in rules if (match := rule.ours.fullmatch(name)))
                rule, match = next(found, (None, None))
                terms = [] if rule is None or match is None else rule.theirs
                yield name, tensor, [term.filled(match.groupdict() if match else {}) for term in terms]

    def _made(self, terms: Sequence[Term], config: Theirs, weights: Weights, shape: torch.Size) -> Tensor | str:
        """A weight of this shape, or what it is like instead. What was joined is not needed in memory any more."""
        given = [weights[term.name] for term in terms]
        try:
            parts = [self._changed(tensor, term, config) for tensor, term in zip(given, terms, strict=True)]
            found = torch.cat(parts) if len(parts) > 1 else parts[0]
        except (RuntimeError, IndexError):  # too few or too many dimensions to be changed or joined
            return " + ".join(str(tuple(tensor.shape)) for tensor in given)
        for tensor in given if len(parts) > 1 else ():
            give_back(tensor)
        return found.detach() if found.shape == shape else str(tuple(found.shape))

    def _changed(self, tensor: Tensor, term: Term, config: Theirs) -> Tensor:
        if term.entry is not None:
            tensor = tensor[int(term.entry)]
        for name in term.changes:
            tensor = self._change(name).there(tensor, config)
        return tensor

    def _change(self, name: str) -> Change:
        return TRANSPOSE if name == "T" else self.changes[name]

    # --- ours as theirs -----------------------------------------------------------------------------------------------

    def write(
        self, model: nn.Module, theirs: Theirs | None = None, unused: Weights | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Their config and weights. `theirs`: the config the model once came with, which is kept as it is while it
        still means this model. `unused`: what `unused` found then. What is written is read again before it is given
        out: whatever of our config does not come back is refused by name."""
        model = model if self.alike is None else self._alike(model, self.alike)
        ours = model.config
        assert isinstance(ours, Model)
        if theirs is not None:
            for changed in (False, True):  # since it came, only some of its keys perhaps
                try:
                    config = {**theirs, **self.said(ours)} if changed else theirs
                    return self._written(model, ours, config, unused or {})
                except UserError:
                    continue
        return self._written(model, ours, self.said(ours), unused or {})

    def said(self, ours: Model) -> dict[str, Any]:
        """Our config in their words; it may hold keys that only `tree` knows, which `after` takes out."""
        if self.back is None:
            raise UserError(f"{self.name}: this family can be read, and not be written")
        ours = ours if self.alike is None else self.alike.config(ours)
        said = Said(tree_of(ours, full=True))
        try:
            config = {"model_type": self.name, **self.back(said)}
        except (TypeError, ValueError, LookupError, ArithmeticError):
            if not said.problems:  # nothing was missing that it could stumble over
                raise
        if said.problems:
            raise self._refusal(said.problems)
        self._check(ours, config)
        return config

    def _alike(self, model: nn.Module, alike: Alike) -> nn.Module:
        """The same model in the words of the family, if it is one of the family."""
        assert isinstance(model.config, Model)
        if alike.config(model.config) is model.config:
            return model
        self.said(model.config)
        return alike.model(model)

    def _written(
        self, model: nn.Module, ours: Model, config: Theirs, unused: Weights
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        weights: Weights = {**self.carried(model, config), **unused}
        if self.after is not None:
            config, weights = self.after(config, weights)
        self._check(ours, config if self.before is None else self.before(config, weights)[0])
        return dict(config), {name: tensor.contiguous() for name, tensor in weights.items()}

    def _check(self, ours: Model, config: Theirs) -> None:
        try:
            again = self.config(config)
        except UserError as error:
            raise self._refusal([line.strip() for line in str(error).splitlines()]) from None
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # numbers that no such model has
            raise self._refusal([f"what it would be there cannot be: {error}"]) from None
        if problems := list(differences(meaning(ours), meaning(again))):
            raise self._refusal(problems)

    def _refusal(self, problems: Sequence[str]) -> UserError:
        return UserError(f"{self.name}: this model is none of that family\n  " + "\n  ".join(dict.fromkeys(problems)))

    def carried(self, model: nn.Module, config: Theirs) -> dict[str, Tensor]:
        """Our weights by their names, through the table from left to right."""
        found, stacks, problems = dict[str, Tensor](), defaultdict[str, dict[int, Tensor]](dict), []
        for name, tensor, terms in self._lines_of(model, config):
            if not terms:
                problems.append(f"{name}: there is no place for it")
            parts = _split(model, name, tensor.detach(), len(terms))
            for term, part in zip(terms, parts, strict=True):
                for change in reversed(term.changes):
                    part = self._change(change).back(part, config)
                if term.entry is None:
                    found[term.name] = part
                else:
                    stacks[term.name][int(term.entry)] = part
        if problems:
            raise self._refusal(problems)
        return found | {
            name: torch.stack([part for _, part in sorted(parts.items())]) for name, parts in stacks.items()
        }


def _split(model: nn.Module, name: str, tensor: Tensor, count: int) -> Sequence[Tensor]:
    """The rows of each of several maps that are one of ours, which says how many each has, or has as many of each."""
    if count < 2:
        return [tensor] * count
    sizes = getattr(model.get_submodule(name.rpartition(".")[0]), "outputs", None)
    return tensor.split([len(tensor) // count] * count if sizes is None else list(sizes))


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _filled(name: str, values: Mapping[str, str]) -> str:
    text = name.replace("*", values.get("kind") or "*")
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], text)
