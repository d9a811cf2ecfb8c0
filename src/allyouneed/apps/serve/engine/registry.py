"""The models of a server: by name, loaded when first asked for, unloaded when memory is needed for another.

A name is a key of a dictionary. What a client sends is never used as a path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.errors import ApiError, log
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.settings import Settings
from allyouneed.errors import UserError, near
from allyouneed.runtime.process import freeze_objects

if TYPE_CHECKING:  # torch is imported when the first model is loaded
    from allyouneed.apps.serve.engine.served_model import ServedModel

NAME_LENGTH = 200
PLACEHOLDERS = ("", "dummy", "tgi")  # of clients that know a server of one model


@dataclass(eq=False)
class Entry:
    """A model that may be loaded. `used`: requests that use it now."""

    name: str
    path: Path
    created: int
    bytes: int = 0
    model: Any = None  # a `ServedModel`; in an API process, a `RemoteModel`
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: int = 0
    last_used: float = 0.0
    facts: dict[str, Any] | None = None
    offer: Any = None  # of a translator: its languages (apps/translate/offers.py)

    def end_use(self) -> None:
        self.used -= 1
        self.last_used = time.monotonic()


class ModelRegistry:
    """`folders`: by name. `aliases`: other names of them. `default`: used by requests that name no model; the first one
    if not given. `on_phase` is called with every new phase. `stuck`: which engine does not get on (watchdog.py),
    and since when."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        settings: Settings,
        metrics: Metrics,
        default: str | None = None,
        aliases: Mapping[str, str] | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        check_names(folders, default, aliases or {})
        self.settings, self.metrics = settings, metrics
        now = int(time.time())
        self.entries = {name: Entry(name, path, now) for name, path in folders.items()}
        self.aliases = dict(aliases or {})
        self.default = next(iter(folders)) if default is None else default
        self.on_phase = on_phase
        self.stuck = ""
        self.stuck_since: float | None = None
        self.phase = "starting"
        self._loading = asyncio.Lock()  # one model at a time: memory is counted before each

    @property
    def phase(self) -> str:
        """starting, loading NAME, loading NAME: capturing CUDA graphs, ready, or why it is not."""
        return self.stuck or self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def find(self, name: str | None) -> Entry:
        if name is None or (name in PLACEHOLDERS and len(self.entries) == 1):
            return self.entries[self.default]
        found = self.entries.get(self.aliases.get(name, name))
        if found is None:
            known = [*self.entries, *self.aliases]
            raise ApiError(
                f"unknown model {name[:NAME_LENGTH]!r}{near(name[:NAME_LENGTH], known)} (known: {', '.join(known)})",
                404,
                param="model",
                code="model_not_found",
            )
        return found

    async def suiting(self, suits: Callable[[str], bool]) -> list[Entry]:
        """The models whose task suits, the default model first."""
        ordered = sorted(self.entries.values(), key=lambda one: one.name != self.default)
        return [entry for entry in ordered if suits((await self.facts(entry))["task"])]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """A model, loaded, and not unloaded meanwhile."""
        entry = self.find(name)
        entry.used += 1
        try:
            if entry.model is None:
                await self.load(entry)
            assert entry.model is not None
            yield entry.model
        finally:
            entry.end_use()

    async def load(self, entry: Entry) -> None:
        async with entry.lock:
            if entry.model is not None:
                return
            async with self._loading:
                loop = asyncio.get_running_loop()
                before, self.phase = self._phase, f"loading {entry.name}"
                try:
                    model = await self._open(entry, loop)
                    if model.captures:
                        self.phase = f"loading {entry.name}: capturing CUDA graphs"
                        await asyncio.to_thread(model.warm_up)
                    freeze_objects()
                    entry.model = model
                finally:
                    self.phase = "ready" if before.startswith("loading") else before
                self.metrics.loaded.labels(entry.name).set(entry.bytes)

    async def _open(self, entry: Entry, loop: asyncio.AbstractEventLoop) -> ServedModel:
        with failures_of_the_server(entry):
            if not entry.bytes:
                entry.bytes = await asyncio.to_thread(_weight_bytes, entry.path)
            await self._make_room(entry)
            return await asyncio.to_thread(_load, entry, self.settings, self.metrics, loop)

    async def _make_room(self, entry: Entry) -> None:
        """Unload the models that were not used for the longest time."""
        ceiling = self.settings.memory
        if ceiling is None:
            return
        if entry.bytes > ceiling:
            raise ApiError(
                f"the model {entry.name} has {entry.bytes:,} bytes of weights, the server's limit is {ceiling:,}", 503
            )
        while sum(one.bytes for one in self.entries.values() if one.model is not None) + entry.bytes > ceiling:
            idle = [one for one in self.entries.values() if one.model is not None and not one.used]
            if not idle:
                raise ApiError(
                    f"no memory for {entry.name} while other models are in use; try again", 503, retry_after=5
                )
            await self.unload(min(idle, key=lambda one: one.last_used))

    async def unload(self, entry: Entry) -> None:
        model, entry.model = entry.model, None
        if model is not None:
            await asyncio.to_thread(model.close)
            del model
            await asyncio.to_thread(_free_memory)
            self.metrics.loaded.labels(entry.name).set(0)

    async def close(self) -> None:
        """Stop the engine loops; the process ends."""
        for entry in self.entries.values():
            model, entry.model = entry.model, None
            if model is not None:
                await asyncio.to_thread(model.close)

    async def facts(self, entry: Entry) -> dict[str, Any]:
        """What is known of a model without loading it: its task and `max_model_len`."""
        if entry.model is not None:
            return entry.model.facts
        if entry.facts is None:
            entry.facts = await asyncio.to_thread(_read_facts, entry.path)
        return entry.facts


@contextmanager
def failures_of_the_server(entry: Entry) -> Iterator[None]:
    """A folder that cannot be loaded is no fault of the request: status 500. The log says why; clients learn no
    paths."""
    try:
        yield
    except ApiError:
        raise
    except (UserError, OSError) as error:
        log.error("the model %s cannot be loaded: %s", entry.name, error)
        message = f"the model {entry.name} cannot be loaded; the server's log says why"
        raise ApiError(message, 500, code="model_not_loaded") from error


def _weight_bytes(path: Path) -> int:
    from allyouneed.interop.load import weight_files

    return sum(file.stat().st_size for file in ([path] if path.is_file() else weight_files(path)))


def _load(entry: Entry, settings: Settings, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> ServedModel:
    from allyouneed.apps.serve.engine.served_model import ServedModel

    return ServedModel.load(entry.name, entry.path, settings, metrics, loop)


def _free_memory() -> None:
    from allyouneed.apps.serve.engine.served_model import free_memory

    free_memory()


def _read_facts(path: Path) -> dict[str, Any]:
    from allyouneed.apps.serve.engine.served_model import read_facts

    return read_facts(path)


def check_names(folders: Mapping[str, Path], default: str | None, aliases: Mapping[str, str]) -> None:
    if not folders:
        raise UserError("a server needs at least one model")
    chosen = [] if default is None else [("default", default)]
    for what, name in (*chosen, *(("alias", target) for target in aliases.values())):
        if name not in folders:
            raise UserError(f"{what}: unknown model {name!r}{near(name, folders)} (known: {', '.join(folders)})")
    if taken := set(aliases) & set(folders):
        raise UserError(f"alias {taken.pop()!r} is the name of a model")


def parse_folders(arguments: Sequence[str]) -> dict[str, Path]:
    """Models by name: `FOLDER`, named after the folder, or `NAME=FOLDER`; `translator`, also where nothing is given:
    the bundled one."""
    from allyouneed.models import TRANSLATOR, is_bundled, resolve

    found: dict[str, Path] = {}
    for argument in arguments or [TRANSLATOR]:
        name, given, folder = argument.partition("=")
        path = resolve(folder if given else argument)
        if is_bundled(argument):
            name = argument
        elif not given:
            resolved = path.resolve()
            name = resolved.parent.name if resolved.name == "model" else resolved.name
        if not path.exists():
            raise UserError(f"{path}: no such model folder")
        if not name or len(name) > NAME_LENGTH:
            raise UserError(f"{argument}: a model needs a name of at most {NAME_LENGTH} characters")
        if name in found:
            raise UserError(f"two models are named {name!r}; name one with NAME=FOLDER")
        found[name] = path
    return found
