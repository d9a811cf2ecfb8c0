"""Stored glossaries: in memory, or one JSON file each in a folder, which several servers may share.

A file is named by the identifier that the server made up, and identifiers of requests are only looked up in the list of
those: nothing that a client sends becomes a path.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allyouneed.apps.serve.errors import ApiError, log, over_limit
from allyouneed.apps.serve.settings import Limits
from allyouneed.data.languages import find, parse_name
from allyouneed.errors import UserError
from allyouneed.files import write_text
from allyouneed.files.reading import read_json

if TYPE_CHECKING:
    from allyouneed.apps.translate.glossary import Glossary

IDENTIFIER = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
NAME_CHARACTERS = 1024
SETTLED = 2 * 10**9  # nanoseconds after which the time of a folder tells its versions apart
Short = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]


class Dictionary(BaseModel):
    """Terms of one language with their translations into another."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    source_lang: Short
    target_lang: Short
    entries: dict[str, str]

    @cached_property
    def glossary(self) -> Glossary:
        from allyouneed.apps.translate.glossary import Glossary

        return Glossary(self.entries)

    @property
    def pair(self) -> tuple[str, str]:
        return self.source_lang, self.target_lang

    def is_for(self, source: str, target: str) -> bool:
        return bool(find(source, [self.source_lang]) and find(target, [self.target_lang]))


class StoredGlossary(BaseModel):
    """`creation_time`: ISO 8601, UTC."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    glossary_id: str
    name: Short
    creation_time: str
    dictionaries: list[Dictionary]

    def dictionary(self, source: str, target: str) -> Dictionary:
        """The dictionary for two languages, whatever their regions."""
        found = next((one for one in self.dictionaries if one.is_for(source, target)), None)
        if found is None:
            pairs = ", ".join(f"{here} → {there}" for here, there in (one.pair for one in self.dictionaries)) or "none"
            raise ApiError(
                f"the glossary {self.glossary_id} has no dictionary for {source} → {target} (it has: {pairs})",
                param="glossary_id",
                code="language_mismatch",
            )
        return found


def base_language(name: str) -> str:
    """`EN-US` → `en`: glossaries are for languages, not for their regions."""
    return parse_name(name).language


class GlossaryStore:
    """All methods may be called by several threads."""

    def __init__(self, folder: Path | None, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self.lock = threading.RLock()
        self._found: dict[str, StoredGlossary] = {}
        self._versions: dict[str, tuple[int, int]] = {}  # of the files: time and size
        self._changed = 0  # when the folder was, at the last look
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--glossaries {folder}: cannot create the folder: {error.strerror}") from None
            self._refresh(first=True)

    def every(self) -> list[StoredGlossary]:
        """All glossaries, the oldest first."""
        with self.lock:
            self._refresh()
            return sorted(self._found.values(), key=lambda one: (one.creation_time, one.glossary_id))

    def get(self, identifier: str, param: str | None = None) -> StoredGlossary:
        """`param`: the field of a request that names it; else the path does."""
        with self.lock:
            self._refresh()
            found = self._found.get(identifier)
        if found is None:
            status = 404 if param is None else 400
            raise ApiError(f"unknown glossary {identifier[:100]!r}", status, param, "unknown_glossary")
        return found

    def create(self, name: str, dictionaries: Iterable[Dictionary]) -> StoredGlossary:
        """Dictionaries of the same languages become one; the later terms win."""
        with self.lock:
            self._refresh()
            if len(self._found) >= self.limits.glossaries:
                raise over_limit("glossaries", len(self._found) + 1, self.limits.glossaries)
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            identifier = str(uuid.uuid4())
            empty = StoredGlossary(glossary_id=identifier, name=name, creation_time=now, dictionaries=[])
            return self._put(empty, dictionaries)

    def update(self, identifier: str, name: str | None, dictionaries: Iterable[Dictionary]) -> StoredGlossary:
        """Another name, and further terms."""
        with self.lock:
            old = self.get(identifier)
            return self._put(old.model_copy(update={"name": name or old.name}), dictionaries)

    def replace(self, identifier: str, dictionary: Dictionary) -> StoredGlossary:
        """This dictionary in place of the one of the same languages, if there is one."""
        with self.lock:
            old = self.get(identifier)
            kept = [one for one in old.dictionaries if one.pair != dictionary.pair]
            return self._put(old.model_copy(update={"dictionaries": kept}), [dictionary])

    def remove_dictionary(self, identifier: str, source: str, target: str) -> None:
        with self.lock:
            old = self.get(identifier)
            gone = old.dictionary(source, target)
            self._put(old.model_copy(update={"dictionaries": [one for one in old.dictionaries if one != gone]}), [])

    def remove(self, identifier: str) -> None:
        with self.lock:
            found = self.get(identifier)
            if self.folder is not None:
                self._path(found).unlink(missing_ok=True)
            self._found.pop(found.glossary_id, None)

    def _put(self, glossary: StoredGlossary, added: Iterable[Dictionary]) -> StoredGlossary:
        merged = {one.pair: one for one in glossary.dictionaries}
        for one in added:
            entries = (merged[one.pair].entries if one.pair in merged else {}) | one.entries
            merged[one.pair] = one.model_copy(update={"entries": entries})
        found = glossary.model_copy(update={"dictionaries": list(merged.values())})
        check_sizes([one.entries for one in found.dictionaries], self.limits)
        if self.folder is not None:
            path = self._path(found)
            write_text(path, json.dumps(found.model_dump(), ensure_ascii=False, indent=1) + "\n")
            self._versions[path.name] = _version(path)
        self._found[found.glossary_id] = found
        return found

    def _path(self, glossary: StoredGlossary) -> Path:
        assert self.folder is not None and IDENTIFIER.fullmatch(glossary.glossary_id)
        return self.folder / f"{glossary.glossary_id}.json"

    def _refresh(self, first: bool = False) -> None:
        """Read what another server has written. A broken file is an error at the start, and skipped later."""
        if self.folder is None:
            return
        changed = self.folder.stat().st_mtime_ns
        if changed == self._changed and time.time_ns() - changed > SETTLED:
            return
        self._changed = changed
        present = {path.name: path for path in self.folder.glob("*.json") if IDENTIFIER.fullmatch(path.stem)}
        for name in [name for name in self._versions if name not in present]:
            del self._versions[name]
            self._found.pop(name.removesuffix(".json"), None)
        for name, path in present.items():
            try:
                version = _version(path)
                if self._versions.get(name) != version:
                    self._versions[name] = version
                    self._found[path.stem] = _read(path, self.limits)
            except FileNotFoundError:
                continue
            except UserError as error:
                self._found.pop(path.stem, None)
                if first:
                    raise
                log.error("%s", error)


def _version(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _read(path: Path, limits: Limits) -> StoredGlossary:
    try:
        found = StoredGlossary.model_validate(read_json(path.parent, path.name))
        if found.glossary_id != path.stem:
            raise UserError(f"glossary_id is {found.glossary_id[:100]!r}")
        check_sizes([one.entries for one in found.dictionaries], limits)
        for one in found.dictionaries:
            _ = one.glossary  # refuses bad terms
    except (ValidationError, UserError) as error:
        reason = str(error) if isinstance(error, UserError) else f"{error.error_count()} fields are wrong"
        raise UserError(f"{path}: not a glossary: {reason}; fix the file or move it away") from None
    return found


def check_sizes(dictionaries: Iterable[Mapping[str, str]], limits: Limits) -> None:
    """The limits on the terms of one glossary."""
    count = size = 0
    for entries in dictionaries:
        count += len(entries)
        size += sum(len(source.encode()) + len(target.encode()) for source, target in entries.items())
        longest = max((len(text) for pair in entries.items() for text in pair), default=0)
        if longest > limits.term_characters:
            raise over_limit("characters of a term", longest, limits.term_characters, "entries")
    if count > limits.glossary_entries:
        raise over_limit("entries of a glossary", count, limits.glossary_entries, "entries")
    if size > limits.glossary_bytes:
        raise over_limit("bytes of a glossary", size, limits.glossary_bytes, "entries")
