"""Example weights: files that an epoch reads more or less often than once."""

from pathlib import Path

import numpy as np
import pytest

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.packing import PackedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.tasks.translation.translation import PairItems, pair_encoding
from allyouneed.training import Recipe


@pytest.fixture
def files(tmp_path: Path) -> list[PairFiles]:
    for name, count in (("many", 40), ("few", 10)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{name} {n}\t{n} {name}\n" for n in range(count)) + "\tempty\n")
    paths = tmp_path / "many.tsv", tmp_path / "few.tsv"
    return [PairFiles(path=paths[0], weight=0.5), PairFiles(path=paths[1], weight=3)]


def batches(files: list[PairFiles], cache: Path, seed: int = 0) -> PackedBatches:
    both = Vocabularies.train(TokenizerConfig(vocab=300), files)
    store = Store.open_or_build(cache, files, Filters(), pair_encoding(both, 20))
    return PackedBatches(PairItems(store, both), (24, 24), rows=2, seed=seed)


def times(found: PackedBatches, epoch: int) -> list[int]:
    members = [n for step in range(found.steps_per_epoch(epoch)) for n in found.describe(epoch, step)]
    return np.bincount(members, minlength=50).tolist()


def test_an_epoch_reads_each_as_often_as_it_weighs(files: list[PairFiles], tmp_path: Path) -> None:
    found = batches(files, tmp_path / "cache")
    epochs = [times(found, epoch) for epoch in range(40)]
    assert all(epoch[40:] == [3] * 10 for epoch in epochs), "what was left out must not shift the weights"
    assert all(set(epoch[:40]) <= {0, 1} for epoch in epochs)
    assert sum(sum(epoch[:40]) for epoch in epochs) / (40 * 40) == pytest.approx(0.5, abs=0.05)
    assert len({tuple(epoch) for epoch in epochs}) == 40, "who is left out changes from epoch to epoch"


def test_what_is_read_depends_on_seed_and_epoch_alone(files: list[PairFiles], tmp_path: Path) -> None:
    first, again = batches(files, tmp_path / "cache"), batches(files, tmp_path / "cache")
    first.steps_per_epoch(0)
    assert first.describe(3, 1) == again.describe(3, 1)
    rest, whole = list(again.batches(3, start_step=2)), list(first.batches(3))[2:]
    assert len(rest) == len(whole) > 0
    assert all(one.target.tokens.equal(two.target.tokens) for one, two in zip(rest, whole, strict=True))
    assert times(first, 1) != times(batches(files, tmp_path / "cache", seed=1), 1)


def test_an_epoch_is_never_empty(files: list[PairFiles], tmp_path: Path) -> None:
    rare = [entry.model_copy(update={"weight": 1e-9}) for entry in files]
    assert times(batches(rare, tmp_path / "cache"), 0) == [1] * 50


def test_without_weights_the_order_is_unchanged(files: list[PairFiles], tmp_path: Path) -> None:
    once = [entry.model_copy(update={"weight": 1.0}) for entry in files]
    found = batches(once, tmp_path / "cache")
    assert found.items.weights is None and times(found, 0) == [1] * 50


def test_the_tokenizer_weights_texts_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("qu\tqu\n")
    (tmp_path / "b.tsv").write_text("xyz\txyz\n" * 2)
    for weight, pieces in ((1, (2, 2)), (4, (1, 3))):  # there is room for one merge
        entries = [PairFiles(path=tmp_path / "a.tsv", weight=weight), PairFiles(path=tmp_path / "b.tsv")]
        found = Vocabularies.train(TokenizerConfig(vocab=260, min_frequency=1), entries)
        assert (len(found.source.encode("qu")), len(found.source.encode("xyz"))) == pieces


def test_a_store_is_found_by_the_contents_of_its_files(files: list[PairFiles], tmp_path: Path) -> None:
    both = Vocabularies.train(TokenizerConfig(vocab=300), files)
    here = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(both, 20))
    (tmp_path / "else").mkdir()
    moved = []
    for entry in files:
        (path,) = entry.path or ()
        moved.append(entry.model_copy(update={"path": (path.rename(tmp_path / "else" / path.name),)}))
    there = Store.open_or_build(tmp_path / "cache", moved, Filters(), pair_encoding(both, 20))
    assert there.folder == here.folder
    turned = [moved[0].model_copy(update={"columns": (1, 0)}), moved[1]]
    assert Store.open_or_build(tmp_path / "cache", turned, Filters(), pair_encoding(both, 20)).folder != here.folder


@pytest.mark.parametrize(
    ("task", "split", "said"),
    [
        ("contrastive", "train", "contrastive does not support 'weight'"),
        ("translation", "valid", "'weight' is for train"),
        ("translation", "train", None),
    ],
)
def test_weights_are_rejected_where_not_supported(task: str, split: str, said: str | None) -> None:
    data = {"train": {"path": "x"}, "valid": {"path": "x"}}
    data[split] = {"path": "x", "weight": 2}  # type: ignore[dict-item]
    tree = {"model": "transformer-tiny", "data": data, "task": {"kind": task}, "output": "run"}
    if said is None:
        assert parse(Recipe, tree).data.train[0].weight == 2  # type: ignore[attr-defined]
        return
    with pytest.raises(ConfigError, match=said):
        parse(Recipe, tree)
