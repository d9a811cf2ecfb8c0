"""Pairs are read with the pairs before them in their document, and encoded with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.context import BREAK, ContextEncoding
from allyouneed.data.batches.encoding import Dropped
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import Pair, PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.training.recipe.recipe import Recipe

A, B, C, D = ("a1", "A1"), ("a2", "A2"), ("a3", "A3"), ("d1", "D1")
WANTED = [(A, ()), (B, (A,)), (C, (A, B)), (D, ())]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.mark.parametrize("name", ["blank.tsv", "aligned", "named.tsv", "named.csv", "index.tsv", "named.jsonl"])
def test_a_document_ends_at_a_blank_line_or_where_the_column_changes(name: str, tmp_path: Path) -> None:
    named = "source\ttarget\tdoc\na1\tA1\tx\na2\tA2\tx\na3\tA3\tx\nd1\tD1\ty\n"
    contents = {
        "blank.tsv": "a1\tA1\na2\tA2\na3\tA3\n\nd1\tD1\n\n",
        "named.tsv": named,
        "named.csv": named.replace("\t", ","),
        "index.tsv": named.partition("\n")[2],
        "named.jsonl": "".join(
            f'{{"source": "{s}", "target": "{t}", "doc": {number}}}\n'
            for (s, t), number in zip((A, B, C, D), (1, 1, 1, 2), strict=True)
        ),
    }
    if name == "aligned":
        sides = ("a1\na2\na3\n\nd1\n", "A1\nA2\nA3\n\nD1\n")
        keys = {key: write(tmp_path, f"{key}.txt", text) for key, text in zip(("source", "target"), sides, strict=True)}
    else:
        keys = {"path": write(tmp_path, name, contents[name])}
    if name.startswith(("named", "index")):
        keys |= {"document": "doc"} if name.startswith("named") else {"document": 2, "columns": [0, 1]}
    report = Report()
    files = parse(PairFiles, keys | {"context": 2})
    found = [((pair.source, pair.target), pair.context) for pair in Filters().apply(files.read(report), report)]
    assert found == WANTED
    assert (report.read, report.dropped) == (4, 0)  # blank lines are not pairs


def test_equal_pairs_in_other_contexts_are_not_duplicates() -> None:
    pairs = [Pair("it", "er", "f", 1, context=(before,)) for before in (A, B, A)]
    report = Report(read=3)
    assert list(Filters(duplicates=True).apply(iter(pairs), report)) == pairs[:2]


def test_as_much_context_as_fits_is_joined_on_one_side_or_on_both() -> None:
    tokenizer = train(TokenizerConfig(vocab=300, specials=(BREAK,)), ["a b c d e f"] * 9, languages=["fr"])
    both, mark, ids = Vocabularies(tokenizer, tokenizer), tokenizer.special(BREAK), tokenizer.encode
    pair = Pair("c", "f", "", 1, to="fr", context=(("a b", "d"), ("b", "d e")))
    target = tokenizer.language("fr")

    def encode(sides: bool, most: int | None, sentences: int = 2, one: Pair = pair) -> object:
        return next(ContextEncoding(both, most, 1, sentences, sides).encode([one]))

    far, near = [*ids("a b"), mark], [*ids("b"), mark]
    sentence = [target, *ids("c")]
    assert encode(False, None) == [[*far, *near, *sentence], ids("f")]
    assert encode(False, None, 1) == [[*near, *sentence], ids("f")]
    assert encode(False, len(far + near + sentence)) == [[*near, *sentence], ids("f")]  # the end mark does not fit
    assert encode(True, None) == [
        [*far, *near, *sentence],
        [*ids("d"), mark, *ids("d e"), mark, *ids("f")],
    ]
    # the near sentence of the target does not fit: neither side has it
    long = pair._replace(context=(("a", "d"), ("b", "d e f d e f d e f")))
    assert encode(True, 8, one=long) == [sentence, ids("f")]
    assert isinstance(encode(False, 2), Dropped)  # the sentence itself is too long


def test_a_recipe_sets_the_context_of_its_files(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", "a\tb\n")
    model = {"kind": "encoder-decoder", "encoder": [{}], "decoder": [{}]}
    tree = {"model": model, "output": "x", "data": {"train": [path, {"path": path, "context": 0}]}}
    recipe = parse(Recipe, tree | {"task": {"kind": "translation", "context": 2}})
    assert [entry.context for entry in recipe.data.train] == [2, 0]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"set task\.context, or remove it"):
        parse(Recipe, tree | {"data": {"train": {"path": path, "context": 1}}})
    for task, says in (
        ({}, r"set task\.context"),
        ({"context": {"target": True}}, r"remove task\.context\.target, or the context encoder"),
    ):
        encoder = {"context": [{}]}
        recipe = parse(Recipe, tree | {"model": model | encoder, "task": {"kind": "translation"} | task})
        with pytest.raises(ConfigError, match=says):
            recipe.model_for(None)
