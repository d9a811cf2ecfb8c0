"""Names of people, places, languages and things in two languages, from the sources used as `names`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pairs import HAN, Pair, letters_and_digits

from allyouneed.errors import UserError
from collecting import packages
from collecting.monolingual import wikipedia
from collecting.repositories import Repository

LANGUAGES = ("de", "fr", "zh")
NO_NAME = re.compile(r"列表|^小行星|陨石坑$|[A-Za-z]")  # titles without a name to translate
ENGLISH_NAME = re.compile(r"(?!(?:Born|Lit|Chin|Pinyin)\b)[A-Z][A-Za-z0-9 .,'’&-]{2,60}$")
BRACKETED = re.compile(  # 《西游记》（英语：Journey to the West，…
    r"[》」]?\s*[（(](?:(?:英语|英文|英語|英文名|英文名称)[：:为]\s*)?"
    r"[“\"]?([A-Za-z][^（）()，；。,;、：:”\"]{1,60})[”\"]?[，；,;、）)]"
)


@dataclass(frozen=True)
class Packages:
    """The files of a source that is one or several packages in a folder."""

    folder: Path
    names: tuple[str, ...]

    def check(self) -> None:
        """Raises UserError if one is not there."""
        missing = [name for name in self.names if packages.find(self.folder, name) is None]
        if missing:
            raise UserError(f"no package {', '.join(missing)} in {self.folder}: get it by `npm pack` or `apt download`")

    def files(self, pattern: str) -> Iterator[tuple[re.Match[str], bytes]]:
        for path in filter(None, (packages.find(self.folder, name) for name in self.names)):
            yield from packages.files(path, pattern)


def cldr(source: Packages, language: str) -> Iterator[Pair]:
    """Territories and their parts, languages, scripts, and the cities of time zones."""
    chosen = rf"/(en|{language})(?:\.json|/(?:territories|languages|scripts|timeZoneNames|subdivisions)\.json)$"
    names: dict[str, dict[tuple[str, ...], str]] = {"en": {}, language: {}}
    for found, content in source.files(chosen):
        for path, name in packages.json_leaves(content):
            zone = "timeZoneNames" in path and path[-1] != "exemplarCity"
            if not zone and not path[-1].startswith("_") and "version" not in path[-1].lower() and "{" not in name:
                names[found[1]][tuple(key for key in path if key != found[1])] = name
    for key, name in names[language].items():
        if key in names["en"]:
            yield names["en"][key], name


def iso_codes(source: Packages, language: str) -> Iterator[Pair]:
    locale = "zh_CN" if language == "zh" else language
    standards = r"iso_(?:3166-[123]|4217|639-[23]|15924)"
    for _, content in source.files(rf"/{locale}/LC_MESSAGES/{standards}\.mo$"):
        yield from ((one, two) for one, two in packages.catalog(content) if one != two)


def world_countries(source: Packages, language: str) -> Iterator[Pair]:
    code = {"de": "deu", "fr": "fra", "zh": "zho"}[language]
    for _, content in source.files(r"^[^/]+/countries\.json$"):
        for country in json.loads(content):
            for kind in ("common", "official") if code in country["translations"] else ():
                yield country["name"][kind], country["translations"][code][kind]


def osm_tagging(source: Packages, language: str) -> Iterator[Pair]:
    """Labels of map features, without lists of synonyms and texts with placeholders."""
    locale = "zh-CN" if language == "zh" else language
    texts = {
        found[1]: {path[1:]: text for path, text in packages.json_leaves(content)}
        for found, content in source.files(rf"dist/translations/(en|{locale})\.json$")
    }
    for path, other in texts[locale].items():
        english = texts["en"].get(path, "")
        if path[-1] in ("terms", "aliases") or re.search(r"[{\n]|\.\.\.", english) or HAN.search(english):
            continue
        if "\n" not in other and letters_and_digits(english) != letters_and_digits(other):
            yield english, other


def natural_earth(source: Repository, language: str) -> Iterator[Pair]:
    for _, content in source.files(r"\d+m_(cultural|physical)/.*\.dbf$"):
        for row in packages.records(content):
            if len(row.get("NAME_EN", "")) > 1:
                yield row["NAME_EN"], row.get(f"NAME_{language.upper()}", "")


def wiki_names(source: Repository, language: str) -> Iterator[Pair]:
    """Titles of Chinese articles, with the English name in the brackets after it; nothing in other languages."""
    for title, text in wikipedia(source) if language == "zh" else ():
        name = re.sub(r"\s*[（(].*?[)）]$", "", title)
        opening = text[len(title) : len(title) + 250].strip().lstrip("《「")
        if NO_NAME.search(name) or not opening.startswith(name):
            continue
        found = BRACKETED.match(opening, len(name))
        english = found[1].strip() if found else ""
        if ENGLISH_NAME.match(english) and sum(map(str.islower, english)) > 1:
            yield english, name


FROM_PACKAGES: dict[str, tuple[Callable[[Packages, str], Iterator[Pair]], tuple[str, ...]]] = {
    "cldr-names": (cldr, ("cldr-localenames-full", "cldr-dates-full", "cldr-subdivisions-full")),
    "iso-codes": (iso_codes, ("iso-codes",)),
    "world-countries": (world_countries, ("world-countries",)),
    "osm-tagging": (osm_tagging, ("openstreetmap-id-tagging-schema",)),
}
FROM_REPOSITORIES: dict[str, Callable[[Repository, str], Iterator[Pair]]] = {
    "natural-earth": natural_earth,
    "wiki-names": wiki_names,
}
