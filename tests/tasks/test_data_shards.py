"""Each data rank builds only its own rows of every batch; together they are the batch."""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allyouneed.data.batches.packing import Batches, PackedBatches, PaddedBatches
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.data.batches.sharding import DataShard
from allyouneed.data.batches.store import Store
from allyouneed.nn.batch import IGNORE, Batch, Media, Signal
from allyouneed.tasks.language.causal_lm import DocumentItems
from allyouneed.training.prefetch import count_labels
from allyouneed.training.prepare import PreparedData, RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import RUNS, WITHOUT_TEXTS, Listener, recipe


def prepared_for(run: str, texts: Path, place: Path) -> PreparedData:
    given = recipe(place, texts, run)
    return prepare(given, RunFolder(given.output), Reporter(Listener().console))


def sentences(batch: Batch) -> list[list[list[int]]]:
    """The tokens of the rows that hold any, side by side, without padding."""
    found = []
    for side in (batch.source, batch.target):
        if side is None or isinstance(side, Media | Signal):
            continue
        tokens, segments, lengths = side.tokens, side.segments, side.lengths  # type: ignore[union-attr]
        real = segments > 0 if segments is not None else torch.arange(tokens.shape[1]) < lengths[:, None]
        found.append([row[here].tolist() for row, here in zip(tokens, real, strict=True) if here.any()])
    return [list(both) for both in zip(*found, strict=True)]


def media(batch: Batch) -> list[float]:
    """The first value of each image or sound."""
    tensors = (batch.source.image, batch.source.audio) if isinstance(batch.source, Media) else ()
    signals = [side.values for side in (batch.source, batch.target) if isinstance(side, Signal)]
    if signals and count_labels(batch):
        return [one.flatten()[0].item() for one in signals[0]]
    return [one.flatten()[0].item() for tensor in tensors if tensor is not None for one in tensor]


def asked(batch: Batch) -> list[float]:
    assert batch.labels is not None
    return batch.labels[batch.labels != IGNORE].tolist()


@pytest.mark.parametrize("run", RUNS)
def test_the_shards_of_a_batch_are_the_batch(run: str, prepared: Any):
    """The last batch of an epoch too, in which some readers have no sentence."""
    _, data = prepared(run)
    for batches in (data.train, PaddedBatches(data.train.items, 64 if run in WITHOUT_TEXTS else 512, 1)):
        whole = list(batches.batches(1))
        assert len(whole) > 1
        for readers in (2, 3, 4):
            shares = [list(batches.for_shard(DataShard(number, readers)).batches(1)) for number in range(readers)]
            for step, batch in enumerate(whole):
                parts = [share[step] for share in shares]
                told = [row for part in parts if count_labels(part) or part.labels is None for row in sentences(part)]
                assert told == sentences(batch)
                assert [one for part in parts for one in media(part)] == media(batch)
                assert sum(map(count_labels, parts)) == count_labels(batch)
                if run not in ("contrastive", "image-text"):  # which only numbers its pairs
                    assert [label for part in parts for label in asked(part)] == asked(batch)


def test_each_rank_reads_its_own_sentences_only(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = prepared_for("translation", texts, tmp_path).train
    assert isinstance(data, PackedBatches)
    real, seen = data.items.collate, list[list[int]]()

    def counted(epoch: int, members: Any) -> Any:
        seen[-1] += members.tolist()
        return real(epoch, members)

    monkeypatch.setattr(data.items, "collate", counted)
    for number in range(3):
        seen.append([])
        steps = data.steps_per_epoch(0) - 1  # of the last batch a reader without a sentence looks at one
        for _, _ in zip(range(steps), data.for_shard(DataShard(number, 3)).batches(0), strict=False):
            pass
    assert all(seen)
    assert sorted(chain(*seen)) == sorted(n for step in range(steps) for n in data.describe(0, step))


def test_continued_rows_stay_with_their_rank(texts: Path, tmp_path: Path):
    items = prepared_for("causal-lm", texts, tmp_path).train.items
    assert isinstance(items, DocumentItems)
    data: Batches = SegmentBatches(items, items.pieces.documents, 5, 16, seed=3)
    whole = list(data.batches(0))
    for number, rows in ((0, slice(0, 2)), (1, slice(2, 5))):
        for part, batch in zip(data.for_shard(DataShard(number, 2)).batches(0), whole, strict=True):
            assert part.labels is not None and batch.labels is not None and part.begins == batch.begins
            assert torch.equal(part.rows.tokens, batch.rows.tokens[rows])
            assert torch.equal(part.labels, batch.labels[rows])


def resident() -> int:
    """Bytes of this process in memory, what it has mapped and touched counted."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_larger_than_memory_is_shuffled_and_read_without_loading_it(texts: Path, tmp_path: Path):
    """Four gigabytes of tokens: a file with a hole in it, which the disk does not hold and memory would."""
    tokenizer = prepared_for("causal-lm", texts, tmp_path)
    count, length = 20_000, 100_000
    folder = tmp_path / "large"
    folder.mkdir()
    (np.arange(count + 1, dtype="<i8") * length).tofile(folder / "text.offsets")
    with (folder / "text.values").open("wb") as file:
        file.truncate(2 * count * length)
    layout = {"texts": {"text": tokenizer.vocabularies.target.hash}}
    report = tokenizer.train.items.store.report.to_tree()  # type: ignore[attr-defined]
    before = resident()
    store = Store(folder, {"fingerprint": "", "facts": layout, "report": report, "dtype": {"text": "<u2"}})
    items = DocumentItems(store, tokenizer.vocabularies, 4096)
    data = PackedBatches(items, (4096,), 32, seed=1).for_shard(DataShard(1, 2))
    tokens, places = 0, set()
    for _, batch in zip(range(6), data.batches(0), strict=False):
        tokens += count_labels(batch)
    for step in range(6):
        places |= {int(items.pieces.documents[n]) * 8 // count for n in data.describe(0, step)}
    assert tokens > 6 * 15 * 4096 and places == set(range(8))  # from everywhere in the file
    assert resident() - before < 300e6 < (folder / "text.values").stat().st_size / 10
