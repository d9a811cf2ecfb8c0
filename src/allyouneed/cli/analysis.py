"""Commands that analyse texts: fill-mask, classify, tag, embed, similarity, rerank; score and predict-click."""

from __future__ import annotations

import heapq
import json
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from allyouneed.cli.loading import predictor_with
from allyouneed.cli.messages import warnings_as_notes
from allyouneed.cli.options import (
    FILES,
    ComputeOptions,
    FileOptions,
    JsonOption,
    ModelOption,
    TextFileOptions,
    TopOption,
    argument,
    option,
)
from allyouneed.cli.text.streams import atomic_file, json_text, progress
from allyouneed.cli.text.text_input import InputSource, check_not_input, file_arguments, open_input
from allyouneed.cli.text_commands import (
    Paired,
    TextCommand,
    one_line,
    paired,
    ranked_lines,
    results,
    run,
    write_results,
)
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.predictors.classifier import TextClass
    from allyouneed.infer.predictors.tagger import TaggedSentence

TABLES = (".csv", ".tsv")  # files with a header


def fill_mask(
    texts: Annotated[list[str] | None, argument("TEXT", "texts with <mask>; default: standard input")] = None,
    *,
    model: ModelOption,
    top: Annotated[int, option(min=1, show_default=True, help="number of tokens to show per mask")] = 5,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: TextFileOptions,
) -> None:
    """Fill each `<mask>` of a text with the most likely tokens.

    Each line has probability, token and the filled text; an empty line follows each input. A model trained on span
    corruption fills gaps of any length and prints one filled text instead.
    """
    texts, files = file_arguments(texts, files)
    filler = predictor_with(model, compute, ("fill_mask", "fill"), "fill masks")

    def plain(one: Paired) -> str:
        rows = [f"{f.score:.4f}\t{one_line(f.token)}\t{one_line(f.text)}\n" for mask in one.found for f in mask]
        return "".join(rows) + "\n"

    if hasattr(filler, "fill_mask"):
        command = paired(
            "filling",
            lambda texts: filler.fill_mask(texts, top),
            plain,
            lambda one: {"text": one.given, "masks": [[asdict(filling) for filling in mask] for mask in one.found]},
        )
    else:  # span corruption: gaps of any length, one result
        command = paired(
            "filling",
            lambda texts: filler.fill(texts),
            lambda one: one_line(one.found) + "\n",
            lambda one: {"text": one.given, "filled": one.found},
        )
    run(command, texts, files, as_json)


def classify(
    texts: Annotated[
        list[str] | None, argument("TEXT", "texts, or pairs of texts separated by a tab; default: standard input")
    ] = None,
    *,
    model: ModelOption,
    top: TopOption = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: TextFileOptions,
) -> None:
    """Classify texts or pairs of texts. Where a text may have several labels, they are separated by `|`."""
    texts, files = file_arguments(texts, files)
    classifier = predictor_with(model, compute, "classify_full", "classify texts")

    def tree(one: TextClass) -> dict[str, Any]:
        text = one.text if isinstance(one.text, str) else list(one.text)
        scores = dict(list(one.scores.items())[:top])
        several = {"labels": one.labels} if classifier.several else {}
        return {"text": text, "label": one.label, **several, "scores": scores, "notes": one.notes}

    def plain(one: TextClass) -> str:
        if classifier.several and top is None:
            return "|".join(one.labels) + "\n"
        return ranked_lines(top is not None, [(s, label) for label, s in list(one.scores.items())[: top or 1]])

    command = TextCommand(
        "classifying",
        lambda texts, first: classifier.classify_full(texts),
        plain,
        tree,
        parse=_one_or_two,
        blanks=False,
    )
    run(command, texts, files, as_json)


def tag(
    texts: Annotated[list[str] | None, argument("TEXT", "sentences; default: standard input")] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Tag the words of sentences.

    Prints one word and its tag per line and an empty line after each sentence; `--json` includes the spans.
    """
    texts, files = file_arguments(texts, files)
    tagger = predictor_with(model, compute, "tag_full", "tag words")

    def tree(one: Paired) -> dict[str, Any]:
        tags: TaggedSentence = one.found
        spans = [
            {"kind": span.kind, "begin": span.begin, "end": span.end, "words": tags.words[span.begin : span.end]}
            for span in tags.places
        ]
        return {"text": one.given, "words": tags.words, "tags": tags.tags, "spans": spans}

    def plain(one: Paired) -> str:
        return "".join(f"{word}\t{label}\n" for word, label in zip(one.found.words, one.found.tags, strict=True)) + "\n"

    run(paired("tagging", lambda texts: tagger.tag_full(texts), plain, tree), texts, files, as_json)


@dataclass(frozen=True, kw_only=True)
class EmbedFileOptions(TextFileOptions):
    output: Annotated[
        Path | None,
        option("--output", "-o", panel=FILES, metavar="FILE", help="JSON lines, or one array if the name ends in .npy"),
    ] = None


def embed(
    texts: Annotated[list[str] | None, argument("TEXT", "texts; default: standard input")] = None,
    *,
    model: ModelOption,
    width: Annotated[int | None, option(min=1, help="keep the first N numbers of each vector")] = None,
    compute: ComputeOptions,
    files: EmbedFileOptions,
) -> None:
    """Embed texts: a line of JSON per text, or one NumPy array."""
    texts, files = file_arguments(texts, files)
    embedder = predictor_with(model, compute, "embed", "embed texts", task="similarity")
    nothing = embedder.embed([], width=width)
    command = paired(
        "embedding",
        lambda texts: embedder.embed(texts, width=width).tolist(),
        lambda one: json_text({"text": one.given, "vector": one.found}),
        lambda one: {"text": one.given, "vector": one.found},
        blanks=True,
        pack=lambda one: array("f", one.found).tobytes(),
        width=nothing.shape[1],
    )
    is_array = files.output is not None and files.output.suffix == ".npy"
    if not is_array or (files.input_ is not None and not files.whole and files.input_.exists()):
        run(command, texts, files)
        return
    _save_array(command, open_input(texts, files), files, nothing)


def _save_array(command: TextCommand[Paired], source: InputSource, files: FileOptions, nothing: Any) -> None:
    """Save vectors of an unknown number of texts: all are held in memory."""
    import numpy as np

    assert files.output is not None
    with atomic_file(files.output, files.force) as file, warnings_as_notes():
        found = results(command, source)
        bar = progress(found, source.total, command.doing)
        rows = [np.array(one.found, dtype=np.float32) for _, one in bar if one is not None]
        np.save(file, np.stack(rows) if rows else nothing.numpy())


def similarity(
    texts: Annotated[
        list[str] | None, argument("TEXT", "two texts; default: pairs separated by a tab, from standard input")
    ] = None,
    *,
    model: ModelOption,
    query: Annotated[str | None, option(metavar="TEXT", help="compare every text with this one")] = None,
    top: Annotated[int | None, option(min=1, help="with --query: print the N most similar, best first")] = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Compute the similarity of two texts, -1 to 1: of one pair, of a pair per line, or of one text with many."""
    if top is not None and query is None:
        raise UserError("--top requires --query")
    if top is not None and files.shard is not None:
        raise UserError("--top compares all texts; remove --shard")
    texts, files = file_arguments(texts, files)
    if query is None and texts:
        if len(texts) != 2:
            raise UserError(f"expected two texts, got {len(texts)}; for more, use lines with a tab, or --query")
        texts = ["\t".join(text.replace("\t", " ") for text in texts)]
    embedder = predictor_with(model, compute, "similarity", "compare texts", task="similarity")

    command = paired(
        "comparing",
        lambda texts: embedder.similarity(texts if query is None else [(query, text) for text in texts]),
        lambda one: f"{one.found:.4f}" + ("\n" if query is None else f"\t{one.given}\n"),
        lambda one: {"texts": list(one.given) if query is None else [query, one.given], "similarity": one.found},
        parse=_two if query is None else str,
    )
    if top is None:
        run(command, texts, files, as_json)
        return
    _write_best(command, texts, files, as_json, top)


def rerank(
    texts: Annotated[list[str] | None, argument("TEXT", "texts; default: standard input")] = None,
    *,
    model: ModelOption,
    query: Annotated[str, option(metavar="TEXT", help="what the texts should answer")],
    top: Annotated[int | None, option(min=1, help="print the N best only")] = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Rank texts by how well they answer a query: `probability<TAB>text`, the best first."""
    if files.shard is not None:
        raise UserError("rerank compares all texts; remove --shard")
    texts, files = file_arguments(texts, files)
    reranker = predictor_with(model, compute, "rerank", "rank texts")
    command = paired(
        "ranking",
        lambda texts: reranker.relevance([(query, text) for text in texts]),
        lambda one: f"{one.found:.4f}\t{one.given}\n",
        lambda one: {"query": query, "text": one.given, "score": one.found},
    )
    _write_best(command, texts, files, as_json, top)


def _write_best(
    command: TextCommand[Paired], texts: list[str] | None, files: FileOptions, as_json: bool, top: int | None
) -> None:
    """The results with the highest numbers, in their order; of equal ones, the first."""
    source = open_input(texts, files)
    check_not_input(source.path, files.output)
    found = (one for _, one in results(command, source) if one is not None)
    with warnings_as_notes():
        every = sorted(found, key=lambda one: -one.found) if top is None else None
        best = heapq.nlargest(top or 1, found, key=lambda one: one.found) if every is None else every
    write_results(command, ((one.given, one) for one in best), files.output, as_json, force=files.force)


def score(
    texts: Annotated[
        list[str] | None, argument("TEXT", "a prompt and its answers; default: pairs separated by a tab, from stdin")
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Score answers with a reward model: of one prompt, or a prompt and an answer per line; higher is better."""
    texts, files = file_arguments(texts, files)
    if texts:
        prompt, *answers = (text.replace("\t", " ") for text in texts)
        if not answers:
            raise UserError("expected a prompt and its answers; for many prompts, use lines with a tab")
        texts = [f"{prompt}\t{answer}" for answer in answers]
    scorer = predictor_with(model, compute, "score", "score answers")

    command = paired(
        "scoring",
        lambda pairs: scorer.score([prompt for prompt, _ in pairs], [answer for _, answer in pairs]),
        lambda one: f"{one.found:.4f}\n",
        lambda one: {"prompt": one.given[0], "answer": one.given[1], "score": one.found},
        parse=_two,
    )
    run(command, texts, files, as_json)


def predict_click(
    texts: Annotated[
        list[str] | None, argument("ROW", "JSON objects, or a log (CSV, TSV, JSONL); default: JSON from stdin")
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Predict whether users click items: the probability for each row of a log."""
    texts, files = file_arguments(texts, files)
    clicks = predictor_with(model, compute, "predict_click", "predict clicks")
    if files.input_ is not None and files.input_.suffix in TABLES:
        check_not_input(files.input_, files.output)
        texts, files = clicks.table_rows(files.input_), replace(files, input_=None)
    command = paired(
        "predicting",
        lambda rows: clicks.predict_click(rows),
        lambda one: f"{one.found:.4f}\n",
        lambda one: {"row": one.given, "probability": one.found},
        parse=_object,
    )
    run(command, texts, files, as_json)


def _object(line: str) -> Any:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}; give a row of the log as an object, or a file with --input") from None
    if not isinstance(found, dict):
        raise UserError("expected a JSON object, a row of the log")
    return found


def _one_or_two(line: str) -> Any:
    texts = tuple(line.split("\t"))
    if len(texts) > 2:
        raise UserError(f"{len(texts)} columns; expected one text, or two separated by a tab")
    return texts[0] if len(texts) == 1 else texts


def _two(line: str) -> Any:
    texts = tuple(line.split("\t"))
    if len(texts) != 2:
        raise UserError(f"{len(texts)} column{'s' if len(texts) > 1 else ''}; expected two texts separated by a tab")
    return texts
