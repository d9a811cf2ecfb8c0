"""A family's config as a table, read both ways: each option of our tree, and the key of theirs that holds it.

A line reads `ours = theirs`. A path of ours passes through all layers of a stack; `<kind>` limits it to parts of that
kind, and `[*]` takes a list with a value for each layer:

    decoder.mixer.heads = num_attention_heads
    decoder.channel<moe>.experts = num_local_experts
    decoder[*].mixer.pattern = layer_types, sliding_window |layer_types

`?? value` is the default of their key, `or` gives the value where theirs is off:

    embed.tied = tie_word_embeddings ?? false
    decoder.channel.hidden = n_inner or 4 * n_embd

After a `|` comes a conversion: a map from their values to ours, or a name, of `CONVERSIONS` or of the family:

    embed.scale = scale_embedding ?? false |{true: sqrt-width, false: none}
    decoder.channel.activation = hidden_act |activation

An indented line continues the one before. Lines with `<-` are only read, lines with `->` only written. Other lines:

    decoder.mixer: {kind: attention, pattern: causal}    ours is always so
    hidden_act in [silu, swish]                          the supported values of theirs; the first is the default
    ?? {vocab_size: 50265}                               defaults of their keys
    -> {hidden_act: silu}                                written as it is
    ignore embd_pdrop, summary_*                         keys without effect on the result

A later line replaces an earlier one with the same left side, so that a family adds its own to those of a relative.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import yaml

from allyouneed.interop.hf import rope
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, is_headless, strict_config
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree, merge_repeats, split_path

FIELD = re.compile(
    r"(?P<path>\S+) (?P<arrow>=|<-|->) (?P<keys>[^|?]+?)( \?\? (?P<default>[^|]+?))?( or (?P<fallback>[^|]+?))?"
    r"( \|(?P<conversion>\w*) *(?P<argument>.*))?"
)
STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class Line:
    """One line. `kind`: its arrow, or `:`, `in`, `??`, `ignore`; `value`: what stands in it as YAML."""

    kind: str
    path: str = ""
    keys: tuple[str, ...] = ()
    value: Any = None
    has_default: bool = False
    fallback: str | None = None
    conversion: str | None = None
    argument: Any = None

    @classmethod
    @cache  # relatives share lines
    def parse(cls, text: str) -> Line:
        kind, _, rest = text.partition(" ")
        if kind == "ignore":
            return cls(kind, rest, tuple(rest.split(", ")))
        if kind in ("??", "->"):
            return cls(kind, rest, value=yaml.safe_load(rest))
        if match := re.fullmatch(r"(\S+) in (\[.*\])", text):
            return cls("in", match[1], (match[1],), yaml.safe_load(match[2]))
        if match := re.fullmatch(r"(\S+): (.+)", text):
            return cls(":", match[1], value=yaml.safe_load(match[2]))
        found = FIELD.fullmatch(text)
        assert found is not None, text
        keys, fallback = found["keys"], found["fallback"]
        if " * " in keys:  # computed from another key
            keys, fallback = "", keys
        return cls(
            found["arrow"],
            found["path"],
            tuple(keys.split(", ")) if keys else (),
            None if found["default"] is None else yaml.safe_load(found["default"]),
            found["default"] is not None,
            fallback,
            found["conversion"],
            yaml.safe_load(found["argument"] or "null"),
        )

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("->", self.path, self.keys) if self.kind == "->" else ("ours", self.path)


@dataclass(frozen=True)
class Conversion:
    """`read(config, line)` gives our value, `write(ours, line)` theirs; for a line of several keys, a mapping of those
    that are written. Both may return `OMITTED`."""

    read: Callable[[ConfigReader, Line], Any]
    write: Callable[[ModelTree, Line], Any] = lambda ours, line: OMITTED


@dataclass(frozen=True)
class ConfigTable:
    """`conversions`: those of the family. `finish`: the last change of the tree that was read."""

    text: str
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    finish: Callable[[ConfigReader, Tree], Tree] | None = None

    @cached_property
    def lines(self) -> list[Line]:
        lines = [Line.parse(text) for text in self.text.replace("\n    ", " ").splitlines() if text]
        return list({line.identity: line for line in lines}.values())

    # --- theirs to ours -----------------------------------------------------------------------------------------------

    def read(self, config: Mapping[str, Any]) -> Tree:
        """Our tree. Keys that no line names are refused."""
        ignored = [key for line in self.lines if line.kind == "ignore" for key in line.keys]
        return strict_config(*ignored)(self.read_lines)(config)

    def read_lines(self, config: ConfigReader) -> Tree:
        defaults = {line.key: line.value for line in self.lines if line.has_default}
        for line in self.lines:
            defaults |= line.value if line.kind == "??" else {}
        config.set_defaults(defaults)
        for line in self.lines:
            if line.kind == "in":
                config.require(line.key, *line.value)
        tree: Tree = {}
        for line in self.lines:
            if line.kind == ":":
                assign(tree, line.path, line.value)
            elif line.kind in ("=", "<-"):
                self._read_field(config, line, tree)
        return tree if self.finish is None else self.finish(config, tree)

    def _read_field(self, config: ConfigReader, line: Line, tree: Tree) -> None:
        if not _exists(tree, line.path):
            for key in line.keys:
                config.get(key)
        elif (value := self._read_value(config, line)) is not OMITTED:
            assign(tree, line.path, value)

    def _read_value(self, config: ConfigReader, line: Line) -> Any:
        if line.conversion is not None:
            return self._conversion(line.conversion).read(config, line)
        if line.fallback is None:
            return config[line.key]
        return (line.keys and config.get(line.key)) or _compute(line.fallback, config.__getitem__)

    def _conversion(self, name: str) -> Conversion:
        return self.conversions[name] if name in self.conversions else CONVERSIONS[name]

    # --- ours to theirs -----------------------------------------------------------------------------------------------

    def write(self, ours: ModelTree) -> Tree:
        found: Tree = {}
        for line in self.lines:
            if line.kind == "->" and not line.keys:
                merge(found, line.value)
            elif line.kind in ("=", "->") and ours.has_kinds(line.path):
                value = self._write_value(ours, line, found)
                for key, one in value.items() if len(line.keys) > 1 else [(line.key, value)]:
                    if key in line.keys and one is not OMITTED:
                        assign(found, key, one)
        return found

    def _write_value(self, ours: ModelTree, line: Line, found: Tree) -> Any:
        if line.conversion is not None:
            return self._conversion(line.conversion).write(ours, line)
        if (value := ours.get(line.path)) is not None:
            return value
        if line.fallback is not None:
            return _compute(line.fallback, ConfigReader(found).get)
        place = line.path.rpartition(".")[0]
        return line.value if line.has_default and (not place or ours.get(place)) else ours[line.path]


def assign(tree: Tree, path: str, value: Any) -> None:
    """Set a value at a path of every layer it passes through; a part is merged with what is there."""
    side, each, rest = path.partition("[*].")
    if each and not isinstance(value, list):  # the same in all layers
        assign(tree, f"{side}.{rest}", value)
    elif each:
        layers = [deepcopy(tree[side][0]) | {"repeat": 1} for _ in value]
        for layer, one in zip(layers, value, strict=True):
            assign(layer, rest, one)
        tree[side] = merge_repeats(layers)
    elif isinstance(value, dict):
        for node in _parts(tree, path):
            merge(node, value)
    else:
        place, _, name = path.rpartition(".")
        for node in _parts(tree, place):
            node[name] = deepcopy(value)


def merge(tree: Tree, more: Tree) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def _parts(tree: Tree, path: str) -> list[Tree]:
    """All parts at a path; those that are missing are added."""
    nodes = [tree]
    for name, kind in split_path(path):
        below: list[Tree] = []
        for node in nodes:
            if not isinstance(node.get(name), dict | list):
                node[name] = [{}] if name in STACKS else {}
            below += node[name] if isinstance(node[name], list) else [node[name]]
        nodes = [node for node in below if kind in (None, node.get("kind"))]
    return nodes


def _exists(tree: Tree, path: str) -> bool:
    """Whether the tree has parts of the kinds that the path names."""
    place = path.rpartition(">")[0]
    return not place or bool(_parts(tree, f"{place}>"))


def _compute(text: str, value_of: Callable[[str], Any]) -> Any:
    """`key`, `4 * key` or `key // key`."""
    first, *rest = text.split()
    value = int(first) if first.isdigit() else value_of(first)
    if not rest or value is None or (other := value_of(rest[1])) is None:
        return value
    return value * other if rest[0] == "*" else value // other


# --- conversions ------------------------------------------------------------------------------------------------------


def _read_name(config: ConfigReader, line: Line) -> Any:
    names = line.argument
    if set(names) == {True, False}:
        return names[bool(config.get(line.key))]
    return config.map_value(line.key, names, next(iter(names)))


def _write_name(ours: ModelTree, line: Line) -> Any:
    """The last name where none fits: the round-trip check then tells what cannot be expressed."""
    value, names = ours.get(line.path), line.argument
    return next((theirs for theirs, expected in names.items() if _fits(value, expected)), [*names][-1])


def _fits(ours: Any, expected: Any) -> bool:
    """Whether our value is as expected, as far as that goes; a bias may be set per projection or for all."""
    if isinstance(ours, dict) and isinstance(expected, bool):
        return set(ours.values()) == {expected}
    if isinstance(ours, bool) and isinstance(expected, dict):
        return set(expected.values()) == {ours}
    if isinstance(expected, dict):
        return isinstance(ours, dict) and all(_fits(ours.get(key), value) for key, value in expected.items())
    return bool((ours["kind"] if isinstance(ours, dict) else ours) == expected)


def _read_class(config: ConfigReader, line: Line) -> Any:
    """The kind for the end of the class name; the first is the default."""
    kinds = line.argument[1]
    name = (config.get("architectures") or [next(iter(kinds))])[0]
    ends = [end for end in kinds if name.endswith(end) and (kinds[end] != "none" or not name.endswith("LMHeadModel"))]
    if not ends:
        allowed = ", ".join(f"…{end}" for end in kinds)
        config.problems.append(f"architectures: {name!r} is not supported (allowed: {allowed})")
    return kinds[max(ends, key=len)] if ends else next(iter(kinds.values()))


def _write_class(ours: ModelTree, line: Line) -> list[str]:
    prefix, kinds = line.argument
    return [prefix + (ours.hf_name(line.path, kinds) or "")]


def _read_decoder_class(config: ConfigReader, line: Line) -> str:
    config.require_architecture("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "Model")
    return "none" if is_headless(config) else "vocabulary"


def _write_optional(ours: ModelTree, line: Line) -> Any:
    value = ours.get(line.path)
    return OMITTED if value is None else value


def _write_labels(ours: ModelTree, line: Line) -> Tree:
    """Default label names; those of the task, if any, replace them."""
    names = [f"LABEL_{number}" for number in range(ours[line.path])]
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def _read_window(config: ConfigReader, line: Line) -> str:
    """Mistral's: a causal window that includes the token itself."""
    window = config.get(line.key)
    return "causal" if window is None else f"causal & window({window})"


def _read_unless_width(config: ConfigReader, line: Line) -> int | None:
    """A width of ours that is null where it is the model's."""
    value: int = config.get(line.key) or config["hidden_size"]
    return None if value == config["hidden_size"] else value


CONVERSIONS = {
    "": Conversion(_read_name, _write_name),
    "activation": Conversion(  # `|activation gelu_pytorch_tanh`: their name for GELU's tanh approximation
        lambda config, line: config.activation(line.key),
        lambda ours, line: ours.activation(line.path, line.argument or "gelu_new"),
    ),
    "class": Conversion(_read_class, _write_class),  # `|class [Bert, {ForMaskedLM: vocabulary, Model: none}]`
    "decoder": Conversion(_read_decoder_class, lambda ours, line: ours.architectures(line.argument)),
    "flag": Conversion(lambda config, line: config[line.key], lambda ours, line: ours.flag(line.path)),
    "labels": Conversion(lambda config, line: len(config.get("id2label") or "01"), _write_labels),
    "optional": Conversion(lambda config, line: config.get(line.key), _write_optional),
    "rotary": Conversion(
        lambda config, line: rope.rotary(config, **(line.argument or {})),
        lambda ours, line: rope.rope_parameters(ours, partial="fraction" in (line.argument or {})),
    ),
    "unless_width": Conversion(_read_unless_width, lambda ours, line: ours.get(line.path, ours["width"])),
    "window": Conversion(_read_window, lambda ours, line: ours.window()),
}
