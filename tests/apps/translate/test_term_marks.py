"""Marked terms: how they are written, and what happens where a model ignores them."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from allyouneed.apps.translate.glossary import Glossary, count_term
from allyouneed.apps.translate.spans.carry import AttentionMap, Carrier, read
from allyouneed.apps.translate.spans.spans import protect
from allyouneed.apps.translate.spans.term_marks import END, MARKS, TERM, TRANSLATION, mark_terms
from allyouneed.apps.translate.spans.term_marks import with_translations as obey
from allyouneed.apps.translate.splitting.edits import apply
from allyouneed.apps.translate.translator import Translator
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis

GLOSSARY = Glossary({"dog": "Köter", "Apple": "Apple", "狗": "dog"})
Model = Callable[[str], str]


def shown(text: str) -> str:
    return text.replace(TERM, "⟦").replace(TRANSLATION, "¦").replace(END, "⟧")


@pytest.mark.parametrize(
    ("text", "terms", "expected"),
    [
        ("a dog.", {"dog": "Hund"}, "a⟦ dog¦ Hund⟧."),
        ("dog (dog) l’dog", {"dog": "Hund"}, "⟦dog¦Hund⟧ (⟦dog¦Hund⟧) l’⟦dog¦Hund⟧"),
        ("a dog cat", {"dog": "狗", "cat": "猫"}, "a⟦ dog¦狗⟧⟦ cat¦猫⟧"),
        ("狗和狗狗", {"狗": "dog"}, "⟦狗¦dog⟧和⟦狗¦ dog⟧⟦狗¦ dog⟧"),
        ("none", {"dog": "Hund"}, "none"),
    ],
)
def test_the_space_before_a_term_is_inside_of_its_mark(text: str, terms: dict[str, str], expected: str) -> None:
    assert shown(mark_terms(text, Glossary(terms).find(text))) == expected


def test_a_term_is_counted_as_a_whole_word() -> None:
    assert count_term("Hund", "Hund, Hunde und Hund.") == 2
    assert count_term("gehen wir", "Gehen wir! Dann gehen wir.") == 2
    assert count_term("狗", "狗和狗") == 2
    assert count_term("Hund", "hund") == 0


def late_attention(pairs: Sequence[tuple[str, Hypothesis]]) -> list[AttentionMap]:
    """By characters; all of them attend to the last one of the source."""
    found = []
    for text, one in pairs:
        here, there = ([(n, n + 1) for n in range(size)] for size in (len(text), len(one.tokens)))
        found.append(AttentionMap(torch.eye(len(here))[-1].repeat(len(there), 1), here, there))
    return found


def carrier(model: Model, forced: Model) -> tuple[Carrier, list[str]]:
    """Decodes by functions; the second where phrases are forced."""
    heard: list[str] = []

    def answers(model: Model, texts: list[str]) -> list[list[Hypothesis]]:
        heard.extend(map(shown, texts))
        return [[Hypothesis([ord(char) for char in model(text)], -1.0, -1.0, [-1.0], True)] for text in texts]

    def force(texts: list[str], keys: list[tuple[int, ...]], phrases: list[Counter[str]]) -> list[list[Hypothesis]]:
        heard.extend(f"force {dict(some)}" for some in phrases)
        return answers(forced, texts)

    def decode(texts: list[str], keys: list[tuple[int, ...]]) -> list[list[Hypothesis]]:
        return answers(model, texts)

    def text_of(source: str, found: Hypothesis) -> str:
        assert not MARKS.search(source), "numbers are compared with what the translation should be"
        return "".join(map(chr, found.tokens))

    return Carrier(decode, text_of, late_attention, force), heard


def ignore(text: str) -> str:
    return re.sub(f"{TERM}([^{TRANSLATION}]*){TRANSLATION}[^{END}]*{END}", r"\1", text)


def translate(text: str, model: Model, forced: Model) -> tuple[str, list[str]]:
    found = protect(text, None, GLOSSARY)
    made, heard = carrier(model, forced)
    return made.translate([found.template], [found.spans], [(0,)])[0][0].text, heard


def test_a_model_that_obeys_marks_is_asked_once() -> None:
    text, heard = translate("My dog bit your dog at Apple.", obey, str)
    assert text == "My Köter bit your Köter at Apple."
    assert heard == ["My⟦ dog¦ Köter⟧ bit your⟦ dog¦ Köter⟧ at⟦ Apple¦ Apple⟧."]


def test_a_model_that_ignores_marks_is_forced() -> None:
    text, heard = translate("My dog bit your dog.", ignore, obey)
    assert text == "My Köter bit your Köter."
    assert heard[1] == "force {'Köter': 2}"


def test_marks_go_where_the_translation_of_a_term_went() -> None:
    text, _ = translate("The <b>dog</b> is new, <i>dog</i>", obey, str)
    assert text == "The <b>Köter</b> is new, <i>Köter</i>"


def test_a_term_with_a_character_of_the_marks_is_not_marked() -> None:
    found = protect("a d\x02g", None, Glossary({"d\x02g": "Hund"}))
    made, heard = carrier(str, str)
    assert made.translate([found.template], [found.spans], [(0,)])[0][0].text == "a Hund"
    assert heard == ["a Facebook"]


@pytest.mark.parametrize("useless", [ignore, str])
def test_stand_ins_are_left_where_nothing_else_helps(useless: Model) -> None:
    text, heard = translate("My dog bit {name}.", useless, useless)
    assert text == "My Köter bit {name}."
    assert heard == [
        "My⟦ dog¦ Köter⟧ bit Tom.",
        "force {'Köter': 1}",
        "My⟦ dog¦ Köter⟧ bit Facebook.",
        "My Facebook bit Tom.",
    ]


def test_a_stand_in_is_never_a_marked_term() -> None:
    found = protect("Tom likes {name} and `x`.", None, Glossary({"Tom": "Facebook"}))
    reading = read(found.template, found.spans, marked=True)
    assert reading is not None
    assert shown(reading.text) == "⟦Tom¦Facebook⟧ likes Boston and Paris."


@pytest.mark.parametrize(
    "text", ["A dog.", "dog", "a <b>dog</b> and 😀 dog 😀", "a **dog** `x` dog", "大狗和狗", "x  dog"]
)
def test_what_is_read_leads_back_to_the_source(text: str) -> None:
    found = protect(text, None, GLOSSARY)
    reading = read(found.template, found.spans, marked=True)
    assert reading is not None
    assert TERM in reading.text
    assert apply(reading.text, reading.edits) == text


def test_the_benchmark_compares_the_ways(multilingual: Tokenizer, echo: Callable[..., Folder]) -> None:
    script = Path(__file__).parents[3] / "bench" / "translation" / "glossary.py"
    spec = importlib.util.spec_from_file_location("glossary_bench", script)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    pairs = [("The lazy dog.", "Le chien lent."), ("A fox, a dog.", "Un renard, un chien."), ("Nothing.", "Rien.")]
    cases = bench.find_cases(pairs, [("lazy", "lent"), ("dog", "chien"), ("fox", "loup"), ("Nothing", "nul")], 9)
    assert [case.terms for case in cases] == [{"lazy": "lent"}], "terms are long enough, and in the reference"
    folder = echo(multilingual)
    folder.task["marked_terms"] = True
    rates = {
        name: bench.measure(way, cases, "fr")[0].hits
        for name, way in bench.ways(Translator(folder), "en", "fr").items()
    }
    # a model that copies: it writes what stands in a mark, and the mark too
    assert rates == {"no glossary": 0, "stand-ins": 100, "marked terms": 100, "marked terms, forced": 100}
    assert "marked terms, forced | 100.0 %" in bench.table(Translator(folder), bench.invent(cases), "en", "fr", show=1)
