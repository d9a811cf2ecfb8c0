"""Commands for sound and images: transcribe, classify-image, match-image."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from allyouneed.cli.loading import ready
from allyouneed.cli.options import (
    FILES,
    BeamOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    ModelOption,
    OutputOption,
    RestartOption,
    TopOption,
    given,
    option,
)
from allyouneed.cli.streams import lines
from allyouneed.cli.texts import Use, one_line, ranked, run
from allyouneed.errors import UserError

ListOption = Annotated[
    Path | None, option("--input", "-i", panel=FILES, metavar="FILE", help="a file that names them, a path a line")
]
ImagesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="IMAGE", help="files; a path a line of standard input if none is given")
]


@dataclass(frozen=True)
class Heard:
    """A file and what was found in it."""

    path: str
    found: Any

    @property
    def notes(self) -> list[str]:
        return list(getattr(self.found, "notes", ()))


def _each(paths: list[str], found: list[Any]) -> list[Heard]:
    return [Heard(path, one) for path, one in zip(paths, found, strict=True)]


def transcribe(
    sounds: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOUND", help="files (wav, flac); a path a line of standard input if none is given"),
    ] = None,
    *,
    model: ModelOption,
    language: Annotated[str | None, option(metavar="LANGUAGE", help="what is spoken; found out if not given")] = None,
    to_english: Annotated[bool, option("--to-english", help="translate what is said into English")] = False,
    timestamps: Annotated[bool, option("--timestamps", help="say when each part was said")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: ListOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    beam: BeamOption = None,
) -> None:
    """Write down what is said in sound files of any length, a line each."""
    options = given(
        language=language, task="translate" if to_english else None, timestamps=timestamps or None, beam=beam
    )
    listener = ready(model, device, dtype, "transcribe_full", "transcribe sound")

    def plain(one: Heard) -> str:
        if not timestamps:
            return one_line(one.found.text.strip()) + "\n"
        parts = [f"{s.start:.2f}\t{s.end:.2f}\t{one_line(s.text.strip())}\n" for s in one.found.segments]
        return "".join(parts) + "\n"

    use = Use(
        "listening",
        lambda paths, first: _each(paths, listener.transcribe_full(paths, **options)),
        plain,
        lambda one: {"sound": one.path, **asdict(one.found)},
        blanks=False,
        chunk=4,
    )
    run(use, sounds, input_, output, as_json, force=force, restart=restart)


def classify_image(
    images: ImagesArgument = None,
    *,
    model: ModelOption,
    top: TopOption = None,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: ListOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
) -> None:
    """Say what is in each image."""
    classifier = ready(model, device, dtype, "classify_image_full", "tell images apart")
    use = Use(
        "looking",
        lambda paths, first: _each(paths, classifier.classify_image_full(paths, top=top or 5)),
        lambda one: ranked(top is not None, [(s, label) for label, s in list(one.found.scores.items())[: top or 1]]),
        lambda one: {"image": one.path, "label": one.found.label, "scores": one.found.scores},
        blanks=False,
        chunk=64,
    )
    run(use, images, input_, output, as_json, force=force, restart=restart)


def match_image(
    images: ImagesArgument = None,
    *,
    model: ModelOption,
    texts: Annotated[
        list[str] | None, option("--text", "-t", metavar="TEXT", help="what an image may show; repeatable")
    ] = None,
    file: Annotated[Path | None, option("--texts", panel=FILES, metavar="FILE", help="the same, a line each")] = None,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: ListOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
) -> None:
    """Say how likely each of some texts belongs to an image.

    A text a line with its probability, likeliest first; an empty line after each image.
    """
    said = [*(texts or []), *(line for line in (lines(file) if file else ()) if line.strip())]
    if not said:
        raise UserError("give the texts to choose from: --text TEXT (repeatable) or --texts FILE")
    matcher = ready(model, device, dtype, "match_image_full", "match images and texts")

    def plain(one: Heard) -> str:
        return ranked(True, sorted(((s, one_line(text)) for text, s in one.found.scores.items()), reverse=True))

    use = Use(
        "looking",
        lambda paths, first: _each(paths, matcher.match_image_full(paths, said) if paths else []),
        plain,
        lambda one: {"image": one.path, **asdict(one.found)},
        blanks=False,
        chunk=64,
    )
    run(use, images, input_, output, as_json, force=force, restart=restart)
