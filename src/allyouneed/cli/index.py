"""The command that makes a corpus searchable, for models that retrieve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from allyouneed.cli.options import option
from allyouneed.errors import UserError


def index(
    corpus: Annotated[list[Path], typer.Argument(metavar="CORPUS", help="texts: files or folders (.txt, .jsonl, .gz)")],
    *,
    encoder: Annotated[Path, option("--encoder", "-e", metavar="FOLDER", help="the model that makes the vectors")],
    output: Annotated[Path, option("--output", "-o", metavar="FOLDER", help="where the index goes")],
    chunk: Annotated[int, option(min=2, show_default=True, help="tokens that are looked up together")] = 64,
    tokenizer: Annotated[
        Path | None, option(metavar="FOLDER", help="a model whose tokens to keep; the encoder's if not given")
    ] = None,
    document: Annotated[
        str, option(metavar="paragraph|line|file", show_default=True, help="what a document is in a text file")
    ] = "paragraph",
    device: Annotated[str, option(metavar="cpu|cuda", show_default=True, help="where to compute")] = "cpu",
) -> None:
    """Cut texts into chunks and index them by meaning: what a model such as RETRO retrieves from."""
    from allyouneed.data.retrieval.corpus import import_faiss
    from allyouneed.data.tokenizers.base import Vocabularies
    from allyouneed.infer.retrieval.retriever import index_corpus
    from allyouneed.interop.load import load

    if document not in ("paragraph", "line", "file"):
        raise UserError(f"--document {document}: it may be paragraph, line or file")
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: it may be cpu or cuda")
    if output.exists() and not (output / "meta.json").is_file():
        raise UserError(f"{output}: is in the way and is no index; give another folder")
    import_faiss()  # fail before any work if it is missing
    tokens = None if tokenizer is None else Vocabularies.load(tokenizer).target
    with _Bar() as bar:
        made, report = index_corpus(corpus, load(encoder, device), chunk, tokens, document, bar.show)
    made.save(output)
    if report.dropped:
        print(f"note: {report.text()}", file=sys.stderr)
    print(f"{output}: {len(made):,} chunks of {len(made.bounds) - 1:,} documents", file=sys.stderr)


class _Bar:
    """On standard error, when a person is there to see it."""

    def __enter__(self) -> _Bar:
        self.bar: Any = None
        if sys.stderr.isatty():
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
