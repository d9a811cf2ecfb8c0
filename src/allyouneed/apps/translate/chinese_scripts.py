"""Simplified and traditional Chinese characters, converted by words with OpenCC's tables: 头发, 发现 → 頭髮, 發現.

The number of characters never changes, so that offsets into a text (alignments, marks) stay valid: where the usual word
of a region is longer or shorter (博客, 部落格), its characters are converted instead.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

Region = Literal["tw", "hk"]
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
LONGEST = 500  # characters at once: OpenCC's time grows with the square of a text without punctuation
# configurations of OpenCC: with the words of the region, then by characters
TO_SIMPLIFIED = ("tw2sp", "tw2s")
TO_TRADITIONAL: dict[Region, tuple[str, ...]] = {"tw": ("s2twp", "s2tw"), "hk": ("s2hk",)}


def is_traditional(text: str) -> bool:
    """Whether a text has characters that simplified Chinese writes otherwise."""
    return _convert(text, ("t2s",)) != text


def to_simplified(text: str) -> str:
    """A text in traditional characters and the words of Taiwan, as mainland China writes it; another, unchanged."""
    return _convert(text, TO_SIMPLIFIED) if is_traditional(text) else text


def to_traditional(text: str, region: Region = "tw") -> str:
    """A text in simplified characters as Taiwan or Hong Kong writes it; traditional characters stay."""
    return _convert(text, TO_TRADITIONAL[region])


def _convert(text: str, configs: tuple[str, ...]) -> str:
    if HAN.search(text) is None:
        return text
    parts = (text[start : start + LONGEST] for start in range(0, len(text), LONGEST))
    return "".join(_convert_part(part, configs) for part in parts)


def _convert_part(text: str, configs: tuple[str, ...]) -> str:
    found = (_converter(name).convert(text) for name in configs)
    return next((one for one in found if len(one) == len(text)), text)


@cache
def _converter(name: str) -> Any:
    from opencc import OpenCC

    return OpenCC(name)
