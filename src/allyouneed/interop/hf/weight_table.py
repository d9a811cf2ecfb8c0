"""A model family as two tables: their config (config_table.py), and for each of our weights the tensors of theirs it is
made of.

A line reads `ours = theirs`. `{n}` stands for a number that both sides share, `*` for `weight` and `bias`:

    decoder.blocks.{n}.sublayers.mixer.out.* = model.layers.{n}.self_attn.o_proj.*

`+` concatenates several of theirs along the rows; after a `|` come transforms by name (`T` transposes; a family may
define its own):

    decoder.blocks.{n}.sublayers.mixer.qkv.* = h.{n}.attn.q.* + h.{n}.attn.k.* + h.{n}.attn.v.*
    decoder.blocks.{n}.sublayers.mixer.qkv.weight = h.{n}.attn.c_attn.weight |T

`name[{e}]` takes one entry of a stacked tensor. Missing tensors, leftovers and wrong shapes are reported all at once.
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
from allyouneed.data.files.mapped import release_pages
from allyouneed.errors import UserError
from allyouneed.interop.hf.config_reader import Tree
from allyouneed.interop.hf.config_table import ConfigTable
from allyouneed.interop.hf.config_writer import ModelTree, canonical_tree, differences
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, dtype_problem, meta_model

HfConfig = Mapping[str, Any]
Weights = Mapping[str, Tensor]
TensorFunction = Callable[[Tensor, HfConfig], Tensor]
CheckpointTransform = Callable[[HfConfig, Weights], tuple[HfConfig, Weights]]


@dataclass(frozen=True)
class TensorTransform:
    """`to_ours` maps a tensor of theirs to ours, `to_hf` is its inverse; both may look at the HF config."""

    to_ours: TensorFunction
    to_hf: TensorFunction


PARAMETER_SLACK = 1_000_000  # parameters that small models may have without stored tensors, such as zero biases
TRANSPOSE = TensorTransform(lambda tensor, config: tensor.t(), lambda tensor, config: tensor.t())


@dataclass(frozen=True)
class TensorTerm:
    """One tensor of theirs, by a name that may contain `{n}` and `*`."""

    name: str
    entry: str | None
    transforms: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> TensorTerm:
        name, *transforms = (word.strip() for word in text.split("|"))
        found = re.fullmatch(r"(.+?)(?:\[(.+)\])?", name)
        assert found is not None
        return cls(found[1], found[2], tuple(transforms))

    def substitute(self, values: Mapping[str, str]) -> TensorTerm:
        entry = None if self.entry is None else _substitute(self.entry, values)
        return TensorTerm(_substitute(self.name, values), entry, self.transforms)


@dataclass(frozen=True)
class Rule:
    ours: re.Pattern[str]
    theirs: tuple[TensorTerm, ...]

    @classmethod
    def parse(cls, line: str) -> Rule:
        ours, _, theirs = line.partition(" = ")
        escaped = re.escape(ours.strip()).replace(r"\*", "(?P<kind>weight|bias)")
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", escaped)
        return cls(re.compile(pattern), tuple(TensorTerm.parse(term) for term in theirs.split(" + ")))


@dataclass(frozen=True)
class EquivalentModel:
    """Maps a model to an equivalent one that the family can express: its config, and the model with its weights."""

    config: Callable[[Model], Model]
    model: Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Family:
    """`fields` is the table of the config (without token ids), or, for files that are never written, a function that
    gives our tree; `lines` is the weight table. Weights of theirs that ours does not use, by patterns with `*`:
    `ignore` lists redundant ones (buffers, copies of tied matrices), `preserve` those a round trip must keep (BERT's
    pooler).

    `prepare(config, weights)` turns both into what the tables expect, where names are old or the config leaves open
    what only the weights tell; `finish` is its inverse, applied to what the tables give. `equivalent` maps a model of
    ours to an equivalent one that the family can express. `notes`: what a user should know about this model before
    comparing its results with theirs. `lacks`: what a call of theirs would have to be given besides the token ids and
    types that a tokenizer gives, to compute what this model of ours computes; empty if nothing.
    """

    name: str
    fields: ConfigTable | Callable[[HfConfig], Tree]
    lines: str | Callable[[HfConfig], str]
    ignore: Sequence[str] = ()
    transforms: Mapping[str, TensorTransform] = field(default_factory=dict)
    prepare: CheckpointTransform | None = None
    preserve: Sequence[str] = ()
    finish: CheckpointTransform | None = None
    equivalent: EquivalentModel | None = None
    notes: Callable[[Model], Sequence[str]] | None = None
    lacks: Callable[[Model], str] = lambda config: ""

    def rules(self, config: HfConfig) -> list[Rule]:
        text = self.lines if isinstance(self.lines, str) else self.lines(config)
        return [Rule.parse(line) for line in text.splitlines() if " = " in line]

    # --- theirs to ours -----------------------------------------------------------------------------------------------

    def convert(
        self, config: HfConfig, weights: Weights, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
    ) -> nn.Module:
        """Our model with their weights: used without a copy where ours equals theirs, in their precision unless
        `dtype` is given."""
        if self.prepare is not None:
            config, weights = self.prepare(config, weights)
        ours = self.read_config(config)
        stored, declared = sum(tensor.numel() for tensor in weights.values()), ours.cost().parameters
        if declared > 2 * stored + PARAMETER_SLACK:
            raise UserError(
                f"{self.name}: the config declares {declared:,} parameters, but the weights have {stored:,}; the "
                f"config does not belong to these weights"
            )
        model = meta_model(ours)
        self.fill(model, config, weights, dtype, device)
        return model.eval()

    def tree(self, config: HfConfig) -> Tree:
        """Our tree, from their config."""
        return self.fields.read(config) if isinstance(self.fields, ConfigTable) else self.fields(config)

    def read_config(self, config: HfConfig) -> Model:
        """Our config, from theirs as returned by `prepare`."""
        return parse(Model, self.tree(config), self.name)  # type: ignore[type-abstract]

    def fill(
        self,
        model: nn.Module,
        config: HfConfig,
        weights: Weights,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        used, problems, ready = set[str](), list[str](), dict[str, Tensor]()
        for name, tensor, terms in self._match(model, config):
            names = [term.name for term in terms]
            used |= set(names)
            missing = [theirs for theirs in names if theirs not in weights]
            if not names:
                problems.append(f"{name}: the table of {self.name} has no line for it")
            elif missing:
                problems.append(f"{', '.join(missing)}: missing (for our {name})")
            else:
                found = self._build_weight(terms, config, weights, tensor.shape)
                if isinstance(found, str):
                    problems.append(f"{', '.join(names)}: {found}, our {name} is {tuple(tensor.shape)}")
                elif problem := dtype_problem(found.dtype, tensor.dtype):
                    problems.append(f"{', '.join(names)}: {problem}")
                elif not problems:
                    ready[name] = found.to(device, dtype if found.is_floating_point() else None).contiguous()
                    if ready[name].data_ptr() != found.data_ptr():
                        release_pages(found)
        unused = [name for name in weights if name not in used and not _matches(name, (*self.ignore, *self.preserve))]
        problems += [f"{name}: not used" for name in unused]
        if problems:
            raise UserError(f"{self.name}: the weights do not match the config\n  " + "\n  ".join(problems))
        assign_weights(model, ready)

    def unused(self, config: HfConfig, weights: Weights) -> dict[str, Tensor]:
        """Weights our model does not use and a round trip must keep, by the names that `write` expects."""
        if self.prepare is not None:
            config, weights = self.prepare(config, weights)
        model = meta_model(self.read_config(config))
        used = {term.name for _, _, terms in self._match(model, config) for term in terms}
        return {name: weights[name] for name in weights if name not in used and _matches(name, self.preserve)}

    def _match(self, model: nn.Module, config: HfConfig) -> Iterator[tuple[str, Tensor, list[TensorTerm]]]:
        """Each weight of ours, under the first of its names, with its terms; no terms where no line matches."""
        rules = self.rules(config)
        state = model.state_dict(keep_vars=True)
        first_name = {id(tensor): name for name, tensor in reversed(state.items())}
        for name, tensor in state.items():
            if first_name[id(tensor)] == name:
                found = ((rule, match) for rule in rules if (match := rule.ours.fullmatch(name)))
                rule, match = next(found, (None, None))
                terms = [] if rule is None or match is None else rule.theirs
                yield name, tensor, [term.substitute(match.groupdict() if match else {}) for term in terms]

    def _build_weight(
        self, terms: Sequence[TensorTerm], config: HfConfig, weights: Weights, shape: torch.Size
    ) -> Tensor | str:
        """A weight of this shape, or the shape found instead. Concatenated inputs are released from memory."""
        given = [weights[term.name] for term in terms]
        try:
            parts = [self._to_ours(tensor, term, config) for tensor, term in zip(given, terms, strict=True)]
            found = torch.cat(parts) if len(parts) > 1 else parts[0]
        except (RuntimeError, IndexError):  # wrong number of dimensions for a transform or the concatenation
            return " + ".join(str(tuple(tensor.shape)) for tensor in given)
        for tensor in given if len(parts) > 1 else ():
            release_pages(tensor)
        return found.detach() if found.shape == shape else str(tuple(found.shape))

    def _to_ours(self, tensor: Tensor, term: TensorTerm, config: HfConfig) -> Tensor:
        if term.entry is not None:
            tensor = tensor[int(term.entry)]
        for name in term.transforms:
            tensor = self._transform(name).to_ours(tensor, config)
        return tensor

    def _transform(self, name: str) -> TensorTransform:
        return TRANSPOSE if name == "T" else self.transforms[name]

    # --- ours to theirs -----------------------------------------------------------------------------------------------

    def write(
        self, model: nn.Module, theirs: HfConfig | None = None, unused: Weights | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Their config and weights. `theirs`: the config the model was imported with, kept as far as it still describes
        this model. `unused`: what `unused` returned then. The result is read back first: any part of our config that
        does not survive the round trip is refused by name."""
        model = model if self.equivalent is None else self._to_equivalent(model, self.equivalent)
        ours = model.config
        assert isinstance(ours, Model)
        if theirs is not None:
            for changed in (False, True):  # the model may have changed since the import
                try:
                    config = {**theirs, **self.write_config(ours)} if changed else theirs
                    return self._write_as(model, ours, config, unused or {})
                except UserError:
                    continue
        return self._write_as(model, ours, self.write_config(ours), unused or {})

    def write_config(self, ours: Model) -> dict[str, Any]:
        """Our config as theirs; it may hold keys that only the table knows, which `finish` removes."""
        if not isinstance(self.fields, ConfigTable):
            raise UserError(f"{self.name}: this family can be imported, but not exported")
        ours = self.equivalent_config(ours)
        tree = ModelTree(tree_of(ours, full=True))
        try:
            config = {"model_type": self.name, **self.fields.write(tree)}
        except (TypeError, ValueError, LookupError, ArithmeticError):
            if not tree.problems:  # not caused by a missing path
                raise
        if tree.problems:
            raise self._refusal(tree.problems)
        self._check_round_trip(ours, config)
        return config

    def equivalent_config(self, ours: Model) -> Model:
        """The config that is written in place of this one, which computes the same."""
        return ours if self.equivalent is None else self.equivalent.config(ours)

    def _to_equivalent(self, model: nn.Module, equivalent: EquivalentModel) -> nn.Module:
        """The equivalent model of the family, if there is one."""
        assert isinstance(model.config, Model)
        if equivalent.config(model.config) is model.config:
            return model
        self.write_config(model.config)
        return equivalent.model(model)

    def _write_as(
        self, model: nn.Module, ours: Model, config: HfConfig, unused: Weights
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        weights: Weights = {**self.export_weights(model, config), **unused}
        if self.finish is not None:
            config, weights = self.finish(config, weights)
        self._check_round_trip(ours, config if self.prepare is None else self.prepare(config, weights)[0])
        return dict(config), {name: tensor.contiguous() for name, tensor in weights.items()}

    def _check_round_trip(self, ours: Model, config: HfConfig) -> None:
        try:
            again = self.read_config(config)
        except UserError as error:
            raise self._refusal([line.strip() for line in str(error).splitlines()]) from None
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # sizes no such model can have
            raise self._refusal([f"the exported config is invalid: {error}"]) from None
        if problems := list(differences(canonical_tree(ours), canonical_tree(again))):
            raise self._refusal(problems)

    def _refusal(self, problems: Sequence[str]) -> UserError:
        return UserError(
            f"{self.name}: the family cannot express this model\n  " + "\n  ".join(dict.fromkeys(problems))
        )

    def export_weights(self, model: nn.Module, config: HfConfig) -> dict[str, Tensor]:
        """Our weights by their names: the table read from left to right."""
        found, stacks, problems = dict[str, Tensor](), defaultdict[str, dict[int, Tensor]](dict), []
        for name, tensor, terms in self._match(model, config):
            if not terms:
                problems.append(f"{name}: no counterpart")
            parts = _split(model, name, tensor.detach(), len(terms))
            for term, part in zip(terms, parts, strict=True):
                for transform in reversed(term.transforms):
                    part = self._transform(transform).to_hf(part, config)
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
    """Split a fused map into the rows of its `count` maps: by the module's `outputs`, or evenly."""
    if count < 2:
        return [tensor] * count
    sizes = getattr(model.get_submodule(name.rpartition(".")[0]), "outputs", None)
    return tensor.split([len(tensor) // count] * count if sizes is None else list(sizes))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _substitute(name: str, values: Mapping[str, str]) -> str:
    text = name.replace("*", values.get("kind") or "*")
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], text)
