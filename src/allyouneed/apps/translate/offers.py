"""Which languages translators read and write, and which of several translates a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allyouneed.apps.translate.scripts import ChineseScripts
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.languages import find
from allyouneed.errors import UserError
from allyouneed.folder import LANGUAGES, Folder
from allyouneed.interop.load import about, find_model, load, single_file, vocabularies
from allyouneed.models import find as find_bundled


@dataclass(frozen=True)
class Offer:
    """The languages that a translator reads and writes; none where nothing names them."""

    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    detector: LanguageDetector | None = None

    @classmethod
    def of(
        cls, directions: Iterable[tuple[str | None, str]], languages: Iterable[str], detector: LanguageDetector | None
    ) -> Offer:
        """`directions`: of the training data, where it is known. `languages`: that a token chooses."""
        pairs, chosen = list(directions), sorted(languages)
        chinese = ChineseScripts.of(chosen, detector).simplified
        converted = [] if chinese is None else [f"{chinese}-Hant"]  # from and to simplified Chinese
        named = [here for here, _ in pairs if here is not None]
        sources, targets = named or chosen, chosen or [there for _, there in pairs]
        return cls(tuple(sorted({*sources, *converted})), tuple(sorted({*targets, *converted})), detector)

    @classmethod
    def read(cls, path: Path) -> Offer:
        """That of a folder, without its weights; a single file is loaded."""
        path = find_model(path)
        if single_file(path) is not None:
            return cls.of_folder(load(path))
        detector = LanguageDetector.load(path / LANGUAGES) if (path / LANGUAGES).is_file() else None
        return cls.of(about(path).get("directions") or [], vocabularies(path).source.languages, detector)

    @classmethod
    def of_folder(cls, folder: Folder) -> Offer:
        return cls.of(folder.directions, folder.tokenizers.source.languages, folder.detector)

    def fits(self, source: str | None, target: str | None) -> bool:
        return _among(source, self.sources) and _among(target, self.targets)


def _among(name: str | None, known: Sequence[str]) -> bool:
    return name is None or bool(find(name, known))


def choose(offers: Sequence[Offer], source: str | None, target: str | None, text: str) -> int:
    """The number of the first translator from and into these languages; else of the first whose languages are unknown.
    Without a source, several that read different languages are told apart by the language of `text`."""
    fitting = [number for number, one in enumerate(offers) if one.fits(source, target)]
    fitting = fitting or [number for number, one in enumerate(offers) if not one.targets]
    if not fitting:
        known = "; ".join(f"{', '.join(one.sources)} → {', '.join(one.targets)}" for one in offers)
        asked = " → ".join(name or "any language" for name in (source, target))
        raise UserError(f"no model here translates {asked} (they translate {known})")
    first = offers[fitting[0]].sources
    others = [number for number in fitting if not {*offers[number].sources} <= {*first}]
    if source is not None or not others:
        return fitting[0]
    sources = sorted({name for number in fitting for name in offers[number].sources})
    for detector in (*(one.detector for one in offers), bundled_detector()):
        if detector is not None and {*sources} <= {*detector.languages}:
            found = detector.detect(text)
            return next((number for number in fitting if found in offers[number].sources), fitting[0])
    raise UserError(f"several models translate into {target}; set the source language ({', '.join(sources)})")


def bundled_detector() -> LanguageDetector | None:
    path = find_bundled()
    return None if path is None else LanguageDetector.load(path / LANGUAGES)
