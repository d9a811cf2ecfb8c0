"""The command that scores a model, or a file of translations."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from allyouneed.cli.loading import load_predictor, predictor_with
from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import (
    FILES,
    BeamOption,
    ComputeOptions,
    DeviceOption,
    FromOption,
    JsonOption,
    ToOption,
    argument,
    option,
)
from allyouneed.cli.text.streams import open_output, progress, read_lines
from allyouneed.cli.text.text_input import check_not_input
from allyouneed.errors import UserError, printable
from allyouneed.infer.predictors.registry import translates

if TYPE_CHECKING:
    from allyouneed.data.files.pairs import Pair


def evaluate(
    pairs: Annotated[Path | None, argument("PAIRS", "test pairs: TSV, CSV or JSON (.gz, .zst too)")] = None,
    model: Annotated[
        Path | None, option("--model", "-m", metavar="FOLDER", help="the model to score, e.g. translator")
    ] = None,
    hypotheses: Annotated[
        Path | None, option(metavar="FILE", help="score these translations instead, one per line")
    ] = None,
    tokenize: Annotated[str | None, option(metavar="NAME", help="sacreBLEU's: 13a, intl, zh, char or none")] = None,
    lowercase: Annotated[bool, option("--lowercase", "-lc", help="ignore case")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    source: Annotated[
        Path | None, option(panel=FILES, metavar="FILE", help="instead of PAIRS: the sources, one per line")
    ] = None,
    target: Annotated[
        Path | None, option(panel=FILES, metavar="FILE", help="instead of PAIRS: the references, one per line")
    ] = None,
    columns: Annotated[
        str | None,
        option(panel=FILES, metavar="A,B", help="columns of PAIRS, by name or index from 0; default: as in training"),
    ] = None,
    portion: Annotated[
        str | None, option(panel=FILES, metavar="FROM,TO", help="score a part of PAIRS, as split in training: 0.9,1")
    ] = None,
    output: Annotated[
        Path | None, option("--output", "-o", panel=FILES, metavar="FILE", help="save the translations here")
    ] = None,
    to: ToOption = None,
    from_: FromOption = None,
    beam: BeamOption = None,
    context: Annotated[
        int | None, option(metavar="N", help="read each sentence with the N before it; default: as in training")
    ] = None,
    lengths: Annotated[
        str | None, option(metavar="N,N,…", help="score by length, as a curve: 512,1024,2048; --output saves it (.svg)")
    ] = None,
) -> None:
    """Score a model with the metrics of its task; translations, or a file of them, with BLEU and chrF."""
    from allyouneed.apps.translate.direction import find_direction
    from allyouneed.metrics.translation import WORDS
    from allyouneed.metrics.translation import evaluate as score

    if (model is None) == (hypotheses is None):
        raise UserError("give one of --model (translate, then score) and --hypotheses (score a file)")
    if tokenize is not None and tokenize not in WORDS:
        raise UserError(f"--tokenize {tokenize}: expected {', '.join(WORDS)}")
    if hypotheses is not None and any(given is not None for given in (beam, from_, output, context)):
        raise UserError("--beam, --from, --context and --output require --model; --hypotheses translates nothing")
    if lengths is not None:
        if model is None or pairs is None:
            raise UserError("--lengths scores a model (--model) on a file of examples; give both")
        _evaluate_lengths(pairs, model, lengths, output, device, as_json, _columns(columns) | _portion(portion))
        return
    if model is not None and pairs is not None and not _is_translator(model):
        given = {
            "--tokenize": tokenize, "--lowercase": lowercase or None, "--source": source, "--target": target,
            "--output": output, "--to": to, "--from": from_, "--beam": beam, "--context": context,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} is for translation, and {model} has another task; remove it")
        _evaluate_examples(pairs, model, device, as_json, _columns(columns) | _portion(portion))
        return
    for read in (pairs, source, target):
        check_not_input(read, output)
    layout = ({} if model is None else _context(model, context, pairs is not None)) | _columns(columns)
    layout |= _portion(portion)
    tests = _test_pairs(pairs, source, target, layout, needs_source=model is not None)
    sources, references = [pair.source for pair in tests], [pair.target for pair in tests]
    if hypotheses is not None:
        found = list(read_lines(hypotheses))
    else:
        assert model is not None
        translator = predictor_with(model, ComputeOptions(device=device), "translate_stream", "translate")
        options: dict[str, Any] = {} if beam is None else {"beam": beam}
        if layout.get("context") and context != 0:
            options["context"] = [[before for before, _ in pair.context[-(context or 0) :]] for pair in tests]
        if (routes := getattr(translator, "routes", None)) is not None:
            direction = find_direction(routes, sources, references, to, from_)
            to, from_ = direction.to, direction.from_
            if direction.note:
                show_notes([direction.note])
        stream = translator.translate_stream(sources, to, from_=from_, chunk=256, protect=False, **options)
        if to is None and len(translator.languages) == 1:
            to = translator.languages[0]
        found = []
        with ExitStack() as stack:
            write = None if output is None else stack.enter_context(open_output(output))
            for one in progress(stream, len(sources), "translating"):
                found.append(one.text)
                if write is not None:
                    write(one.text + "\n")
    scores = score(found, references, to, tokenize=tokenize, lowercase=lowercase)
    print(json.dumps(scores.tree(), ensure_ascii=False) if as_json else scores.text())


def _is_translator(folder: Path) -> bool:
    from allyouneed.interop.load import about

    return translates(str(about(folder)["task"].get("kind")))


def _context(folder: Path, sentences: int | None, table: bool) -> dict[str, Any]:
    """How pairs of documents are read: as in training. `sentences`: refused if the model was not trained with as
    many."""
    from allyouneed.apps.translate.context import REFUSAL, trained_context
    from allyouneed.interop.load import about

    known = about(folder)
    trained, files = trained_context(known["task"]), known.get("files", {})
    if trained is None:
        if sentences:
            raise UserError(REFUSAL)
        return {}
    if sentences is not None and not 0 <= sentences <= trained.sentences:
        raise UserError(f"--context: this model was trained with up to {trained.sentences} sentences, not {sentences}")
    marked = table and files.get("document") is not None
    columns = {key: files[key] for key in ("document", "columns", "keys") if marked and key in files}
    return {"context": trained.sentences} | columns


def _columns(text: str | None) -> dict[str, Any]:
    """The `columns` of a file, from `en,de` or `0,2`."""
    if text is None:
        return {}
    names = [name.strip() for name in text.split(",")]
    return {"columns": [int(name) if name.isdecimal() else name for name in names]}


def _portion(text: str | None) -> dict[str, Any]:
    """The `portion` of a file, from `0.9,1`."""
    if text is None:
        return {}
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise UserError(f"--portion {text}: expected two numbers from 0 to 1, such as 0.9,1") from None
    return {"portion": (low, high)}


def _evaluate_examples(path: Path, model: Path, device: str, as_json: bool, columns: dict[str, Any]) -> None:
    """Evaluate any task but translation: the file is read like the training data."""
    from allyouneed.infer.evaluate import evaluate as evaluate_file

    result, report = evaluate_file(load_predictor(model, ComputeOptions(device=device)), path, layout=columns)
    if report.dropped:
        show_notes([report.text()])
    show_notes(result.notes)
    print(json.dumps(result.figures) if as_json else printable(result.text))


def _evaluate_lengths(
    path: Path, model: Path, lengths: str, output: Path | None, device: str, as_json: bool, layout: dict[str, Any]
) -> None:
    from allyouneed.files import write_text
    from allyouneed.lab.lengths import length_curve

    counts = [int(part) for part in lengths.split(",") if part.strip().isdecimal()]
    if len(counts) != lengths.count(",") + 1 or not all(counts):
        raise UserError(f"--lengths {lengths}: expected numbers of tokens, separated by commas: 512,1024,2048")
    if output is not None and output.suffix != ".svg":
        raise UserError(f"--output {output}: --lengths draws a curve; name a file that ends in .svg")
    check_not_input(path, output)
    found = length_curve(load_predictor(model, ComputeOptions(device=device)), path, counts, layout)
    if output is not None:
        write_text(output, found.svg(model.name))
    print(json.dumps(found.tree()) if as_json else found.text())


def _test_pairs(
    pairs: Path | None, source: Path | None, target: Path | None, columns: dict[str, Any], needs_source: bool
) -> list[Pair]:
    from allyouneed.config import parse
    from allyouneed.data.files.pairs import Pair, PairFiles
    from allyouneed.data.files.readers import Report

    if not needs_source and pairs is None and source is None and target is not None:
        return [Pair("", line, str(target), number) for number, line in enumerate(read_lines(target), 1)]
    if (pairs is None) == (source is None and target is None) or (source is None) != (target is None):
        raise UserError("give PAIRS (one file with both sides), or --source and --target (aligned line by line)")
    given = {"path": pairs, "source": source, "target": target}
    tree: dict[str, Any] = {key: str(path) for key, path in given.items() if path is not None}
    files = parse(PairFiles, tree | columns, "test pairs")
    report = Report()
    found = list(files.read(report))
    if not found:
        raise UserError(f"no usable test pair: {report.text()}")
    if report.dropped:
        show_notes([f"test pairs: {report.text()}"])
    return found
