"""The neighbours of all chunks of a data set, looked up once and kept beside its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from allyouneed.data.batches.packing import Ints
from allyouneed.data.retrieval.corpus import split_chunks
from allyouneed.data.retrieval.neighbours import NeighbourItems, PassageSet
from allyouneed.files import sha256, write_folder
from allyouneed.infer.retrieval.retriever import Retriever
from allyouneed.tasks.causal_lm import DocumentItems

FORMAT = 1
TOGETHER = 512  # chunks that are looked up in one go
SPARE = 8  # neighbours asked for besides, for some may repeat the text itself

Progress = Callable[[int], None]


def with_neighbours(
    items: DocumentItems, retriever: Retriever, count: int, cache: Path | None = None, progress: Progress | None = None
) -> NeighbourItems:
    """The items with `count` neighbours of each full chunk. What was found is written to the folder `cache` and taken
    from there, if it is that of these very items. `progress` is told how many chunks have been looked up."""
    if cache is None:
        return NeighbourItems(items, retriever.index, look_up(items, retriever, count, progress))
    facts = [FORMAT, items.store.fingerprint, len(items), int(items.pieces.lengths.max()), count, retriever.about]
    fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    folder = cache / f"{fingerprint[:16]}.neighbours"
    if not _sound(folder, fingerprint):

        def fill(work: Path) -> None:
            np.save(work / "numbers.npy", look_up(items, retriever, count, progress))
            meta = {"fingerprint": fingerprint, "sha256": sha256(work / "numbers.npy")}
            (work / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")

        write_folder(folder, fill)
    return NeighbourItems(items, retriever.index, np.load(folder / "numbers.npy", mmap_mode="r"))


def _sound(folder: Path, fingerprint: str) -> bool:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return bool(meta["fingerprint"] == fingerprint and meta["sha256"] == sha256(folder / "numbers.npy"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def look_up(items: DocumentItems, retriever: Retriever, count: int, progress: Progress | None = None) -> Ints:
    """(chunks of all items, count), −1 where fewer were found. A chunk never finds its own document, nor a copy of it,
    nor a neighbour that repeats as many tokens of the document as a chunk has: an index may be cut into other
    documents than the data."""
    index = retriever.index
    found: list[list[int]] = []
    passages: tuple[int, PassageSet] | None = None
    for chunks, owners in _together(_chunks(items, index.chunk)):
        texts = {number: items.store["text"][number].tolist() for number in dict.fromkeys(owners)}
        nearest = index.nearest(retriever.encoder(chunks), count + SPARE, [texts[number] for number in owners])
        for number, near in zip(owners, nearest, strict=True):
            if passages is None or passages[0] != number:
                passages = number, PassageSet(np.array(texts[number]), index.chunk)
            strange = (n for n in near if not passages[1].overlaps(np.array(index.value(n))))
            kept = [n for n, _ in zip(strange, range(count), strict=False)]
            found.append(kept + [-1] * (count - len(kept)))
        if progress is not None:
            progress(len(found))
    return np.array(found, dtype=np.int64).reshape(len(found), count)


def _chunks(items: DocumentItems, size: int) -> Iterator[tuple[list[int], int]]:
    """Every full chunk of every item, as it is read, and the number of its document."""
    for number in range(len(items)):
        for chunk in split_chunks(items.piece(number)[0].tolist(), size):
            yield chunk, int(items.pieces.documents[number])


def _together(chunks: Iterator[tuple[list[int], int]]) -> Iterator[tuple[list[list[int]], list[int]]]:
    held: list[tuple[list[int], int]] = []
    for one in chunks:
        held.append(one)
        if len(held) == TOGETHER:
            yield [chunk for chunk, _ in held], [owner for _, owner in held]
            held = []
    if held:
        yield [chunk for chunk, _ in held], [owner for _, owner in held]
