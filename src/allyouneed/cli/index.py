"""The command that builds a retrieval index of a corpus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from allyouneed.cli.messages import created_folders_as_note, is_quiet, show_notes, show_status
from allyouneed.cli.options import DeviceOption, argument, option
from allyouneed.errors import UserError


def index(
    corpus: Annotated[list[Path], argument("CORPUS", "text files or folders (.txt, .jsonl, .gz)")],
    *,
    encoder: Annotated[Path, option("--encoder", "-e", metavar="FOLDER", help="the embedding model")],
    output: Annotated[Path, option("--output", "-o", metavar="FOLDER", help="the index to write")],
    chunk: Annotated[int, option(min=2, show_default=True, help="tokens per chunk")] = 64,
    tokenizer: Annotated[
        Path | None, option(metavar="FOLDER", help="a model whose tokenizer to use; default: the encoder's")
    ] = None,
    document: Annotated[
        str, option(metavar="paragraph|line|file", show_default=True, help="what counts as one document of a text file")
    ] = "paragraph",
    device: DeviceOption = "auto",
) -> None:
    """Split texts into chunks and index their embeddings, for retrieval models such as RETRO."""
    from allyouneed.data.retrieval.corpus import import_faiss
    from allyouneed.infer.retrieval.retriever import index_corpus
    from allyouneed.interop.load import load, resolve_device, vocabularies

    if document not in ("paragraph", "line", "file"):
        raise UserError(f"--document {document}: expected paragraph, line or file")
    if output.exists() and not (output / "meta.json").is_file():
        raise UserError(f"{output}: already exists and is not an index; name another folder")
    import_faiss()  # fails now if it is not installed
    tokens = None if tokenizer is None else vocabularies(tokenizer).target
    with _ProgressBar() as bar:
        chunks, report = index_corpus(
            corpus, load(encoder, resolve_device(device, encoder)), chunk, tokens, document, bar.show
        )
    with created_folders_as_note(output):
        chunks.save(output)
    if report.dropped:
        show_notes([report.text()])
    show_status(f"{output}: {len(chunks):,} chunks of {len(chunks.bounds) - 1:,} documents")


class _ProgressBar:
    """A progress bar on standard error, on a terminal."""

    def __enter__(self) -> _ProgressBar:
        self.bar: Any = None
        if sys.stderr.isatty() and not is_quiet():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("indexing", total=None)
        return self

    def show(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
