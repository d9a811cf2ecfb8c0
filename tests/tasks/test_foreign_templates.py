"""Fine-tuning with a foreign tokenizer uses that tokenizer's template."""

from typing import Any

import numpy as np
import pytest

from allyouneed.config import parse
from allyouneed.data.files.labels import Labelled, Scored, Tagged
from allyouneed.data.files.pairs import Pair
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.task import Task
from memory_store import MemoryStore, vocabularies

BEFORE, AFTER = (7, 8), (5, 6, 4)
MARKS = Template(BEFORE, (9,), AFTER)


def foreign(marks: Template = MARKS) -> Vocabularies:
    own = vocabularies().source
    made = Tokenizer(own._inner, own.pad, own.bos, own.eos, template=marks, mask=own.mask)
    return Vocabularies(made, made)


def filled(task: dict[str, Any], example: Any, labels: list[str], both: Vocabularies) -> Any:
    made: Task = parse(Task, task)  # type: ignore[type-abstract]
    store = MemoryStore(made.encoding(both, labels, 64), [example])
    items = made.items(store, both, (64, 64), 0)
    assert len(items) == 1
    found = items.collate(0, np.arange(1))
    for side, lengths in zip(found.sides, items.lengths(0), strict=True):
        assert len(side.tokens) == int(lengths[0])  # which rows are packed by
    return found


def ids(text: str) -> list[int]:
    return vocabularies().source.encode(text)


def test_texts_and_pairs_to_classify_use_the_template() -> None:
    (one,) = filled({"kind": "classification"}, Labelled(("the cat",), "a", "f", 1), ["a", "b"], foreign()).sides
    assert one.tokens.tolist() == [*BEFORE, *ids("the cat"), *AFTER]
    (two,) = filled({"kind": "classification"}, Labelled(("the", "cat"), "a", "f", 1), ["a", "b"], foreign()).sides
    assert two.tokens.tolist() == [*BEFORE, *ids("the"), 9, *ids("cat"), *AFTER]
    assert two.features["types"].tolist() == [0] * (3 + len(ids("the"))) + [1] * (3 + len(ids("cat")))


def test_words_to_tag_use_the_template() -> None:
    found = filled({"kind": "tagging"}, Tagged(("the", "cat"), ("x", "y"), "f", 1), ["x", "y"], foreign())
    first, second = ids("the"), ids(" cat")
    assert found.sides[0].tokens.tolist() == [*BEFORE, *first, *second, *AFTER]
    tags = [0, *[IGNORE] * (len(first) - 1), 1, *[IGNORE] * (len(second) - 1)]
    assert found.labels.tolist() == [IGNORE] * 2 + tags + [IGNORE] * 3


def test_texts_to_compare_use_the_template() -> None:
    found = filled({"kind": "similarity"}, Scored("the", "cat", 0.5, "f", 1), [], foreign())
    assert [side.tokens.tolist() for side in found.sides] == [[*BEFORE, *ids(text), *AFTER] for text in ("the", "cat")]


@pytest.mark.parametrize("task", ["masked-lm", "permutation-lm"])
def test_masked_texts_use_the_template(task: str) -> None:
    found = filled({"kind": task}, Labelled(("the cat sees the moon",), "", "f", 1), [], foreign())
    tokens, labels = found.sides[0].tokens.tolist(), found.labels.tolist()
    size = len(ids("the cat sees the moon"))
    assert tokens[:2] == list(BEFORE) and tokens[2 + size : 5 + size] == list(AFTER)
    assert labels[:2] == [IGNORE] * 2 and labels[2 + size : 5 + size] == [IGNORE] * 3
    assert any(label != IGNORE for label in labels)


def test_sources_and_targets_use_the_template() -> None:
    own = vocabularies().source
    found = filled({"kind": "translation"}, Pair("the", "cat", "f", 1), [], foreign())
    assert found.sides[0].tokens.tolist() == [*BEFORE, *ids("the"), *AFTER]
    assert found.sides[1].tokens.tolist() == [own.bos, *ids("cat")]
    assert found.labels.tolist() == [*ids("cat"), own.eos]
    ours = filled({"kind": "translation"}, Pair("the", "cat", "f", 1), [], vocabularies())
    assert ours.sides[0].tokens.tolist() == [*ids("the"), own.eos]
    with pytest.raises(UserError, match="reads the source language"):
        filled({"kind": "translation"}, Pair("the", "cat", "f", 1), [], foreign(Template(language="before")))
