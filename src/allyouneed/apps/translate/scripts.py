"""Traditional Chinese for a model that knows simplified characters only: its sources and answers are converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allyouneed.apps.translate.chinese_scripts import Region, to_simplified, to_traditional
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.languages import parse_name

# frequent characters of traditional Chinese: a model whose detector knows several of them was trained with it
FREQUENT = "這個們來說時會國對後過學還沒麼"
KNOWN = 3
REGIONS: dict[str, Region] = {"hk": "hk", "mo": "hk"}


@dataclass(frozen=True)
class ChineseScripts:
    """`simplified`: the model's code for Chinese, if it knows simplified characters only."""

    simplified: str | None

    @classmethod
    def of(cls, languages: Sequence[str], detector: LanguageDetector | None) -> ChineseScripts:
        """The scripts of a model with these languages. What an imported model without a detector was trained with is
        unknown: it reads its sources as they are."""
        found = [code for code in languages if parse_name(code).language == "zh"]
        if detector is None or len(found) != 1 or parse_name(found[0]).script == "hant":
            return cls(None)
        return cls(None if sum(char in detector.scores for char in FREQUENT) >= KNOWN else found[0])

    @property
    def read(self) -> Callable[[str], str] | None:
        """How a source is converted for the model; None: not at all."""
        return None if self.simplified is None else to_simplified

    def writer(self, asked: str | None, code: str | None) -> Callable[[str], str] | None:
        """How an answer in the language `code` is converted for a user who asked for this name (`zh-TW`, `zh-Hans`).
        None: not at all."""
        if asked is None or code is None or code == asked or parse_name(code).script is not None:
            return None
        name = parse_name(asked)
        if name.language != "zh" or name.script is None:
            return None
        if name.script == "hant":
            region: Region = next((REGIONS[tag] for tag in name.subtags if tag in REGIONS), "tw")
            return lambda text: to_traditional(text, region)
        return to_simplified
