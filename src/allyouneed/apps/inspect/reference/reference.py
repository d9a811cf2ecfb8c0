"""Every key of every part, from the configs: type, default, allowed values and meaning.

`allyouneed parts` prints it, `docs/reference/` holds it as pages (`make docs`). A key is documented by the string below
its field, which is read from the source when needed: importing a part costs nothing more.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from allyouneed import plugins
from allyouneed.apps.inspect.reference.reference_text import LAYERS, PATTERNS
from allyouneed.config import Config, Part, tree_of
from allyouneed.config.messages import suggest, type_text
from allyouneed.errors import UserError
from allyouneed.nn.models.block import Layer
from allyouneed.training.recipe.recipe import Recipe

# slots in the order of a model; those of a recipe follow
ORDER = ("model", "embedding", "positions", "token mixer", "pattern", "scores", "attention positions", "channel mixer")
RECIPE_SLOTS = ("task", "kind of files", "schedule", "optimiser")
BOUNDS = {Gt: "> {.gt:g}", Ge: "≥ {.ge:g}", Lt: "< {.lt:g}", Le: "≤ {.le:g}"}

INTRODUCTIONS = {"model": LAYERS, "pattern": PATTERNS}


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True)
class ReferenceEntry:
    """A part, or a group of keys that is no part (`keys` of a recipe, of a layer, of a router)."""

    name: str
    slot: str
    text: str
    file: str  # relative to src/
    keys: tuple[Key, ...]
    groups: tuple[ReferenceEntry, ...] = ()  # configs that its keys hold

    def tree(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Slot:
    name: str
    text: str
    entries: tuple[ReferenceEntry, ...]

    @property
    def page(self) -> str:
        return f"{self.name.replace(' ', '-')}.md"


# --- reading the configs ---------------------------------------------------------------------------------------------


def slot_classes() -> list[type[Part]]:
    """Every slot of nn, then those of a recipe."""
    plugins.import_all_parts()
    found: list[type[Part]] = []
    classes: list[type[Part]] = [Part]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.__module__.startswith("allyouneed.") and cls.slot and "registry" in vars(cls):
            found.append(cls)

    def place(cls: type[Part]) -> tuple[int, str]:
        order = (*ORDER, "", *RECIPE_SLOTS)
        return order.index(cls.slot) if cls.slot in order else len(ORDER), cls.slot

    return sorted(found, key=place)


def parts_of(cls: type[Part], own: bool = False) -> list[type[Part]]:
    """The parts of a slot, by module; `own`: without those of plugins."""
    found = [part for part in cls.known().values() if not own or part.__module__.startswith("allyouneed.")]
    return sorted(found, key=lambda part: part.__module__)


def slots(own: bool = False) -> list[Slot]:
    """The reference; `own`: without parts of plugins."""
    found = [
        Slot(cls.slot, INTRODUCTIONS.get(cls.slot, ""), tuple(entry(part, cls.slot) for part in parts_of(cls, own)))
        for cls in slot_classes()
    ]
    layer = Slot(
        "layer",
        "One entry of a stack (`allyouneed parts model` shows how stacks are written).\n",
        (entry(Layer, "layer"),),
    )
    recipe = Slot(
        "recipe", "Everything that a training run depends on, in one YAML file.\n", (entry(Recipe, "recipe"),)
    )
    models = [slot.name for slot in found].index("model") + 1
    return [recipe, *found[:models], layer, *found[models:]]


def entry(cls: type[Config], slot: str, name: str = "") -> ReferenceEntry:
    kind = cls.model_fields["kind"].default if "kind" in cls.model_fields and issubclass(cls, Part) else ""
    fields = {key: field for key, field in cls.model_fields.items() if key != "kind" or not kind}
    inner = {field.alias or key: config for key, field in fields.items() for config in _configs(field.annotation)}
    return ReferenceEntry(
        name or kind or slot,
        slot,
        part_text(cls),
        source_file(cls),
        tuple(_key(cls, key, field) for key, field in fields.items()),
        tuple(entry(config, slot, name=key) for key, config in inner.items()),
    )


def _key(cls: type[Config], name: str, field: FieldInfo) -> Key:
    return Key(field.alias or name, _type(field), _default(field), key_text(cls, name))


def _configs(annotation: Any) -> Iterator[type[Config]]:
    """Configs inside an annotation that fill no slot: they are documented with the part that holds them."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        if not issubclass(annotation, Part) and annotation is not Layer:
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _configs(argument)


def key_text(cls: type[Config], name: str) -> str:
    """What a key means: the string below its field, in this class or a base; empty: it has none."""
    if (text := cls.model_fields[name].description) is not None:
        return text
    for owner in cls.__mro__:
        found = _field_texts(owner.__module__).get(owner.__qualname__, {})
        if name in found:
            return found[name]
    return ""


@cache
def _field_texts(module: str) -> dict[str, dict[str, str]]:
    """Strings below annotated fields, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    except (OSError, TypeError, SyntaxError):  # no source: an interactive session
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, node.body[1:], strict=False):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(text):
                    value = " ".join(str(typing.cast(ast.Constant, text).value).split())
                    found.setdefault(node.name, {})[field.target.id] = value
    return found


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def part_text(cls: type[Config]) -> str:
    """The docstring of a part; where it does not name the paper itself, with the sentence of its module that does."""
    text = inspect.cleandoc(cls.__doc__ or "")
    if issubclass(cls, Part) and not _cites(text):
        paragraphs = (inspect.getdoc(importlib.import_module(cls.__module__)) or "").split("\n\n")
        text += "\n\n" + next((paragraph for paragraph in paragraphs if _cites(paragraph)), "")
    return text.strip()


def _cites(text: str) -> bool:
    return re.search(r"\b(19|20)\d\d\b|Attention Is All You Need|the paper", text) is not None


def _type(field: FieldInfo) -> str:
    """`integer > 0 or null`"""
    if Layer in typing.get_args(field.annotation):
        return "list of layers, or text"
    words = re.sub(r"\ban? ", "", type_text(field.annotation))
    bounds = [
        template.format(bound)
        for bound in _bounds(field.annotation, field.metadata)
        for kind, template in BOUNDS.items()
        if isinstance(bound, kind)
    ]
    if not bounds:
        return words
    number = re.search(r"integers?|numbers?", words)
    return f"{words[: number.end()]} {', '.join(bounds)}{words[number.end() :]}" if number else words


def _bounds(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[Any]:
    for one in metadata:
        yield from one.metadata if isinstance(one, FieldInfo) else (one,)
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        yield from _bounds(inner, more)
    elif typing.get_origin(annotation) is not typing.Literal:
        for argument in typing.get_args(annotation):
            yield from (bound for bound in _bounds(argument) if not isinstance(bound, MinLen))


def _default(field: FieldInfo) -> str:
    """The default as in YAML; `required` if there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Part):
        value = tree_of(value, full=False)
        value = value["kind"] if set(value) == {"kind"} else value
    elif isinstance(value, Config):
        value = tree_of(value, full=False)
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def source_file(cls: type[Config]) -> str:
    path = Path(inspect.getsourcefile(cls) or "")
    root = plugins.ROOT.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


# --- looking up ------------------------------------------------------------------------------------------------------


def find(kind: str | None = None, name: str | None = None) -> list[Slot]:
    """All slots; one slot; one part of it. `kind` may also be the name of a part: then every part of that name."""
    everything = slots()
    if kind is None:
        return everything
    names = {slot.name.replace(" ", "-"): slot for slot in everything}
    wanted = kind.lower().replace(" ", "-").replace("_", "-")
    slot = names.get(wanted) or names.get({"mixer": "token-mixer", "channel": "channel-mixer"}.get(wanted, ""))
    if slot is None and name is None:
        found = [Slot(one.name, "", tuple(e for e in one.entries if e.name == wanted)) for one in everything]
        if any(one.entries for one in found):
            return [one for one in found if one.entries]
    if slot is None:
        raise UserError(f"unknown slot or part {kind!r}{suggest(wanted, names)}")
    if name is None:
        return [slot]
    chosen = tuple(one for one in slot.entries if one.name == name)
    if not chosen:
        raise UserError(f"unknown {slot.name} {name!r}{suggest(name, [one.name for one in slot.entries])}")
    return [Slot(slot.name, "", chosen)]
