"""`allyouneed look use|anatomy|compare|replay … -o page.html`: views of the page as one offline file."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from allyouneed.cli.completion import folders, presets
from allyouneed.cli.loading import load_predictor
from allyouneed.cli.look import page_command
from allyouneed.cli.messages import show_status
from allyouneed.cli.options import (
    MODEL,
    ComputeOptions,
    FromOption,
    LengthOption,
    SearchOptions,
    ToOption,
    TranslatorOption,
    argument,
    option,
)
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.inspect.views.document import Document

WORDS, CONTINUED = 24, 2  # words whose alternatives are in the file, and alternatives of each that are continued

PageOption = Annotated[Path, option("--output", "-o", metavar="FILE", help="the page to write, an .html file")]
TargetOption = Annotated[str | None, option("--target", metavar="TEXT", help="the answer begins with this text")]
InputArgument = Annotated[str, argument("INPUT", "a text; for models of images or sound, the path of a file")]


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SearchOptions):
    """How the answer of a view is decoded; None: as the model folder says."""

    to: ToOption = None
    source: FromOption = None
    target: TargetOption = None
    tokens: LengthOption = None


@page_command("use")
def use(
    text: InputArgument,
    *,
    output: PageOption,
    model: TranslatorOption = None,
    answer: AnswerOptions,
    compute: ComputeOptions,
) -> None:
    """Use a model and see how it answers: alternatives for each word, the beam search, alignment, the cut of
    sampling."""
    from allyouneed.apps.inspect.offline import check_page_path, view_model
    from allyouneed.apps.inspect.views import build_document
    from allyouneed.models import TRANSLATOR

    check_page_path(output)
    predictor = load_predictor(model or Path(TRANSLATOR), compute)
    shown, asked = view_model(predictor), input_fields(predictor, text) | answer.given()
    first = build_document("use", shown, **asked)
    documents = [first]
    for part, prefix, ids in _words(first)[:WORDS]:
        before = asked | {"part": part, "prefix": prefix}
        before.pop("target", None)
        documents.append(build_document("next", shown, **before))
        for one in [one for one in documents[-1]["data"]["choices"] if "ids" in one and one["ids"] != ids][:CONTINUED]:
            documents.append(build_document("use", shown, **before | {"prefix": [*prefix, *one["ids"]]}))
    save_page(documents, output)


def _words(document: Document) -> list[tuple[int, list[int], list[int]]]:
    """The words of an answer: number of the part, tokens before the word, tokens of the word."""
    found = []
    for part in document["data"].get("parts", ()):
        tokens = [one["id"] for one in part["tokens"]]
        found += [
            (part["number"], tokens[:begin], tokens[begin:end])
            for begin, end in part["words"]
            if begin >= part["prefix"]
        ]
    return found


def input_fields(predictor: Any, text: str) -> dict[str, Any]:
    """The input as a view takes it."""
    images = ("image-classification", "image-text", "captioning")
    kind = dict.fromkeys(images, "image") | dict.fromkeys(("transcription", "audio-classification"), "sound")
    name = kind.get(str(predictor.folder.task["kind"]))
    if name is None:
        return {"text": text}
    try:
        return {name: base64.b64encode(Path(text).read_bytes()).decode()}
    except (OSError, ValueError) as error:
        raise UserError(f"{text}: cannot read the {name}: {getattr(error, 'strerror', error)}") from None


@page_command("anatomy")
def anatomy(
    model: Annotated[str, argument("MODEL", "a preset, a YAML file or a model folder", autocompletion=presets)],
    other: Annotated[str | None, argument("OTHER", "a second one to compare with", autocompletion=presets)] = None,
    *,
    output: PageOption,
    length: Annotated[int, option(min=1, show_default=True, help="context that FLOPs and cache are given for")] = 1024,
    size: Annotated[int | None, option(min=2, max=2048, help="tokens of the patterns; default: chosen by each")] = None,
) -> None:
    """Draw a model from its config: parts, shapes, parameters, FLOPs, cache, patterns and how far they reach."""
    from allyouneed import model_config
    from allyouneed.apps.inspect.offline import check_page_path
    from allyouneed.apps.inspect.views import build_document
    from allyouneed.config import preset_names, to_yaml

    check_page_path(output)
    request: dict[str, Any] = {"length": length, "names": [model, *([other] if other else [])]}
    for given, keys in ((model, ("preset", "yaml")), (other, ("other", "other_yaml"))):
        if given is not None:
            known = given in preset_names()
            request[keys[0] if known else keys[1]] = given if known else to_yaml(model_config(given))
    if size is not None:
        request["size"] = size
    save_page([build_document("anatomy", None, **request)], output)


@page_command("compare")
def compare(
    text: InputArgument,
    *,
    model: Annotated[
        list[Path], option(*MODEL, metavar="FOLDER", autocompletion=folders, help="a model folder; give two")
    ],
    output: PageOption,
    answer: AnswerOptions,
    compute: ComputeOptions,
) -> None:
    """Two models, one input: answers, log-probabilities of each word, alignment."""
    from allyouneed.apps.inspect.offline import check_page_path, view_model
    from allyouneed.apps.inspect.views import build_document

    check_page_path(output)
    if len(model) != 2:
        raise UserError(f"expected two models (-m FOLDER -m FOLDER), got {len(model)}")
    sides = [view_model(load_predictor(one, compute)) for one in model]
    asked = input_fields(sides[0].predictor, text) | answer.given()
    names = [one.name for one in sides]
    save_page([build_document("compare", sides, **asked, models=names)], output)


@page_command("replay")
def replay(
    run: Annotated[Path, argument("RUN", "the folder of a training run")],
    text: Annotated[str, argument("TEXT", "what every checkpoint answers")],
    *,
    output: PageOption,
    view: Annotated[
        list[str] | None,
        option(metavar="NAME", help="views of every checkpoint, e.g. mixing; default: use; repeatable"),
    ] = None,
) -> None:
    """Replay a training run: the answer of every checkpoint beside the loss curve."""
    from allyouneed.apps.inspect.offline import check_page_path
    from allyouneed.apps.inspect.views import build_document
    from allyouneed.apps.inspect.views.replay import Runs

    check_page_path(output)
    if not (run / "checkpoints").is_dir():
        raise UserError(f"{run}: not the folder of a training run: it has no `checkpoints`")
    runs, name = Runs(run), run.resolve().name
    documents = [build_document("replay", runs, run=name, text=text)]
    for one in documents[0]["data"]["answers"]:
        if "error" not in one:
            asked = {"run": name, "step": one["step"], "text": text}
            documents += [build_document("replay", runs, **asked, view=wanted) for wanted in view or ["use"]]
    save_page(documents, output)


def save_page(documents: list[Document], output: Path) -> None:
    from allyouneed.apps.inspect.offline import save

    save(documents, output)
    show_status(f"{output}: written")
