"""Retrieval of neighbours: an index of chunks, and the frozen encoder of its vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allyouneed.data.batches.encoding import encode_texts
from allyouneed.data.files.readers import Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.retrieval.corpus import ChunkIndex, Vectors, build_index, split_chunks
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.files import sha256
from allyouneed.folder import Folder
from allyouneed.infer.predictors.base import run_in_batches
from allyouneed.interop.load import load, weight_files
from allyouneed.nn.batch import Batch, Neighbours, Rows

ENCODE = 1024  # documents tokenized at a time


class ChunkEncoder:
    """One vector per chunk, from an encoder or a decoder: its pooled head, or else (a masked language model) the mean
    hidden state of the tokens, as with the paper's BERT."""

    def __init__(self, folder: Folder, tokenizer: Tokenizer) -> None:
        self.folder, self.model, self.tokenizer = folder, folder.model, tokenizer
        self.own: Tokenizer = folder.tokenizers.target
        config: Any = folder.model.config
        if config.kind not in ("encoder", "decoder") or config.vocabs is None:
            raise UserError(f"{folder.path}: is a model of kind {config.kind}; expected encoder or decoder")
        self.pooled = config.head.kind == "pooled"
        longest = folder.max_tokens if config.limit is None else min(folder.max_tokens, config.limit)
        self.room = longest - self.own.template.count()

    @property
    def about(self) -> dict[str, str]:
        assert self.folder.path is not None
        # config.json of our folders contains the checksums of the files
        files = weight_files(self.folder.path) if self.folder.origin else [self.folder.path / "config.json"]
        return {"folder": str(self.folder.path), "sha256": " ".join(sha256(file) for file in files)}

    def __call__(self, chunks: Sequence[Sequence[int]]) -> Vectors:
        specials = set(self.tokenizer.specials)
        plain = [[token for token in chunk if token not in specials] for chunk in chunks]
        if self.tokenizer.hash != self.own.hash:
            plain = self.own.encode_batch(self.tokenizer.decode_batch(plain))
        rows = [self.own.frame(ids[: self.room])[0] for ids in plain]
        device = next(self.model.parameters()).device

        def answer(batch: list[int]) -> list[Any]:
            return list(self._vectors(Batch(Rows.of([rows[n] for n in batch], self.own.pad).to(device))))

        return np.stack(run_in_batches(self.model, [len(row) for row in rows], answer))

    def _vectors(self, batch: Batch) -> Vectors:
        model: Any = self.model
        if self.pooled:
            found = model.logits(batch)
        else:
            hidden, facts = model.run(batch, None)
            real = torch.ones_like(hidden[..., :1]) if facts.real is None else facts.real[..., None].to(hidden.dtype)
            found = (hidden * real).sum(1) / real.sum(1)
        vectors: Vectors = found.float().cpu().numpy()
        return vectors


def index_corpus(
    corpus: Sequence[Path],
    encoder: Folder,
    chunk: int,
    tokenizer: Tokenizer | None = None,
    document: str = "paragraph",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ChunkIndex, Report]:
    """Read texts and embed every chunk of them."""
    tokenizer, report = tokenizer or encoder.tokenizers.target, Report()
    files = TextFiles.model_validate({"path": list(corpus), "document": document})

    def documents() -> Iterator[list[int]]:
        held: list[str] = []
        for one in files.read(report):
            held.append(one.text)
            if len(held) == ENCODE:
                yield from encode_texts(tokenizer, held)  # as in training, so that it recognizes its own documents
                held = []
        yield from encode_texts(tokenizer, held)

    embed = ChunkEncoder(encoder, tokenizer)
    return build_index(documents(), chunk, embed, tokenizer, embed.about, progress), report


class Retriever:
    """Retrieves neighbours of chunks. `encoder`: its path, if it has moved since the index was built."""

    def __init__(self, index: ChunkIndex | Path | str, encoder: Path | str | None = None, device: str = "cpu") -> None:
        self.index = index if isinstance(index, ChunkIndex) else ChunkIndex.load(index)
        self.path = None if isinstance(index, ChunkIndex) else Path(index)
        folder = Path(encoder or self.index.encoder["folder"])
        if not folder.is_dir():
            raise UserError(f"{folder}: the encoder of this index is missing; set its path with encoder=…")
        self.encoder = ChunkEncoder(load(folder, device), self.index.tokenizer)
        if self.encoder.about["sha256"] != self.index.encoder["sha256"]:
            raise UserError(f"{folder}: is not the encoder of this index; their vectors are not comparable")

    @property
    def about(self) -> str:
        """A checksum of the index."""
        assert self.path is not None
        return sha256(self.path / "meta.json")

    def check(self, config: Any, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a model that does not fit this index."""
        if config.kind != "retro":
            raise UserError(f"{name}: a model of kind {config.kind} does not retrieve; expected retro")
        if self.index.tokenizer.hash != tokenizer.hash:
            raise UserError(f"{self.path}: was built with another tokenizer; rebuild it with --tokenizer {name}")
        if self.index.chunk != config.chunk:
            raise UserError(
                f"{self.path}: has chunks of {self.index.chunk} tokens, the model needs {config.chunk}; rebuild it "
                f"with --chunk {config.chunk}"
            )

    def search(self, chunks: Sequence[Sequence[int]], count: int = 2) -> list[list[list[int]]]:
        """The nearest neighbours of each chunk, each with the chunk that follows it."""
        found = self.index.nearest(self.encoder(chunks), count) if chunks else []
        return [[self.index.value(number) for number in numbers] for numbers in found]

    def neighbours(
        self, texts: Sequence[Sequence[int]], count: int = 2, documents: Sequence[Sequence[int]] | None = None
    ) -> Neighbours:
        """The neighbours of all full chunks of these texts. `documents`: the document of each text, by default the
        text; a chunk's own document is excluded."""
        whole = texts if documents is None else documents
        cuts = [split_chunks(text, self.index.chunk) for text in texts]
        flat = [chunk for chunks in cuts for chunk in chunks]
        owners = [document for document, chunks in zip(whole, cuts, strict=True) for _ in chunks]
        numbers = iter(self.index.nearest(self.encoder(flat), count, owners) if flat else [])
        found = [[[self.index.value(n) for n in next(numbers)] for _ in chunks] for chunks in cuts]
        return Neighbours.of(found, count, 2 * self.index.chunk, self.index.tokenizer.pad)
