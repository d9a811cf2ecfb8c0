"""Commands of indexes: `index` saves the vectors of texts, `search` finds texts by them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from allyouneed.cli.completion import folders
from allyouneed.cli.loading import load_predictor, predictor_with
from allyouneed.cli.messages import created_folders_as_note, is_quiet, show_notes, show_status
from allyouneed.cli.options import (
    MODEL,
    ComputeOptions,
    DeviceOption,
    FileOptions,
    JsonOption,
    ModelOption,
    argument,
    option,
)
from allyouneed.cli.text.text_input import file_arguments
from allyouneed.cli.text_commands import one_line, paired, ranked_lines, run
from allyouneed.errors import UserError


def index(
    corpus: Annotated[list[Path], argument("FILE…", "text files, tables or folders")],
    *,
    output: Annotated[Path, option("--output", "-o", metavar="FOLDER", help="the index to write, or to add to")],
    model: Annotated[
        Path | None,
        option(*MODEL, metavar="FOLDER", autocompletion=folders, help="the embedding model, to search by texts"),
    ] = None,
    column: Annotated[
        str, option(metavar="NAME", show_default=True, help="of a table, the column of the texts")
    ] = "text",
    document: Annotated[
        str, option(metavar="paragraph|line|file", show_default=True, help="what counts as one document of a text file")
    ] = "paragraph",
    encoding: Annotated[str | None, option(metavar="NAME", help="encoding of the files; default: UTF-8")] = None,
    encoder: Annotated[
        Path | None, option("--encoder", "-e", metavar="FOLDER", help="instead of --model: index chunks for RETRO")
    ] = None,
    chunk: Annotated[int, option(min=2, show_default=True, help="with --encoder: tokens per chunk")] = 64,
    tokenizer: Annotated[
        Path | None, option(metavar="FOLDER", help="with --encoder: a model whose tokenizer to use; default: its own")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Save the vectors of texts, to `search` in them. Texts that an index has are not embedded again.

    With `--encoder` in place of `--model`: split texts into chunks, for retrieval models such as RETRO.
    """
    if document not in ("paragraph", "line", "file"):
        raise UserError(f"--document {document}: expected paragraph, line or file")
    if model is not None and encoder is not None:
        raise UserError("--model makes an index to search in, --encoder one for RETRO; remove one")
    if encoder is not None:
        _index_chunks(corpus, output, encoder, chunk, tokenizer, document, device)
        return
    _index_texts(corpus, output, model, {"key": column, "document": document, "encoding": encoding}, device)


def _index_texts(corpus: list[Path], output: Path, model: Path | None, reading: dict[str, Any], device: str) -> None:
    from allyouneed.config import parse
    from allyouneed.data.files.readers import Report
    from allyouneed.data.files.texts import TextFiles
    from allyouneed.infer.retrieval.text_index import TextIndex

    if model is None and not TextIndex.is_in(output):
        raise UserError(f"{output}: is no index yet; name the embedding model with --model FOLDER")
    files, report = parse(TextFiles, {"path": list(corpus)} | reading, "index"), Report()
    rows = files.rows(report)
    rows = chain([first], rows) if (first := next(rows, None)) is not None else rows  # fails now if it cannot be read
    if first is None:
        raise UserError(f"{', '.join(map(str, corpus))}: no texts to index")
    compute = ComputeOptions(device=device)
    embedder = predictor_with(model or output, compute, "embed", "embed texts", task="similarity")
    with created_folders_as_note(output), _ProgressBar() as bar:
        before = TextIndex.open(load_predictor(output, compute).folder).count if TextIndex.is_in(output) else 0
        found = embedder.index(rows, output, lambda done: bar.show(done, None)).texts
    if report.dropped:
        show_notes([report.text()])
    show_status(f"{output}: {len(found):,} texts, {len(found) - before:,} of them new")


def _index_chunks(
    corpus: list[Path], output: Path, encoder: Path, chunk: int, tokenizer: Path | None, document: str, device: str
) -> None:
    from allyouneed.data.retrieval.corpus import import_faiss
    from allyouneed.infer.retrieval.retriever import index_corpus
    from allyouneed.interop.load import load, resolve_device, vocabularies

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


def search(
    texts: Annotated[list[str] | None, argument("QUERY", "queries; default: lines of standard input")] = None,
    *,
    model: ModelOption,
    top: Annotated[int, option("--top", min=1, show_default=True, help="texts to find for each query")] = 10,
    rerank: Annotated[
        Path | None, option(metavar="FOLDER", help="a cross-encoder that ranks the first candidates anew")
    ] = None,
    candidates: Annotated[int, option(min=1, show_default=True, help="with --rerank: texts that it ranks")] = 50,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Find texts in an index: `score<TAB>text`, the best first, and an empty line after each query. `--json` has the
    other columns of their rows."""
    texts, files = file_arguments(texts, files)
    searcher = predictor_with(model, compute, "search", "search texts")
    ranker = None if rerank is None else predictor_with(rerank, compute, "rerank", "rank texts")
    assert searcher.texts is not None  # fails now if there is no index
    command = paired(
        "searching",
        lambda queries: searcher.search(queries, top, ranker, candidates),
        lambda one: ranked_lines(True, [(found.score, one_line(found.text)) for found in one.found]),
        lambda one: {"query": one.given, "found": [asdict(found) for found in one.found]},
    )
    run(command, texts, files, as_json)


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

    def show(self, done: int, total: int | None) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
