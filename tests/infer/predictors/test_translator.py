"""Promises of the translator to its callers. Most tests use a model that copies its source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allyouneed.apps.translate.translator import Translator, ends_in_loop
from allyouneed.config import ConfigError, parse
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.tasks.translation.confidence import Confidence
from toy_models import EOS, random_model

MakeFolder = Callable[..., Folder]
ENGLISH = "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you very much!"
CHINESE = "你好，世界。今天天气很好！我们去公园散步吧？好的，走吧。"
FRENCH = "Tous les êtres humains naissent libres et égaux en dignité et en droits."
UNSEEN = "Привет 👍🏽 \u200bمرحبا naïve <pad> </s> <2en> \x00 𝔘𝔫𝔦"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        " \n\t\n  ",
        "hello",
        "  hello  ",
        "\u3000你好\u3000",
        "one\ntwo\r\n\r\n three \rfour\n",
        ENGLISH,
        CHINESE,
        UNSEEN,
        f"{ENGLISH}\n\n  {CHINESE}\n{UNSEEN}\n",
    ],
)
@pytest.mark.parametrize("options", [{}, {"method": "greedy"}, {"method": "sample", "top_p": 0.5}])
def test_lines_and_whitespace_are_kept(
    echo: MakeFolder, tokenizer: Tokenizer, text: str, options: dict[str, object]
) -> None:
    translator = Translator(echo(tokenizer))
    assert translator.translate(text, **options) == text
    assert translator.translate([text, "x", text], **options) == [text, "x", text]


def test_an_empty_list_is_an_empty_list(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    translator = Translator(echo(tokenizer))
    assert translator.translate([]) == []
    assert list(translator.translate_stream([])) == []
    for wrong in ("a text", None):
        with pytest.raises(UserError, match="expected an iterable of texts"):
            translator.translate_stream(wrong)


def test_only_words_reach_the_model(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    folder = echo(tokenizer)
    Translator(folder).translate(["", "  \n ", " two words \n"])
    assert folder.model.heard == [[*tokenizer.encode("two words"), tokenizer.eos]]


MARKDOWN = """# Title

- [ ] open https://x.com/a?b=1 and log in
  1. write to `a@b.com`
> <p>Hello <b>{name}</b>.</p> 😀

```python
print("hello")
```
12:30 - 3.14
    a) %d files in /usr/bin, 5 kg
"""


def test_frames_and_spans_are_kept(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    folder = echo(tokenizer)
    assert Translator(folder).translate(MARKDOWN, protect=True) == MARKDOWN
    heard = " ".join(tokenizer.decode(tokens) for tokens in folder.model.heard)
    assert not {"-", "#", ">", "print", "3.14", "https", "{name}", "<b>", "😀", "%d", "/usr"} & {*heard.split()}
    assert "print" not in heard and "https" not in heard and "Title" in heard


@pytest.mark.parametrize(
    "text", ["The dog sleeps.", "He is 30 years old, isn't he?", "你好，世界。", "« Bonjour ! » dit-elle."]
)
def test_a_model_without_languages_reads_everything(echo: MakeFolder, tokenizer: Tokenizer, text: str) -> None:
    folder = echo(tokenizer)
    (found,) = Translator(folder).translate_full([text])
    assert (found.text, found.notes) == (text, []) and folder.model.heard == [[*tokenizer.encode(text), tokenizer.eos]]


@pytest.mark.parametrize("text", ["The dog sleeps.", "He is 30, isn't he?", "你好，世界。", "« Bonjour ! » dit-elle."])
def test_plain_sentences_are_read_as_they_are(echo: MakeFolder, tokenizer: Tokenizer, text: str) -> None:
    folder = echo(tokenizer)
    assert Translator(folder).translate([text, text], protect=True) == [text, text]
    assert folder.model.heard == [[*tokenizer.encode(text), tokenizer.eos]]  # equal sources are read once


def test_alignments_of_spans_point_into_both_texts(tokenizer: Tokenizer) -> None:
    folder = Folder(random_model(5, vocab=tokenizer.size, ends=-9.0), Vocabularies(tokenizer, tokenizer))
    text = "- Please open https://x.com/a?b=1 and <b>read</b> the `code` 😀 first."
    (found,) = Translator(folder).translate_full([text], align=True, max_length=12, protect=True)
    assert found.alignment
    for link in found.alignment:
        assert text[slice(*link.source_span)] == link.source != ""
        assert found.text[slice(*link.target_span)] == link.target != ""
    for span in ("https://x.com/a?b=1", "<b>", "</b>", "`code`", "😀"):
        assert found.text.count(span) == 1


def test_invalid_bytes_are_never_returned(tokenizer: Tokenizer) -> None:
    """A model of random weights generates bytes that form no character."""
    translator = Translator(Folder(random_model(vocab=tokenizer.size), Vocabularies(tokenizer, tokenizer)))
    found = translator.translate_full(["one", "two", "three", "字 \ufffd"], best=2, max_length=20, protect=True)
    assert not any("\ufffd" in candidate.text for one in found for candidate in one.candidates)
    noted = [note for one in found for note in one.notes if getattr(note, "kind", "") == "characters"]
    assert noted and "form no character" in noted[0]


def test_different_numbers_and_low_scores_are_noted(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    swap = {tokenizer.encode("8")[-1]: tokenizer.encode("7")[-1]}
    (found,) = Translator(echo(tokenizer, swap)).translate_full(["It was 81."], protect=True)
    assert [note.kind for note in found.notes] == ["numbers"] and "81, 71" in found.notes[0]
    (plain,) = Translator(echo(tokenizer)).translate_full(["It was 81."], protect=True)
    assert plain.notes == []
    random = Translator(Folder(random_model(vocab=tokenizer.size), Vocabularies(tokenizer, tokenizer)))
    notes = random.translate_full(["hello"], method="sample", temperature=3.0, protect=True)[0].notes
    assert any(getattr(note, "kind", "") == "score" and "low score" in note for note in notes)


def test_a_long_text_is_split_by_sentence_and_joined(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    folder = echo(tokenizer)
    text = "  ".join([ENGLISH] * 4) + "\t" + FRENCH
    (found,) = Translator(folder).translate_full([text])
    assert (found.text, found.notes) == (text, [])
    assert len(folder.model.heard) == 4  # thirteen sentences; equal ones are read once
    chinese = CHINESE * 5
    assert Translator(folder).translate(chinese) == chinese


def test_a_short_text_is_translated_whole(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    folder = echo(tokenizer)
    Translator(folder).translate("How are you? I am fine.")
    assert len(folder.model.heard) == 1


def test_the_separator_of_sentences_fits_the_target_script(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    stop, wide = tokenizer.encode("x.")[-1], tokenizer.encode("好。")
    assert tokenizer.decode([stop]) == "."
    text = "很。" * 40
    swap = dict.fromkeys(tokenizer.encode("很"), tokenizer.encode("x")[0])
    swap |= dict.fromkeys(wide[len(tokenizer.encode("好")) :], stop)
    english = Translator(echo(tokenizer, swap)).translate(text)
    assert english.split(" ") == [english.split(" ")[0]] * 40


@pytest.mark.parametrize(
    "text", ["word " * 300 + "end", "a" * 900, "春" * 500, "one two, " * 150 + "done.", "é\u0301" * 400]
)
def test_a_long_sentence_is_translated_in_parts_with_a_note(echo: MakeFolder, tokenizer: Tokenizer, text: str) -> None:
    folder = echo(tokenizer)
    (found,) = Translator(folder, max_tokens=100).translate_full([text])
    assert found.text == text
    assert max(map(len, folder.model.heard)) <= 100
    assert any("training length of 100 tokens" in note for note in found.notes)


def test_a_translation_without_an_end_is_noted(tokenizer: Tokenizer) -> None:
    folder = Folder(random_model(vocab=tokenizer.size, ends=-9.0), Vocabularies(tokenizer, tokenizer))
    (found,) = Translator(folder).translate_full(["hello"], max_length=30)
    assert ["stopped after 30 tokens" in note for note in found.notes] == [True]
    assert ends_in_loop([1, 2, 3] * 4) and ends_in_loop([9, 5, 5, 5, 5]) and not ends_in_loop([1, 2, 3, 4] * 3)


def test_candidates_are_sorted_and_distinct(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    translator = Translator(echo(tokenizer))
    for text in ("hello", ENGLISH * 3):
        (found,) = translator.translate_full([text], best=4)
        scores = [candidate.score for candidate in found.candidates]
        assert len({candidate.text for candidate in found.candidates}) >= 2
        assert len(scores) == 4 and scores == sorted(scores, reverse=True)
        assert found.text == found.candidates[0].text == text


def test_samples_do_not_depend_on_chunking(tokenizer: Tokenizer) -> None:
    translator = Translator(Folder(random_model(vocab=tokenizer.size), Vocabularies(tokenizer, tokenizer)))
    texts = ["one", ENGLISH * 2, "", "two", "three"]
    options = {"method": "sample", "seed": 3, "max_length": 12}
    whole = [t.text for t in translator.translate_full(texts, **options)]
    assert whole == [t.text for t in translator.translate_stream(texts, chunk=2, **options)]
    assert whole != translator.translate(texts, **options | {"seed": 4})


def test_a_stream_is_read_lazily(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    read = []

    def endless() -> Iterator[str]:
        for number in range(10**9):
            read.append(number)
            yield f"line {number}\n"

    found = Translator(echo(tokenizer)).translate_stream(endless(), chunk=5, beam=1)
    assert [next(found).text for _ in range(7)] == [f"line {number}\n" for number in range(7)]
    assert len(read) == 10


def test_languages_are_named_and_checked(echo: MakeFolder, tokenizer: Tokenizer, multilingual: Tokenizer) -> None:
    folder = echo(multilingual)
    translator = Translator(folder)
    assert translator.languages == ["en", "fr", "zh"]
    assert translator.translate("hello", to="fr") == "hello"
    assert folder.model.heard[-1][0] == multilingual.language("fr")
    with pytest.raises(UserError, match="several target languages; set one: en, fr, zh"):
        translator.translate("hello")
    with pytest.raises(UserError, match=r"unknown target language 'de' \(allowed: en, fr, zh\)"):
        translator.translate_stream(["hello"], to="de")
    with pytest.raises(UserError, match="one target language"):
        Translator(echo(tokenizer)).translate("hello", to="en")


def test_a_models_own_decoding_is_the_default_and_requests_change_it(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    folder = echo(tokenizer)
    folder.decoding = {"max_length": 2}
    translator = Translator(folder)
    assert translator.translate("a b c") == tokenizer.decode(tokenizer.encode("a b c")[:2]).strip()
    assert translator.translate("a b c", max_length=50) == "a b c"
    assert translator.translate("a b c", decoding=Decoding()) == "a b c"
    with pytest.raises(ConfigError, match="did you mean 'beam'"):
        translator.translate("a", beams=3)


def test_alignments_point_into_both_texts(tokenizer: Tokenizer) -> None:
    translator = Translator(
        Folder(random_model(5, vocab=tokenizer.size, ends=-9.0), Vocabularies(tokenizer, tokenizer))
    )
    text = f"  {ENGLISH}\n{CHINESE} {ENGLISH}"
    (found,) = translator.translate_full([text], align=True, max_length=12)
    assert found.alignment
    for link in found.alignment:
        assert text[slice(*link.source_span)] == link.source != ""
        assert found.text[slice(*link.target_span)] == link.target != ""
    spoken_for = {place for link in found.alignment for place in range(*link.target_span)}
    assert all(char.isspace() for place, char in enumerate(found.text) if place not in spoken_for)
    assert translator.translate_full(["x"])[0].alignment is None


def test_invalid_inputs_are_user_errors(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    translator = Translator(echo(tokenizer))
    with pytest.raises(UserError, match="must be a string, not int"):
        translator.translate([3])  # type: ignore[list-item]
    for texts, kind in ((None, "NoneType"), (5, "int"), (["a", None], "NoneType"), (b"x", "bytes"), ([b"x"], "bytes")):
        for ask in (translator.translate, translator.translate_full):
            with pytest.raises(UserError, match=f"^a text must be a string, not {kind}$"):
                ask(texts)  # type: ignore[operator]
    assert translator.translate(iter(["x"])) == translator.translate(["x"])  # type: ignore[call-overload]
    with pytest.raises(UserError, match="takes a list"):
        translator.translate_full("hello")
    with pytest.raises(UserError, match="surrogate"):
        translator.translate("\ud800")
    assert tokenizer.eos == EOS


def test_one_engine_serves_all_calls(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    translator = Translator(echo(tokenizer))
    engine = translator.engine
    translator.translate(["one", "two"])
    assert translator.engine is engine
    translator.model = echo(tokenizer).model
    assert translator.engine is not engine and translator.engine.model is translator.model
    assert translator.translate("one") == "one"
    translator.exact = True
    assert translator.engine.runner.exact


def test_confidence_is_calibrated_by_the_folder(tmp_path: Path, echo: MakeFolder, tokenizer: Tokenizer) -> None:
    tree = {
        "weights": [1.0, 0.0, 0.0, -1.0, -9.0, 0.0, 0.0], "bias": {"en-de": 2.0, "de-en": 4.0},
        "length": {"en-de": 0.0}, "word": [1.0, 0.5, 0.0], "level": {"de": 50.0},
    }  # fmt: skip
    folder = Folder(random_model(5, vocab=tokenizer.size, ends=-9.0), Vocabularies(tokenizer, tokenizer))
    (before,) = Translator(folder).translate_full(["hello"], max_length=12, protect=True, words=True)
    assert before.confidence is None and before.words is None
    folder.confidence = parse(Confidence, tree, "test")
    folder.save(tmp_path / "model")
    translator = Translator(Folder.load(tmp_path / "model"))
    assert translator.folder.confidence == folder.confidence
    text = "- Please open https://x.com/a?b=1 and read. Then go: 中文 <b>read</b> 😀 first."
    (found,) = translator.translate_full([text], max_length=12, protect=True, words=True)
    assert found.confidence is not None and 0 < found.confidence < 1 and found.words
    assert all(found.text[slice(*word.span)] == word.text and 0 <= word.confidence <= 1 for word in found.words)
    # the mean log-probability decides, numbers that differ all the more; an unknown direction has the mean of all
    swap = {tokenizer.encode("8")[-1]: tokenizer.encode("7")[-1]}
    sure, unsure = echo(tokenizer), echo(tokenizer, swap)
    sure.confidence = unsure.confidence = folder.confidence
    (good,), (bad,) = (Translator(one).translate_full(["It was 81."], protect=True) for one in (sure, unsure))
    assert good.confidence == pytest.approx(1 / (1 + math.exp(-3.0)), abs=0.02) and good.notes == []
    assert bad.confidence < 0.01 and {note.kind for note in bad.notes} == {"numbers", "confidence"}
    assert "low confidence (0 %)" in bad.notes[1]
    with pytest.raises(UserError, match=r"weights\[0\]: expected a finite number"):
        parse(Confidence, tree | {"weights": [float("nan")] * 7}, "confidence")


def test_capitals_are_read_in_lower_case_and_written_again(echo: MakeFolder, tokenizer: Tokenizer) -> None:
    folder = echo(tokenizer)
    text = "DIE STRAẞE IST LANG! GEH ZU {name} UND `Code`."
    (found,) = Translator(folder, together=200).translate_full([text], protect=True)
    assert found.text == text
    assert folder.model.heard[0] == [*tokenizer.encode("Die straße ist lang! Geh zu Tom und Facebook."), tokenizer.eos]
    for other in ("NASA", "IBM, UNO", "Hello WORLD", "你好 OK"):  # acronyms, mixed text
        folder = echo(tokenizer)
        assert Translator(folder).translate(other, protect=True) == other
        assert folder.model.heard == [[*tokenizer.encode(other), tokenizer.eos]]
    plain = echo(tokenizer)
    assert Translator(plain).translate("HELLO THERE", protect=False) == "HELLO THERE"
    assert plain.model.heard == [[*tokenizer.encode("HELLO THERE"), tokenizer.eos]]
