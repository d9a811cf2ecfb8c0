"""Commands that say something about texts: fill-mask, classify, tag, embed, similarity."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed.cli.loading import ready
from allyouneed.cli.options import (
    DeviceOption,
    DtypeOption,
    ForceOption,
    InputOption,
    JsonOption,
    ModelOption,
    OutputOption,
    RestartOption,
    TopOption,
    WholeOption,
    option,
)
from allyouneed.cli.streams import json_text, progress, whole_file
from allyouneed.cli.texts import Use, answers, notes_of_warnings, one_line, ranked, refuse_itself, run, show, source
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.predictors.classifier import Class
    from allyouneed.infer.predictors.tagger import Tags


@dataclass(frozen=True)
class Answer:
    """What was asked and what came of it."""

    text: Any
    found: Any


def _each(asked: list[Any], found: list[Any]) -> list[Answer]:
    return [Answer(text, one) for text, one in zip(asked, found, strict=True)]


def fill_mask(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="with <mask> where something is missing; standard input if none is given"),
    ] = None,
    *,
    model: ModelOption,
    top: Annotated[int, option(min=1, show_default=True, help="so many of the likeliest for each mask")] = 5,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    whole: WholeOption = False,
) -> None:
    """Fill each `<mask>` in a text with the likeliest tokens.

    A line for each: probability, token, the whole text; an empty line after each text. A model that was trained to fill
    gaps of any length gives one whole text instead.
    """
    filler = ready(model, device, dtype, ("fill_mask", "fill"), "fill masks")

    def plain(one: Answer) -> str:
        rows = [f"{f.score:.4f}\t{one_line(f.token)}\t{one_line(f.text)}\n" for mask in one.found for f in mask]
        return "".join(rows) + "\n"

    masks: Use[Answer] = Use(
        "filling",
        lambda asked, first: _each(asked, filler.fill_mask(asked, top)),
        plain,
        lambda one: {"text": one.text, "masks": [[asdict(filling) for filling in mask] for mask in one.found]},
        blanks=False,
    )
    gaps: Use[Answer] = Use(  # of any length, by a model that was trained for it: there is one answer
        "filling",
        lambda asked, first: _each(asked, filler.fill(asked)),
        lambda one: one_line(one.found) + "\n",
        lambda one: {"text": one.text, "filled": one.found},
        blanks=False,
    )
    run(masks if hasattr(filler, "fill_mask") else gaps, texts, input_, output, as_json, whole, force, restart)


def classify(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="of two texts that belong together, a tab between them; or standard input"),
    ] = None,
    *,
    model: ModelOption,
    top: TopOption = None,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    whole: WholeOption = False,
) -> None:
    """Say which class each text, or each pair of texts, belongs to."""
    classifier = ready(model, device, dtype, "classify_full", "tell classes apart")

    def tree(one: Class) -> dict[str, Any]:
        text = one.text if isinstance(one.text, str) else list(one.text)
        scores = dict(list(one.scores.items())[:top])
        return {"text": text, "label": one.label, "scores": scores, "notes": one.notes}

    use = Use(
        "classifying",
        lambda asked, first: classifier.classify_full(asked),
        lambda one: ranked(top is not None, [(s, label) for label, s in list(one.scores.items())[: top or 1]]),
        tree,
        read=_one_or_two,
        blanks=False,
    )
    run(use, texts, input_, output, as_json, whole, force, restart)


def tag(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="a sentence; standard input if nothing is given")
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
) -> None:
    """Tag each word of sentences.

    A word and its tag a line, an empty line after each sentence; `--json` tells the spans too.
    """
    tagger = ready(model, device, dtype, "tag_full", "tag words")

    def tree(one: Answer) -> dict[str, Any]:
        tags: Tags = one.found
        spans = [
            {"kind": span.kind, "begin": span.begin, "end": span.end, "words": tags.words[span.begin : span.end]}
            for span in tags.places
        ]
        return {"text": one.text, "words": tags.words, "tags": tags.tags, "spans": spans}

    def plain(one: Answer) -> str:
        return "".join(f"{word}\t{said}\n" for word, said in zip(one.found.words, one.found.tags, strict=True)) + "\n"

    use = Use("tagging", lambda asked, first: _each(asked, tagger.tag_full(asked)), plain, tree, blanks=False)
    run(use, texts, input_, output, as_json, force=force, restart=restart)


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="a text; standard input if nothing is given")
    ] = None,
    *,
    model: ModelOption,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: Annotated[
        Path | None,
        option("--output", "-o", panel="Files", metavar="FILE", help="JSON lines; a name that ends in .npy: one array"),
    ] = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    whole: WholeOption = False,
) -> None:
    """Make a vector of each text: a line of JSON each, or a NumPy array of all of them."""
    embedder = ready(model, device, dtype, "embed", "make vectors of texts", task="similarity")
    use: Use[Answer] = Use(
        "reading",
        lambda asked, first: _each(asked, embedder.embed(asked).tolist()),
        lambda one: json_text({"text": one.text, "vector": one.found}),
        lambda one: {"text": one.text, "vector": one.found},
    )
    if output is None or output.suffix != ".npy":
        run(use, texts, input_, output, False, whole, force, restart)
        return
    import numpy as np

    given = source(texts, input_, whole)
    with whole_file(output, force) as file, notes_of_warnings():
        found = answers(use, given)
        bar = progress(found, given.total, use.doing)
        rows = [np.array(one.found, dtype=np.float32) for _, one in bar if one is not None]
        np.save(file, np.stack(rows) if rows else embedder.embed([]).numpy())


def similarity(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="two texts; or lines of standard input, a tab between the two"),
    ] = None,
    *,
    model: ModelOption,
    query: Annotated[str | None, option(metavar="TEXT", help="compare each text with this one instead")] = None,
    top: Annotated[int | None, option(min=1, help="with --query: only so many of the most alike, best first")] = None,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
) -> None:
    """Say how alike two texts are, from -1 to 1: a pair, a pair a line, or one text against many."""
    if top is not None and query is None:
        raise UserError("--top is for --query, which compares many texts with one")
    if query is None and texts:
        if len(texts) != 2:
            raise UserError(f"give two texts, not {len(texts)}; for many, lines with a tab, or --query")
        texts = ["\t".join(text.replace("\t", " ") for text in texts)]
    embedder = ready(model, device, dtype, "similarity", "compare texts", task="similarity")

    def ask(asked: list[Any], first: int) -> list[Answer]:
        pairs = asked if query is None else [(query, text) for text in asked]
        return _each(asked, embedder.similarity(pairs))

    use: Use[Answer] = Use(
        "comparing",
        ask,
        lambda one: f"{one.found:.4f}" + ("\n" if query is None else f"\t{one.text}\n"),
        lambda one: {"texts": list(one.text) if query is None else [query, one.text], "similarity": one.found},
        read=_two if query is None else str,
        blanks=False,
    )
    if top is None:
        run(use, texts, input_, output, as_json, force=force, restart=restart)
        return
    given = source(texts, input_)
    refuse_itself(given.path, output)
    found = (one for _, one in answers(use, given) if one is not None)
    with notes_of_warnings():
        best = heapq.nlargest(top, found, key=lambda one: one.found)
    show(use, ((one.text, one) for one in best), output, as_json, force=force)


def _one_or_two(line: str) -> Any:
    texts = tuple(line.split("\t"))
    if len(texts) > 2:
        raise UserError(f"{len(texts)} columns; there may be one text, or two with a tab between them")
    return texts[0] if len(texts) == 1 else texts


def _two(line: str) -> Any:
    texts = tuple(line.split("\t"))
    if len(texts) != 2:
        raise UserError(f"{len(texts)} column{'s' if len(texts) > 1 else ''}; give two texts with a tab between them")
    return texts
