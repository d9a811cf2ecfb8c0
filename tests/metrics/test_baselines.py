"""A baseline is what needs no model; a result that equals it is seen as such."""

from __future__ import annotations

import math
import random

import pytest
import torch

from allyouneed import train_tokenizer
from allyouneed.data.files.labels import Labelled, Scored, Tagged
from allyouneed.data.files.pairs import Pair
from allyouneed.data.files.texts import TextDocument
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.metrics.baselines import LinearClassifier, baselines


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a b c"], vocab=300)


def labelled(count: int, dice: random.Random) -> list[Labelled]:
    """A word decides, but not alone: `not` turns it."""
    rows = []
    for _ in range(count):
        good, turned = dice.random() < 0.7, dice.random() < 0.5
        word = "good" if good != turned else "bad"
        text = f"the {dice.choice(['film', 'book'])} is {'not ' * turned}{word} {dice.choice(['indeed', 'today'])}"
        rows.append(Labelled((text,), "yes" if good else "no", "f", 1))
    return rows


def test_the_majority_class_scores_its_share(tokenizer: Tokenizer) -> None:
    train, held = labelled(300, random.Random(0)), labelled(100, random.Random(1))
    majority, linear = baselines(train, held, tokenizer)
    share = sum(example.label == "yes" for example in held)
    assert majority.name == "always 'yes'" and majority.figures["accuracy"] == pytest.approx(share)
    assert majority.figures["macro-f1"] == pytest.approx(100 * share / (100 + share))
    assert linear.figures["accuracy"] == 100, "pairs of words tell what single words do not"


def test_the_linear_classifier_is_the_same_every_time_and_leaves_random_numbers_alone() -> None:
    train = labelled(100, random.Random(0))
    weights = []
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for _ in range(2):
        model = LinearClassifier(["no", "yes"])
        model.fit([one.texts for one in train], [one.label for one in train])
        weights.append(model.weight.detach())
    assert torch.equal(*weights) and torch.equal(torch.rand(2), expected)


def test_the_linear_classifier_computes_softmax_of_tf_idf() -> None:
    model = LinearClassifier(["a", "b"])
    model.fit([("x y",), ("x z",)], ["a", "b"])
    row = model._buckets(("x y",))
    assert len(row) == 5, "two words, and three pairs with the ends"
    tf_idf = torch.zeros(len(model.rarity))
    for bucket in row:
        tf_idf[bucket] += model.rarity[bucket]
    rare, common = math.log(3 / 2) + 1, 1.0
    expected = tf_idf / math.sqrt(3 * rare**2 + 2 * common**2) @ model.weight + model.bias
    torch.testing.assert_close(model._logits([row])[0], expected)


def test_tags_have_the_most_frequent_tag_and_that_of_each_word(tokenizer: Tokenizer) -> None:
    train = [Tagged(("Anna", "is", "in", "Ulm"), ("B-PER", "O", "O", "B-LOC"), "f", 1)]
    held = [Tagged(("Anna", "in", "Ulm", "now"), ("B-PER", "O", "B-LOC", "O"), "f", 1)]
    always, words = baselines(train, held, tokenizer)
    assert always.figures == {"f1": 0, "accuracy": 50} and words.figures == {"f1": 100, "accuracy": 100}


def test_scores_have_the_mean_and_common_words(tokenizer: Tokenizer) -> None:
    rows = [Scored("a b c", "a b c", 1.0, "f", 1), Scored("a b c", "a b d", 0.5, "f", 2), Scored("a", "b", 0.0, "f", 3)]
    mean, shared = baselines(rows, rows, tokenizer)
    assert mean.name == "always the mean, 0.5" and mean.figures == {"spearman": 0, "pearson": 0}
    assert shared.figures["spearman"] == pytest.approx(100)


def test_pairs_have_the_source_and_nothing(tokenizer: Tokenizer) -> None:
    pairs = [Pair("the same words in it", "the same words in it", "f", 1), Pair("x", "y", "f", 2)]
    copy, nothing = baselines(pairs, pairs, tokenizer)
    assert copy.figures["exact"] == 50 and copy.figures["chrf"] > 50 and nothing.figures["exact"] == 0


def test_texts_have_the_perplexity_of_frequencies(tokenizer: Tokenizer) -> None:
    train, held = [TextDocument("aab", "f", 1)], [TextDocument("ab", "f", 1)]
    ids = {letter: tokenizer.encode(letter)[0] for letter in "ab"}
    assert tokenizer.encode("aab") == [ids["a"], ids["a"], ids["b"]]
    (found,) = baselines(train, held, tokenizer)
    total = 3 + tokenizer.size
    assert found.figures["perplexity"] == pytest.approx(total / math.sqrt(3 * 2))


def test_examples_without_a_baseline_have_none(tokenizer: Tokenizer) -> None:
    assert baselines([object()], [object()], tokenizer) == [] and baselines([], [], tokenizer) == []
