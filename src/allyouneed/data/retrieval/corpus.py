"""A corpus split into chunks with a vector index: what RETRO retrieves from.

Borgeaud et al. 2022, 2.1-2.3: a key is a vector of a chunk of m tokens, its value the chunk and the m tokens that
followed it in its document; a neighbour is one of the nearest keys (L2). An index is a folder: tokens of all documents
end to end, where documents and chunks begin, the vectors (faiss), the tokenizer, and `meta.json` with checksums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.errors.extras import missing
from allyouneed.files import sha256, write_folder
from allyouneed.files.reading import file_in, has_file, parse_json, read_bytes

FORMAT = 1
ARRAYS = ("tokens", "bounds", "begins", "documents", "names")
EXACT = 100_000  # chunks; above this the search is approximate (IVF)
MORE = 16  # extra results fetched, because chunks of the same document are removed

Ints = NDArray[np.int64]
Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[Sequence[int]]], Vectors]  # tokens of chunks -> (chunks, width)


def import_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise missing("retrieval", "an index") from None
    return faiss


def split_chunks(tokens: Sequence[int], chunk: int) -> list[list[int]]:
    """The full chunks of a text; a shorter rest has no neighbours."""
    return [list(tokens[begin : begin + chunk]) for begin in range(0, len(tokens) - chunk + 1, chunk)]


@dataclass(frozen=True)
class ChunkIndex:
    """`bounds`: where documents begin in `tokens`, and the end of the last. `begins` and `documents`: for each chunk,
    its start and its document. `names`: a hash of each document's tokens."""

    chunk: int
    tokens: NDArray[Any]
    bounds: Ints
    begins: Ints
    documents: Ints
    names: Ints
    vectors: Any  # a faiss index
    tokenizer: Tokenizer
    encoder: dict[str, str]  # the model that computed the vectors: its folder, and the checksum of its config.json

    def __len__(self) -> int:
        return len(self.begins)

    def value(self, number: int) -> list[int]:
        """A chunk and its continuation: up to 2 · chunk tokens."""
        begin, end = self.begins[number], self.bounds[self.documents[number] + 1]
        return self.tokens[begin : min(begin + 2 * self.chunk, end)].tolist()

    def document(self, number: int) -> list[int]:
        return self.tokens[self.bounds[number] : self.bounds[number + 1]].tolist()

    def nearest(self, vectors: Vectors, count: int, texts: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
        """For each vector the indices of the nearest chunks. `texts`: the text each vector belongs to; if that is a
        document of the index, its own chunks are excluded, because they contain the continuation."""
        own = np.full(len(vectors), -1) if texts is None else self._names(texts)
        _, wide = self.vectors.search(vectors, min(len(self), count + MORE))
        found = []
        for row, name in enumerate(own):
            kept = [int(n) for n in wide[row] if n >= 0 and (name < 0 or self.names[self.documents[n]] != name)]
            if len(kept) < count and name >= 0 and len(self) > count + MORE:
                kept = self._elsewhere(vectors[row], count, int(name))
            found.append(kept[:count])
        return found

    def _elsewhere(self, vector: Vectors, count: int, name: int) -> list[int]:
        """The nearest chunks in all other documents, if the own document filled the whole result."""
        library = import_faiss()
        others = library.IDSelectorBatch(np.flatnonzero(self.names[self.documents] != name))
        flat = isinstance(self.vectors, library.IndexFlat)
        kind = library.SearchParameters if flat else library.SearchParametersIVF
        more = {} if flat else {"nprobe": self.vectors.nlist}
        _, found = self.vectors.search(vector[None], count, params=kind(sel=others, **more))
        return [int(n) for n in found[0] if n >= 0]

    def _names(self, texts: Sequence[Sequence[int]]) -> Ints:
        known = dict.fromkeys(self.names.tolist())
        names = {id(text): document_hash(text) for text in {id(text): text for text in texts}.values()}
        return np.array([names[id(text)] if names[id(text)] in known else -1 for text in texts], dtype=np.int64)

    def save(self, path: Path | str) -> None:
        def fill(folder: Path) -> None:
            for name in ARRAYS:
                np.save(folder / f"{name}.npy", getattr(self, name))
            import_faiss().write_index(self.vectors, str(folder / "vectors.faiss"))
            Vocabularies(self.tokenizer, self.tokenizer).save(folder)
            meta = {"format": FORMAT, "chunk": self.chunk, "encoder": self.encoder}
            meta["sha256"] = {file.name: sha256(file) for file in sorted(folder.iterdir())}
            (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")

        path = Path(path)
        if path.exists() and not (path / "meta.json").is_file():
            raise UserError(f"{path}: exists and is not an index; choose another folder")
        write_folder(path, fill)

    @classmethod
    def load(cls, path: Path | str) -> ChunkIndex:
        """Verifies the checksum of every file."""
        path, library = Path(path), import_faiss()
        if not has_file(path, "meta.json"):
            raise UserError(f"{path}: not an index (no meta.json); build one with `allyouneed index`")
        try:
            meta = parse_json(read_bytes(path, "meta.json"))
            if meta["format"] != FORMAT:
                raise UserError(f"{path}: index format {meta['format']}, expected {FORMAT}; build it again")
            wrong = [name for name, sum_ in meta["sha256"].items() if _damaged(path, name, sum_)]
            if wrong:
                raise UserError(f"{path}: {', '.join(wrong)} missing or damaged; build the index again")
            arrays = {name: np.load(file_in(path, f"{name}.npy"), mmap_mode="r") for name in ARRAYS}
            vectors = library.read_index(str(file_in(path, "vectors.faiss")))
            tokenizer = Vocabularies.load(path).target
            return cls(meta["chunk"], **arrays, vectors=vectors, tokenizer=tokenizer, encoder=meta["encoder"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: cannot be read as an index ({error}); build it again") from None


def _damaged(path: Path, name: str, expected: str) -> bool:
    return not has_file(path, name) or sha256(file_in(path, name)) != expected


def document_hash(text: Sequence[int]) -> int:
    """A non-negative hash of a document's tokens."""
    raw = np.asarray(text, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "little") >> 1


def build_index(
    documents: Iterable[Sequence[int]],
    chunk: int,
    embed: Embed,
    tokenizer: Tokenizer,
    encoder: dict[str, str],
    progress: Callable[[int, int], None] | None = None,
    together: int = 512,
) -> ChunkIndex:
    """`progress(done, total)` counts embedded chunks. A document's last chunk may be short."""
    kept = [list(document) for document in documents if len(document)]
    if not kept:
        raise UserError("nothing to index: the corpus contains no text")
    library = import_faiss()
    lengths = np.array([len(document) for document in kept], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    counts = -(-lengths // chunk)
    whose = np.repeat(np.arange(len(kept)), counts)
    begins = bounds[whose] + (np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
    small = tokenizer.size <= np.iinfo(np.uint16).max + 1
    tokens = np.concatenate([np.array(document, dtype=np.uint16 if small else np.uint32) for document in kept])
    ends = np.minimum(begins + chunk, bounds[whose + 1])
    parts: list[Vectors] = []
    for first in range(0, len(begins), together):
        spans = zip(begins[first : first + together], ends[first : first + together], strict=True)
        parts.append(embed([tokens[begin:end].tolist() for begin, end in spans]))
        if progress is not None:
            progress(min(first + together, len(begins)), len(begins))
    found = np.ascontiguousarray(np.concatenate(parts), dtype=np.float32)
    if len(found) <= EXACT:
        vectors = library.IndexFlatL2(found.shape[1])
    else:
        vectors = library.index_factory(found.shape[1], f"IVF{int(len(found) ** 0.5)},Flat")
        vectors.train(found)
        vectors.nprobe = 16
    vectors.add(found)
    names = np.array([document_hash(document) for document in kept], dtype=np.int64)
    return ChunkIndex(chunk, tokens, bounds, begins, whose, names, vectors, tokenizer, encoder)
