"""The neighbours of all chunks of a dataset, retrieved once and cached next to its tokens."""

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
from allyouneed.tasks.language.causal_lm import DocumentItems

FORMAT = 1
BATCH = 512  # chunks per lookup
SPARE = 8  # extra neighbours per lookup, since some may repeat the text itself

Progress = Callable[[int], None]


def with_neighbours(
    items: DocumentItems, retriever: Retriever, count: int, cache: Path | None = None, progress: Progress | None = None
) -> NeighbourItems:
    """The items with `count` neighbours of each full chunk, cached in the folder `cache` by a fingerprint of items and
    index. `progress(chunks done)` is called after each lookup."""
    if cache is None:
        return NeighbourItems(items, retriever.index, look_up(items, retriever, count, progress))
    inputs = [FORMAT, items.store.fingerprint, len(items), int(items.pieces.lengths.max()), count, retriever.about]
    fingerprint = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    folder = cache / f"{fingerprint[:16]}.neighbours"
    if not _is_valid(folder, fingerprint):

        def fill(work: Path) -> None:
            np.save(work / "numbers.npy", look_up(items, retriever, count, progress))
            meta = {"fingerprint": fingerprint, "sha256": sha256(work / "numbers.npy")}
            (work / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")

        write_folder(folder, fill)
    return NeighbourItems(items, retriever.index, np.load(folder / "numbers.npy", mmap_mode="r"))


def _is_valid(folder: Path, fingerprint: str) -> bool:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return bool(meta["fingerprint"] == fingerprint and meta["sha256"] == sha256(folder / "numbers.npy"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def look_up(items: DocumentItems, retriever: Retriever, count: int, progress: Progress | None = None) -> Ints:
    """(chunks of all items, count) neighbour numbers, −1 where there are fewer. Excluded: the chunk's own document, its
    copies, and neighbours that share a chunk's length of tokens with it (the index may split documents differently)."""
    index = retriever.index
    found: list[list[int]] = []
    passages: tuple[int, PassageSet] | None = None
    for chunks, owners in _batches(_chunks(items, index.chunk)):
        texts = {number: items.store["text"][number].tolist() for number in dict.fromkeys(owners)}
        nearest = index.nearest(retriever.encoder(chunks), count + SPARE, [texts[number] for number in owners])
        for number, near in zip(owners, nearest, strict=True):
            if passages is None or passages[0] != number:
                passages = number, PassageSet(np.array(texts[number]), index.chunk)
            distinct = (n for n in near if not passages[1].shares_passage(np.array(index.value(n))))
            kept = [n for n, _ in zip(distinct, range(count), strict=False)]
            found.append(kept + [-1] * (count - len(kept)))
        if progress is not None:
            progress(len(found))
    return np.array(found, dtype=np.int64).reshape(len(found), count)


def _chunks(items: DocumentItems, size: int) -> Iterator[tuple[list[int], int]]:
    """Every full chunk of every item, and the number of its document."""
    for number in range(len(items)):
        for chunk in split_chunks(items.piece(number)[0].tolist(), size):
            yield chunk, int(items.pieces.documents[number])


def _batches(chunks: Iterator[tuple[list[int], int]]) -> Iterator[tuple[list[list[int]], list[int]]]:
    held: list[tuple[list[int], int]] = []
    for one in chunks:
        held.append(one)
        if len(held) == BATCH:
            yield [chunk for chunk, _ in held], [owner for _, owner in held]
            held = []
    if held:
        yield [chunk for chunk, _ in held], [owner for _, owner in held]
