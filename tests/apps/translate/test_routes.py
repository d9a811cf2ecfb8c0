"""The languages of a translation that names neither source nor target."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from allyouneed import models
from allyouneed.apps.translate.routes import Route, Routes
from allyouneed.apps.translate.translator import Translator
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.folder import Folder

ENGLISH, FRENCH, CHINESE = (
    "The quick brown fox jumps over the dog.",
    "Tous les êtres naissent libres.",
    "今天天气很好！",
)
DIRECTIONS: list[tuple[str | None, str]] = [("en", "zh"), ("zh", "en"), ("en", "fr"), ("fr", "en")]


@pytest.fixture(scope="module")
def detector() -> LanguageDetector:
    return LanguageDetector.learn({"en": [ENGLISH], "fr": [FRENCH], "zh": [CHINESE]})


@pytest.fixture
def translator(echo: Callable[..., Folder], multilingual: Tokenizer, detector: LanguageDetector) -> Translator:
    folder = echo(multilingual)
    folder.directions, folder.detector = DIRECTIONS, detector
    return Translator(folder)


@pytest.mark.parametrize(
    ("text", "to", "from_", "here", "into"),
    [
        (CHINESE, None, None, "zh", ("en",)),
        (FRENCH, None, None, "fr", ("en",)),
        (ENGLISH, None, None, "en", ("zh",)),  # the first its data names
        ("12:30", None, None, None, ("en",)),
        (ENGLISH, "fr", None, "en", ("fr",)),
        (CHINESE, "fr", None, "zh", ("en", "fr")),  # never learnt, so through English
        (ENGLISH, "fr", "zh", "zh", ("en", "fr")),  # as told, whatever it looks like
        (FRENCH, "fr", None, "fr", ()),
        ("12:30", "fr", None, None, ("fr",)),
    ],
)
def test_languages_given_and_detected_select_the_route(detector, text, to, from_, here, into):
    assert Routes(DIRECTIONS, detector).of(text, to, from_) == Route(here, into)


def test_without_a_detector_nothing_is_detected():
    assert Routes(DIRECTIONS, None).of(CHINESE, "fr", None) == Route(None, ("fr",))


def test_a_model_without_source_languages_is_direct(detector):
    assert Routes([(None, "fr"), (None, "en")], detector).of(CHINESE, "fr", None) == Route("zh", ("fr",))


def test_without_a_pivot_there_is_no_default(detector):
    """English translates into two others, so a request must name one."""
    assert Routes([("en", "fr"), ("en", "zh")], detector).of(ENGLISH, None, None) == Route("en", (None,))


def test_the_target_language_reaches_the_model(translator: Translator, multilingual: Tokenizer) -> None:
    found = translator.translate_full([ENGLISH, CHINESE, FRENCH])
    assert [one.text for one in found] == [ENGLISH, CHINESE, FRENCH], "in the order of the questions"
    assert [one.route for one in found] == [["en", "zh"], ["zh", "en"], ["fr", "en"]]
    heard = {tuple(tokens) for tokens in translator.model.heard}
    for text, to in ((ENGLISH, "zh"), (CHINESE, "en"), (FRENCH, "en")):
        assert (multilingual.language(to), *multilingual.encode(text), multilingual.eos) in heard


def test_a_missing_direction_goes_through_a_pivot(translator: Translator, multilingual: Tokenizer) -> None:
    (found,) = translator.translate_full([CHINESE], "fr", best=2)
    assert (found.source, found.text, found.route) == (CHINESE, CHINESE, ["zh", "en", "fr"])
    assert len(found.candidates) == 2
    assert [tokens[0] for tokens in translator.model.heard] == [multilingual.language(to) for to in ("en", "fr")]
    with pytest.raises(UserError, match="alignment requires a direct direction, not zh → en → fr"):
        translator.translate_full([CHINESE], "fr", align=True)


@pytest.mark.parametrize(("to", "from_"), [("FR", "English"), ("fr-CA", "en-US"), ("French", "英语"), ("法语", None)])
def test_languages_are_known_by_all_their_names(translator: Translator, to: str, from_: str | None) -> None:
    (found,) = translator.translate_full([ENGLISH], to, from_=from_)
    assert found.route == ["en", "fr"]


LOOKS_FRENCH = ["The entrée includes a beverage.", "Space travel is dangerous.", "Are the questions important?"]
REALLY_FRENCH = "Je ne sais pas du tout ce que vous voulez dire par là, monsieur."
PLAIN = ["She reads a book every evening.", "Where is the station?", "I have never seen such a thing."]


@pytest.fixture(scope="module")
def shipped_routes() -> Routes:
    """The routes of the bundled translator, without its weights."""
    about = json.loads((models.HERE / models.TRANSLATOR / "config.json").read_text(encoding="utf-8"))
    detector = LanguageDetector.load(models.HERE / models.TRANSLATOR / "languages.json")
    return Routes([(here, there) for here, there in about["directions"]], detector)


def test_the_majority_of_a_list_decides_what_is_in_the_target_language(shipped_routes: Routes) -> None:
    found = shipped_routes.of_all([*PLAIN, *LOOKS_FRENCH, REALLY_FRENCH, *PLAIN], "fr", None)
    assert [route.into for route in found] == [("fr",)] * 6 + [()] + [("fr",)] * 3
    assert {route.here for route in found[:6]} == {"en"}, "they follow the others"
    french = shipped_routes.of_all([REALLY_FRENCH, "Il pleut depuis ce matin, hélas.", PLAIN[0], "..."], "fr", None)
    assert [route.into for route in french] == [(), (), ("fr",), ("fr",)]
    assert shipped_routes.of_all([REALLY_FRENCH, PLAIN[0]], "fr", None)[0].into == (), "no majority: each for itself"


@pytest.mark.parametrize(
    ("text", "to"), [("Oui.", "fr"), ("Je lis.", "fr"), ("你好。", "zh"), ("我是Tom Hunter，你呢？", "de")]
)
def test_short_and_mixed_texts_are_never_skipped(shipped_routes: Routes, text: str, to: str) -> None:
    assert shipped_routes.of(text, to, None).into[-1:] == (to,)
    assert all(route.into[-1:] == (to,) for route in shipped_routes.of_all([text] * 3, to, None))


def test_a_text_in_the_target_language_is_unchanged(translator: Translator) -> None:
    (found,) = translator.translate_full([FRENCH], "fr")
    assert (found.text, translator.model.heard) == (FRENCH, [])
    assert found.notes == [f"{FRENCH!r}: is already in fr"] and found.skipped
    with pytest.raises(UserError, match="source and target language are both 'fr'"):
        translator.translate(FRENCH, "fr", from_="fr")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "de"}, r"unknown target language 'de' \(allowed: en"),
        ({"from_": "de"}, r"unknown source language 'de' \(allowed: en"),
        ({"to": "frr"}, r"unknown target language 'frr' \(did you mean 'fr'\?\)"),
        ({"from_": "frr"}, r"unknown source language 'frr' \(did you mean 'fr'\?\)"),
    ],
)
def test_unknown_languages_are_refused_at_once(translator: Translator, options: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        translator.translate_stream([ENGLISH], **options)


def test_samples_do_not_depend_on_the_batch(translator: Translator) -> None:
    options = {"method": "sample", "temperature": 3.0, "seed": 5}
    mixed = translator.translate([CHINESE, FRENCH, ENGLISH], **options)
    later = [translator.translate_full([text], first=n, **options)[0].text for n, text in enumerate([CHINESE, FRENCH])]
    assert mixed[:2] == later and mixed != [CHINESE, FRENCH, ENGLISH]
