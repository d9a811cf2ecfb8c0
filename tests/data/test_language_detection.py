"""Language detection."""

from pathlib import Path

import pytest

from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.errors import UserError
from allyouneed.models import shipped

TEXTS = {
    "en": ["The weather is nice today.", "Where is the next station?", "I would like the other one, thank you."],
    "de": ["Das Wetter ist heute schön.", "Wo ist der nächste Bahnhof?", "Ich möchte bitte das andere haben."],
    "zh": ["今天天气很好。", "最近的车站在哪里？", "我想要另外一个。"],
}


@pytest.fixture(scope="module")
def detector() -> LanguageDetector:
    return LanguageDetector.learn(TEXTS)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("the other station", "en"),
        ("THE OTHER STATION", "en"),
        ("das nächste Wetter", "de"),
        ("机器学习很有趣", "zh"),
        ("龘", "zh"),  # a character it has not seen: its script tells
        ("\u3000今天 2026\n", "zh"),
    ],
)
def test_languages_are_detected_by_letters(detector: LanguageDetector, text: str, language: str) -> None:
    assert detector.detect(text) == language


@pytest.mark.parametrize("text", ["", " \n", "12:30", "!?", "👍🏽"])
def test_a_text_without_letters_is_in_no_language(detector: LanguageDetector, text: str) -> None:
    assert detector.detect(text) is None


def test_confident_detection_needs_a_margin(detector: LanguageDetector) -> None:
    assert detector.detect("ist", confident=True) == "de"
    assert detector.detect("in") is not None
    assert detector.detect("in", confident=True) is None


def test_a_saved_detector_gives_the_same_results(detector: LanguageDetector, tmp_path: Path) -> None:
    detector.save(tmp_path / "languages.json")
    found = LanguageDetector.load(tmp_path / "languages.json")
    assert (found.languages, found.scores) == (detector.languages, detector.scores)
    (tmp_path / "languages.json").write_text('{"languages": []}')
    with pytest.raises(UserError, match=r"languages\.json: cannot be read"):
        LanguageDetector.load(tmp_path / "languages.json")


def test_training_on_pairs_with_language_tags(tmp_path: Path) -> None:
    lines = [f"{here}\t{there}\n" for here, there in zip(TEXTS["en"], TEXTS["zh"], strict=True)]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    named = PairFiles(path=tmp_path / "pairs.tsv", **{"from": "en", "to": "zh"})
    found = LanguageDetector.from_files([named, PairFiles(path=tmp_path / "pairs.tsv")])
    assert found is not None
    assert [found.detect(text) for text in ("哪里", "where")] == ["zh", "en"]
    assert LanguageDetector.from_files([PairFiles(path=tmp_path / "pairs.tsv")]) is None


def test_sentences_are_drawn_from_all_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allyouneed.data.language_detection.SAMPLED", 10)
    lines = ["aaa\tbbb\n"] * 50 + ["ccc\tddd\n"] * 50
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    found = LanguageDetector.from_files([PairFiles(path=tmp_path / "pairs.tsv", **{"from": "x", "to": "y"})])
    assert found is not None and {"aaa", "ccc", "bbb", "ddd"} <= set(found.scores)


def test_languages_without_letters_are_left_out() -> None:
    found = LanguageDetector.learn(TEXTS | {"iso": ["2026-11-15"]})
    assert found.languages == ["de", "en", "zh"] and found.detect("the other station") == "en"


def test_unfamiliar_scripts():
    detector = LanguageDetector.learn({"en": ["the cat sees a dog", "a house"], "zh": ["我喜欢机器学习", "很有趣"]})
    assert detector.is_unfamiliar("где вокзал?")
    assert detector.is_unfamiliar("これはペンです")
    for known in ("where is it?", "学习", "Où ça ?", "", "12:30", "iPhone в 2024"):
        assert not detector.is_unfamiliar(known), known


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Das Meeting wurde gecancelled", "de"),
        ("Der neue Release ist live.", "de"),
        ("Unser Marketing Team macht Brainstorming.", "de"),
        ("Das Shopping war teuer.", "de"),
        ("Le feedback du client est bon.", "fr"),
        ("On a fait du shopping.", "fr"),
        ("The zeitgeist has changed.", "en"),
        ("Angela Merkel met Emmanuel Macron in Paris.", "en"),
        ("He ate a croissant and a baguette.", "en"),
        ("请打开Microsoft Word。", "zh"),
        ("I am Tom and you are 汤姆", "en"),
        ("Facebook", "en"),
    ],
)
def test_loan_words_and_names_do_not_outweigh_the_words_around_them(text: str, language: str) -> None:
    detector = LanguageDetector.load(Path(shipped()) / "languages.json")
    assert detector.detect_odds(text)[0] == language


def test_words_can_be_added_to_a_detector_and_are_learned_with_it(detector: LanguageDetector) -> None:
    letters = {run: scores for run, scores in detector.scores.items() if len(run) <= 3 or run[0] != " "}
    assert letters != detector.scores
    without = LanguageDetector(detector.languages, letters)
    assert without.with_words(TEXTS).scores == detector.scores == detector.with_words(TEXTS).scores
    assert without.detect("Das Wetter ist heute schön.") == "de", "a folder of an earlier version has no words"
