"""Parts that live outside the package: a file (`my_part.py`), a module (`my_package.parts`) or an installed entry
point.

A plugin is imported only when the user names it: `--plugin` on the command line, `plugins:` in a recipe,
`allyouneed.plugin()` in Python, or a config whose `kind` is the name of an installed entry point of the group
`allyouneed.parts`. A model folder records the plugins it needs by name and checksum; it never contains code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from allyouneed.errors import UserError
from allyouneed.files import sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "allyouneed.parts"  # entry points; the name of each is the `kind` it provides
PACKAGE = "allyouneed"
ROOT = Path(__file__).parent
HOMES = ("nn", "tasks", "data", "training")  # where this package defines parts
PREFIX = "allyouneed_plugin_"  # module names of plugins that are files


class PartCollision(TypeError):
    """A part has the kind of another part of its slot."""


@dataclass
class Plugin:
    """An imported plugin. `name`: its file name, or the module's dotted name; `source`: the argument of `load`."""

    name: str
    source: str
    module: str
    sha256: str
    parts: set[tuple[str, str]] = field(default_factory=set)  # (slot, kind)


_plugins: dict[str, Plugin] = {}  # by module name
_parts: dict[tuple[str, str], str] = {}  # (slot, kind) -> module that defines the part
_importing: list[Plugin] = []


def register(slot: str, kind: str, module: str) -> None:
    """Record where a part was defined. `Part` calls this for every subclass."""
    _parts[slot, kind] = module
    if _importing and not is_builtin(module):
        _importing[-1].parts.add((slot, kind))


def load(source: str | Path) -> ModuleType:
    """Import a plugin: a path that ends in `.py`, or the name of an importable module. A second call is free."""
    text = os.fspath(source)
    if text.endswith(".py") or os.sep in text:
        return _load_file(Path(text))
    if not re.fullmatch(r"\w+(\.\w+)*", text):
        raise UserError(f"plugin {text!r}: give the path of a .py file or the name of a module")
    return _load_module(text)


def load_all(sources: Iterable[str | Path]) -> None:
    for source in sources:
        load(source)


def sources() -> list[str]:
    """What to pass to `load` in another process to have the same plugins."""
    return [plugin.source for plugin in _plugins.values()]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such plugin file; check the path")
    if path.suffix != ".py":
        raise UserError(f"{path}: a plugin is a .py file or the name of a module")
    name, digest = PREFIX + re.sub(r"\W", "_", path.stem), sha256(path)
    if (known := _plugins.get(name)) is not None:
        if known.sha256 == digest:
            return sys.modules[name]
        if Path(known.source) != path.resolve():
            raise UserError(f"{path}: another plugin with this file name is loaded: {known.source}; rename one")
        raise UserError(f"{path}: changed since it was loaded; start a new process")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _registering(Plugin(path.name, str(path.resolve()), name, digest), str(path)):
        sys.modules[name] = module  # annotations of the parts are resolved there
        spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    if name in _plugins:
        return sys.modules[name]
    imported = name in sys.modules
    plugin = Plugin(name, name, name, "")
    with _registering(plugin, f"plugin {name}"):
        module = importlib.import_module(name)
        plugin.sha256 = _checksum(module)
    if imported:
        plugin.parts |= {part for part, owner in _parts.items() if (owner + ".").startswith(name + ".")}
    return module


@contextmanager
def _registering(plugin: Plugin, where: str) -> Iterator[None]:
    _importing.append(plugin)
    try:
        yield
    except BaseException as error:
        sys.modules.pop(plugin.module, None)
        if not isinstance(error, Exception):
            raise
        raise UserError(f"{where}: {_reason(error, plugin)}") from error
    finally:
        _importing.pop()
    _plugins[plugin.module] = plugin


def _reason(error: Exception, plugin: Plugin) -> str:
    if isinstance(error, SyntaxError):
        return f"syntax error in line {error.lineno}: {error.msg}"
    if isinstance(error, PartCollision):
        return f"{error}; give it another kind"
    if isinstance(error, ModuleNotFoundError) and error.name == plugin.module:
        return "no such module; check the name, or pass the path of a .py file"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == plugin.source]
    at = f" in line {lines[-1]}" if lines else ""
    return f"cannot be imported: {type(error).__name__}{at}: {error}"


def provide(kind: str) -> bool:
    """Import what defines parts of this kind: modules of this package, and an installed entry point."""
    own = provide_own(kind)
    for point in _entry_points(kind):
        _load_module(point.module)
        return True
    return own


def provide_own(kind: str) -> bool:
    """Import the modules of this package that define parts of this kind: most programs use few of them."""
    modules = _own_modules().get(kind, ())
    for module in modules:
        importlib.import_module(module)
    return bool(modules)


@cache
def import_all_parts() -> None:
    """Import every part of this package, for those who list them."""
    for module in dict.fromkeys(module for modules in _own_modules().values() for module in modules):
        importlib.import_module(module)


@cache
def _own_modules() -> dict[str, list[str]]:
    """Modules of this package by the kinds of the parts they define."""
    return named_in_sources([ROOT / home for home in HOMES], r'^    kind: Literal\["([^"]+)"\]')


def named_in_sources(folders: Iterable[Path], pattern: str) -> dict[str, list[str]]:
    """Modules of this package by the names that a pattern finds in their sources, which are not imported."""
    found: dict[str, list[str]] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        module = ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for names in re.findall(pattern, path.read_text("utf-8"), re.MULTILINE):
            for name in names.split(", "):
                found.setdefault(name, []).append(module)
    return found


def _entry_points(kind: str) -> Iterable[EntryPoint]:
    return _installed(tuple(sys.path)).select(name=kind)


@cache
def _installed(path: tuple[str, ...]) -> EntryPoints:
    """The entry points of all packages on the path, whose metadata takes milliseconds to read."""
    return entry_points(group=GROUP)


# --- model folders --------------------------------------------------------------------------------------------------


def required_by(parts: Iterable[Any]) -> list[dict[str, Any]]:
    """The plugins, for config.json, that define some of these parts. A part of an interactive session has no file."""
    records: dict[str, dict[str, Any]] = {}
    for part in parts:
        slot, kind, module = getattr(part, "slot", ""), getattr(part, "kind", None), type(part).__module__
        if not slot or kind is None or is_builtin(module):
            continue
        plugin = next((p for p in _plugins.values() if (slot, kind) in p.parts), None)
        if plugin is None and (defined := sys.modules.get(module)) is not None and _file(defined) is not None:
            plugin = Plugin(module, module, module, _checksum(defined))
        if plugin is not None:
            record = records.setdefault(plugin.name, {"name": plugin.name, "sha256": plugin.sha256, "parts": []})
            if (entry := {"slot": slot, "kind": kind}) not in record["parts"]:
                record["parts"].append(entry)
    return list(records.values())


def check_required(records: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """Refuse a model folder whose plugins are not loaded; notes where one differs from the one it was trained with."""
    notes = []
    for record in records:
        name, parts = record["name"], [(part["slot"], part["kind"]) for part in record["parts"]]
        for slot, kind in parts:
            if (slot, kind) not in _parts and not (provide(kind) and (slot, kind) in _parts):
                path = "PATH" if name.endswith(".py") else name
                raise UserError(
                    f"{where}: this model needs the part {kind!r} from plugin {name}; pass --plugin {path} "
                    f"(in Python: allyouneed.plugin({path!r}))"
                )
        loaded = next((p for p in _plugins.values() if p.parts.issuperset(parts)), None)
        if loaded is not None and loaded.sha256 != record["sha256"]:
            notes.append(f"{loaded.source}: differs from the plugin {name} that this model was saved with")
    return notes


def is_builtin(module: str) -> bool:
    return module == PACKAGE or module.startswith(PACKAGE + ".")


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if file and module.__name__ != "__main__" else None


def _checksum(module: ModuleType) -> str:
    file = _file(module)
    return hashlib.sha256(b"").hexdigest() if file is None else sha256(file)
