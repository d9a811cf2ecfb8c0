"""Classification, tagging, similarity, contrastive: objectives equal their definitions, labels are in place."""

import math

import numpy as np
import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.data.files.labels import Labelled, Scored, Tagged
from allyouneed.data.files.pairs import Pair
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.classification import Classification
from allyouneed.tasks.contrastive import Contrastive, info_nce
from allyouneed.tasks.similarity import Similarity
from allyouneed.tasks.tagging import Tagging
from allyouneed.tasks.task import class_loss
from memory_store import MemoryStore, vocabularies

TOKENIZER = vocabularies().target
BOS, EOS = TOKENIZER.bos, TOKENIZER.eos


def test_a_text_stands_between_marks_and_a_second_one_is_of_another_type() -> None:
    task = Classification()
    examples = [Labelled(("the cat",), "b", "a.tsv", 1), Labelled(("the cat", "猫"), "a", "a.tsv", 2)]
    store = MemoryStore(task.encoding(vocabularies(), ["a", "b"], 50), examples)
    items = task.items(store, vocabularies(), (50,), 1)
    filled = items.collate(0, np.array([0, 1]))
    cat, zh = TOKENIZER.encode("the cat"), TOKENIZER.encode("猫")
    one, two = [BOS, *cat, EOS], [BOS, *cat, EOS, *zh, EOS]
    assert filled.sides[0].tokens.tolist() == one + two and items.lengths(0)[0].tolist() == [len(one), len(two)]
    types = filled.sides[0].features["types"].tolist()
    assert types == [0] * (len(one) + len(cat) + 2) + [1] * (len(zh) + 1)
    assert filled.answers is not None and filled.answers.tolist() == [1, 0]
    shorter = [
        len(MemoryStore(task.encoding(vocabularies(), ["a", "b"], n), examples)) for n in (len(two), len(two) - 1)
    ]
    assert shorter == [2, 1]


def test_the_loss_of_classes_is_cross_entropy() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 2, IGNORE, 1, 1])
    found = class_loss(logits, labels, smoothing=0.1)
    logs = logits.log_softmax(-1)
    plain = -sum(logs[n, label] for n, label in enumerate(labels.tolist()) if label != IGNORE)
    smooth = -sum(0.9 * logs[n, label] + 0.1 * logs[n].mean() for n, label in enumerate(labels.tolist()) if label >= 0)
    torch.testing.assert_close(found.plain, torch.as_tensor(plain))
    torch.testing.assert_close(found.total, torch.as_tensor(smooth))
    assert int(found.tokens) == 4


def test_tags_stand_at_the_first_token_of_their_words() -> None:
    task, labels = Tagging(), ["B-X", "O"]
    words = ("unwonderfulness", "moon", "猫", "见", "12")
    store = MemoryStore(
        task.encoding(vocabularies(), labels, 99), [Tagged(words, ("B-X", "O", "B-X", "O", "O"), "a", 1)]
    )
    filled = task.items(store, vocabularies(), (99,), 1).collate(0, np.array([0]))
    assert filled.labels is not None
    tokens, found = filled.sides[0].tokens.tolist(), filled.labels.tolist()
    assert TOKENIZER.decode(tokens[1:-1]) == "unwonderfulness moon 猫见 12"
    pieces: list[list[int]] = []
    for token, label in zip(tokens[1:-1], found[1:-1], strict=True):
        pieces = [*pieces, [token]] if label != IGNORE else [*pieces[:-1], [*pieces[-1], token]]
    assert [TOKENIZER.decode(piece) for piece in pieces] == ["unwonderfulness", " moon", " 猫", "见", " 12"]
    assert [label for label in found if label != IGNORE] == [0, 1, 0, 1, 1]
    assert found[0] == found[-1] == IGNORE


@pytest.mark.parametrize("objective", ["mse", "cosine"])
def test_similarity_is_its_definition(objective: str) -> None:
    task = parse(Similarity, {"range": [0, 5], "objective": objective, "margin": 0.1})
    first, second, wanted = torch.randn(4, 7), torch.randn(4, 7), torch.tensor([0.0, 0.2, 0.7, 1.0])
    cosine = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(first, second, strict=True)]
    expected = sum(
        (c - w) ** 2 if objective == "mse" else w * (1 - c) + (1 - w) * max(0.0, c - 0.1)
        for c, w in zip(cosine, wanted.tolist(), strict=True)
    )
    found = task.compare(first, second, wanted)
    assert math.isclose(float(found.total), expected, rel_tol=1e-5) and int(found.tokens) == 4


def test_scores_are_mapped_to_the_unit_interval() -> None:
    task = Similarity(range=(0, 5))
    encoding = task.encoding(vocabularies(), [], 50)
    store = MemoryStore(encoding, [Scored("the cat", "猫", 4.0, "a.tsv", 1), Scored("a", "b", 0.0, "a.tsv", 2)])
    filled = task.items(store, vocabularies(), (50, 50), 1).collate(0, np.array([1, 0]))
    assert filled.answers is not None and filled.answers.tolist() == pytest.approx([0.0, 0.8])
    assert filled.sides[1].tokens.tolist() == [BOS, *TOKENIZER.encode("b"), EOS, BOS, *TOKENIZER.encode("猫"), EOS]
    with pytest.raises(UserError, match=r"a\.tsv:7: score 6 is outside task\.range, \[0, 5\]"):
        MemoryStore(encoding, [Scored("a", "b", 6.0, "a.tsv", 7)])
    with pytest.raises(ConfigError, match=r"range: \[lowest, highest\]"):
        parse(Similarity, {"range": [5, 0]})


def test_info_nce_is_its_definition_both_ways() -> None:
    scores = torch.randn(5, 5) * 3
    expected = 0.0
    for n in range(5):
        expected -= float((scores[n, n].exp() / scores[n].exp().sum()).log()) / 2
        expected -= float((scores[n, n].exp() / scores[:, n].exp().sum()).log()) / 2
    found = info_nce(scores)
    assert math.isclose(float(found.total), expected, rel_tol=1e-5) and int(found.tokens) == 5
    one, other = torch.randn(5, 8), torch.randn(5, 8)
    cosines = torch.nn.functional.cosine_similarity(one[:, None], other[None], dim=-1)
    torch.testing.assert_close(
        Contrastive(temperature=0.2).compare(one, other, torch.arange(5)), info_nce(cosines / 0.2)
    )


def test_each_text_is_answered_by_its_own_pair() -> None:
    task = Contrastive()
    pairs = [Pair("the cat", "猫", "a", 1), Pair("moon", "月亮", "a", 2), Pair("She", "她", "a", 3)]
    store = MemoryStore(task.encoding(vocabularies(), [], 50), pairs)
    filled = task.items(store, vocabularies(), (50, 50), 1).collate(0, np.array([2, 0]))
    assert filled.answers is not None and filled.answers.tolist() == [0, 1]
    assert filled.sides[0].tokens.tolist() == [
        BOS,
        *TOKENIZER.encode("She"),
        EOS,
        BOS,
        *TOKENIZER.encode("the cat"),
        EOS,
    ]
