"""The direction of a file of pairs, detected from its texts."""

from __future__ import annotations

import json

import pytest

from allyouneed import models
from allyouneed.apps.translate.direction import Direction, find_direction
from allyouneed.apps.translate.routes import Routes
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.errors import UserError

TEXTS = {
    "en": ["Where is the station?", "I have never seen such a thing.", "She reads a book every evening."],
    "de": ["Wo ist der Bahnhof?", "So etwas habe ich noch nie gesehen.", "Sie liest jeden Abend ein Buch."],
    "fr": ["Où est la gare ?", "Je n'ai jamais vu une chose pareille.", "Elle lit un livre tous les soirs."],
    "zh": ["车站在哪里？", "我从来没见过这样的东西。", "她每天晚上都看书。"],
}


@pytest.fixture(scope="module")
def routes() -> Routes:
    """The routes of the bundled translator, without its weights."""
    place = models.HERE / models.TRANSLATOR
    about = json.loads((place / "config.json").read_text(encoding="utf-8"))
    return Routes(
        [(here, there) for here, there in about["directions"]], LanguageDetector.load(place / "languages.json")
    )


@pytest.mark.parametrize("other", ["de", "fr", "zh"])
def test_every_direction_is_detected(routes: Routes, other: str) -> None:
    for here, there in (("en", other), (other, "en")):
        found = find_direction(routes, TEXTS[here], TEXTS[there])
        assert (found.from_, found.to) == (here, there) and f"detected direction {here} → {there}" in found.note
        assert find_direction(routes, TEXTS[here], TEXTS[there], from_=here) == found


def test_one_foreign_text_does_not_count(routes: Routes) -> None:
    found = find_direction(routes, [*TEXTS["en"], "Danke schön!"], [*TEXTS["de"], "Thank you very much!"])
    assert (found.from_, found.to) == ("en", "de")


def test_a_route_via_a_pivot(routes: Routes) -> None:
    found = find_direction(routes, TEXTS["de"], TEXTS["fr"])
    assert (found.from_, found.to) == ("de", "fr") and "detected direction de → en → fr" in found.note


def test_given_languages_are_kept(routes: Routes) -> None:
    assert find_direction(routes, TEXTS["en"], TEXTS["de"], to="fr") == Direction("fr", None)
    one = Routes([("en", "de"), ("fr", "de")], None)
    assert find_direction(one, TEXTS["en"], TEXTS["de"]) == Direction(None, None)


def test_undetectable_directions_are_refused(routes: Routes) -> None:
    with pytest.raises(UserError, match=r"en → zh.*in none of its languages; set one with --from and --to"):
        find_direction(routes, ["1", "2"], ["3", "4"])
    with pytest.raises(UserError, match=r"\(any → de, en → fr\), and no language detector"):
        find_direction(Routes([(None, "de"), ("en", "fr")], None), TEXTS["en"], TEXTS["de"])
