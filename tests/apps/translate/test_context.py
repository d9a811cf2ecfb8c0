"""Sentences before a sentence are read with it, by models that were trained so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from allyouneed.apps.serve.dialects.translation import service
from allyouneed.apps.translate.translator import Translator
from allyouneed.cli.text_commands import CHUNK, LineHistory
from allyouneed.data.batches.context import BREAK
from allyouneed.data.files.pairs import Pair
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, train
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from infer_fixtures import TEXT

LINES = ["The fox.", "I am fine.", "How are you?", "", "Thank you.", "The dog."]


@pytest.fixture(scope="module")
def breaking() -> Tokenizer:
    return train(TokenizerConfig(vocab=400, specials=(BREAK,)), TEXT * 3, languages=["en", "fr"])


@pytest.fixture
def echo_of(echo: Callable[..., Folder], breaking: Tokenizer) -> Callable[..., tuple[Translator, Callable[[], Any]]]:
    """A translator that was trained with context and copies its source, and what it has read since."""

    def make(**context: Any) -> tuple[Translator, Callable[[], Any]]:
        folder = replace(echo(breaking), task={"kind": "translation", "context": {"sentences": 2} | context})
        translator = Translator(folder)
        heard: Any = folder.model.heard

        def read() -> list[list[str]]:
            found, mark = [], breaking.special(BREAK)
            for tokens in heard:
                texts: list[list[int]] = [[]]
                for token in tokens:
                    texts.append([]) if token == mark else texts[-1].append(token)
                found.append([breaking.decode(ids) for ids in texts])
            heard.clear()
            return sorted(found)

        return translator, read

    return make


def test_each_line_is_read_with_the_lines_before_it_in_its_document(echo_of: Any) -> None:
    translator, read = echo_of()
    translator.translate(LINES, "fr", context=2, protect=False)
    assert read() == sorted(
        [LINES[:1], LINES[:2], LINES[:3], LINES[4:5], LINES[4:]],
    )
    list(translator.translate_stream(LINES, "fr", context=1, chunk=2, protect=False))
    assert read() == sorted([LINES[:1], LINES[:2], LINES[1:3], LINES[4:5], LINES[4:]])
    translator.translate(LINES[:2], "fr", protect=False)
    assert read() == sorted([LINES[1:2], LINES[:1]])
    # the language token stands before the sentence itself, not before its context
    translator.translate(["The dog."], "fr", context="The fox.", protect=False)
    (tokens,) = translator.model.heard
    assert tokens.index(translator.source.language("fr")) == tokens.index(translator.source.special(BREAK)) + 1


def test_a_given_text_and_earlier_sentences_of_the_text_are_context(echo_of: Any) -> None:
    translator, read = echo_of()
    translator.together = 1  # sentence by sentence
    translator.translate(["The fox. The dog. Thank you."], "fr", context="How are you? I am fine.", protect=False)
    assert read() == sorted(
        [
            ["How are you?", "I am fine.", "The fox."],
            ["I am fine.", "The fox.", "The dog."],
            ["The fox.", "The dog.", "Thank you."],
        ]
    )
    translator.translate(["The fox.", "The dog."], "fr", context=[["Thank you."], []], protect=False)
    assert read() == [["Thank you.", "The fox."], ["The dog."]]


def test_context_that_exceeds_the_training_length_is_left_out_sentence_by_sentence(echo_of: Any) -> None:
    translator, read = echo_of()
    long, near = "The quick brown fox jumps over the lazy dog.", "I am fine."
    translator.max_tokens = len(translator.source.encode(f"{near}The dog.")) + 4  # break, language and end
    translator.translate(["The dog."], "fr", context=[[long, near]], protect=False)
    assert read() == [[near, "The dog."]]


def test_a_model_that_writes_its_context_as_well_is_read_from_the_last_break(echo_of: Any) -> None:
    translator, _ = echo_of(target=True)
    assert translator.translate(LINES[:3], "fr", context=2, protect=False) == LINES[:3]
    other, _ = echo_of()
    assert other.translate(LINES[:2], "fr", context=1, protect=False) == [LINES[0], LINES[0] + LINES[1]]


def test_the_server_reads_deepls_context_before_each_text(echo_of: Any) -> None:
    translator, read = echo_of()
    for format in ("text", "html"):
        service._translate(translator, service.Job(LINES[:2], None, "fr", format=format, context="The dog."))
        assert read() == sorted([["The dog.", LINES[0]], ["The dog.", LINES[1]]])


def test_judging_reads_the_context_of_the_examples(echo_of: Any) -> None:
    translator, read = echo_of()
    pair = Pair("The dog.", "The dog.", "f", 2, to="fr", context=(("The fox.", "x"),))
    translator.judge([pair])
    assert read() == [["The fox.", "The dog."]]


@pytest.mark.parametrize(
    ("context", "says"),
    [
        (3, "up to 2 sentences, not 3"),
        (-1, "up to 2 sentences, not -1"),
        ([["a"], ["b"]], "2 lists of sentences"),
    ],
)
def test_what_it_was_not_trained_with_is_refused(echo_of: Any, context: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        echo_of()[0].translate(["The dog."], "fr", context=context)


def test_a_model_without_context_refuses(echo: Callable[..., Folder], tokenizer: Tokenizer) -> None:
    translator = Translator(echo(tokenizer))
    with pytest.raises(UserError, match=r"was not trained with context sentences; remove context \(--context\)"):
        translator.translate([], context=1)  # before any text is read
    assert translator.translate(["The dog."], context=0) == ["The dog."]


def test_lines_are_remembered_across_chunks_and_inputs() -> None:
    history = LineHistory(2)
    see = history.watch(lambda line: line == "code")
    read = [see(line) for line in ["a", "code", "b", "c"]]
    assert read == [False, True, False, False]
    assert (history.before(0), history.before(1), history.before(2), history.before(4)) == (
        [], ["a"], ["a", ""], ["b", "c"],
    )  # fmt: skip
    for number in range(CHUNK + 10):
        see(str(number))
    assert len(history.lines) <= CHUNK + 2 and history.before(4 + CHUNK) == [str(CHUNK - 2), str(CHUNK - 1)]
    history.watch(None)
    assert not history.before(4)
