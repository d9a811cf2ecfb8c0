"""Neighbours of texts: an index, and the frozen encoder whose vectors it holds."""

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
from allyouneed.infer.predictors.base import in_batches
from allyouneed.interop.load import load, weight_files
from allyouneed.nn.batch import Batch, Neighbours, Rows

ENCODE = 1024  # documents that are encoded together


class ChunkEncoder:
    """One vector a chunk, by any model of one stack that reads text: the vector its head makes of a text, or, where it
    makes none (a masked language model), the mean of its tokens' hidden states, as the paper's BERT."""

    def __init__(self, folder: Folder, tokenizer: Tokenizer) -> None:
        self.folder, self.model, self.tokenizer = folder, folder.model, tokenizer
        self.own: Tokenizer = folder.tokenizers.target
        config: Any = folder.model.config
        if config.kind not in ("encoder", "decoder") or config.vocabs is None:
            raise UserError(f"{folder.path}: a model of kind {config.kind}; chunks are read by an encoder or a decoder")
        self.pooled = config.head.kind == "pooled"
        longest = folder.max_tokens if config.limit is None else min(folder.max_tokens, config.limit)
        self.room = longest - self.own.template.count()

    @property
    def about(self) -> dict[str, str]:
        assert self.folder.path is not None
        # the config of a folder of ours has the checksums of its files
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

        return np.stack(in_batches(self.model, [len(row) for row in rows], answer))

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
    """Read texts and give every chunk of them its vector."""
    tokenizer, report = tokenizer or encoder.tokenizers.target, Report()
    files = TextFiles.model_validate({"path": list(corpus), "document": document})

    def documents() -> Iterator[list[int]]:
        held: list[str] = []
        for one in files.read(report):
            held.append(one.text)
            if len(held) == ENCODE:
                yield from encode_texts(tokenizer, held)  # as training does, so that it knows its documents again
                held = []
        yield from encode_texts(tokenizer, held)

    embed = ChunkEncoder(encoder, tokenizer)
    return build_index(documents(), chunk, embed, tokenizer, embed.about, progress), report


class Retriever:
    """Looks up the chunks of texts. `encoder`: where it lies, if not where it lay when the index was made."""

    def __init__(self, index: ChunkIndex | Path | str, encoder: Path | str | None = None, device: str = "cpu") -> None:
        self.index = index if isinstance(index, ChunkIndex) else ChunkIndex.load(index)
        self.path = None if isinstance(index, ChunkIndex) else Path(index)
        folder = Path(encoder or self.index.encoder["folder"])
        if not folder.is_dir():
            raise UserError(f"{folder}: the encoder of this index is not there; say where it is (encoder=…)")
        self.encoder = ChunkEncoder(load(folder, device), self.index.tokenizer)
        if self.encoder.about["sha256"] != self.index.encoder["sha256"]:
            raise UserError(
                f"{folder}: is not the encoder this index was made with; its vectors would be compared amiss"
            )

    @property
    def about(self) -> str:
        """A checksum of all that is found in it."""
        assert self.path is not None
        return sha256(self.path / "meta.json")

    def check(self, config: Any, tokenizer: Tokenizer, whose: str) -> None:
        """Refuse a model that cannot read what is found here."""
        if config.kind != "retro":
            raise UserError(f"{whose}: a model of kind {config.kind} reads no neighbours; 'retro' does")
        if self.index.tokenizer.hash != tokenizer.hash:
            raise UserError(f"{self.path}: holds tokens of another tokenizer; make the index with --tokenizer {whose}")
        if self.index.chunk != config.chunk:
            raise UserError(
                f"{self.path}: has chunks of {self.index.chunk} tokens, the model reads {config.chunk}; make the index "
                f"with --chunk {config.chunk}"
            )

    def search(self, chunks: Sequence[Sequence[int]], count: int = 2) -> list[list[list[int]]]:
        """For each chunk its nearest neighbours, each a chunk and what followed it."""
        found = self.index.nearest(self.encoder(chunks), count) if chunks else []
        return [[self.index.value(number) for number in numbers] for numbers in found]

    def neighbours(
        self,
        texts: Sequence[Sequence[int]],
        count: int = 2,
        documents: Sequence[Sequence[int]] | None = None,
    ) -> Neighbours:
        """Of all full chunks of these texts. `documents`: what each text is a piece of, itself when not given; a chunk
        never finds its own document."""
        whole = texts if documents is None else documents
        cuts = [split_chunks(text, self.index.chunk) for text in texts]
        flat = [chunk for chunks in cuts for chunk in chunks]
        owners = [document for document, chunks in zip(whole, cuts, strict=True) for _ in chunks]
        numbers = iter(self.index.nearest(self.encoder(flat), count, owners) if flat else [])
        found = [[[self.index.value(n) for n in next(numbers)] for _ in chunks] for chunks in cuts]
        return Neighbours.of(found, count, 2 * self.index.chunk, self.index.tokenizer.pad)
