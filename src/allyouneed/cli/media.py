"""Commands for sound and images: transcribe, classify-audio, classify-image, match-image, caption."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from allyouneed.cli.loading import predictor_with
from allyouneed.cli.options import (
    FILES,
    BeamOption,
    ComputeOptions,
    JsonOption,
    ModelOption,
    PathFileOptions,
    TopOption,
    argument,
    option,
)
from allyouneed.cli.text.shards import files_below
from allyouneed.cli.text.streams import read_lines
from allyouneed.cli.text.text_input import file_arguments
from allyouneed.cli.text_commands import Paired, TextCommand, one_line, paired, ranked_lines, run
from allyouneed.errors import UserError, printable
from allyouneed.errors.extras import is_installed, missing, require

SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".m4a", ".opus", ".aiff")  # of the files of a folder
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
SoundsArgument = Annotated[
    list[str] | None, argument("SOUND", "sound files, or a folder or list of them; default: standard input")
]
ImagesArgument = Annotated[
    list[str] | None, argument("IMAGE", "image files, or a folder or list of them; default: standard input")
]


def _check_formats(sounds: list[str] | None, input_: Path | None) -> None:
    """Refuse before the model is loaded if a file other than WAV cannot be opened."""
    if is_installed("sound"):
        return
    listed: Iterable[str] = sounds or ()
    if input_ is not None and input_.is_dir():
        listed = map(str, files_below(input_, SOUND_SUFFIXES))
    elif input_ is not None and input_.is_file():
        listed = read_lines(input_)
    for name in listed:
        if Path(name).suffix.lower() in SOUND_SUFFIXES[1:]:
            raise missing("sound", f"{name}: every format but WAV")


def transcribe(
    sounds: SoundsArgument = None,
    *,
    model: ModelOption,
    language: Annotated[str | None, option(metavar="LANGUAGE", help="the spoken language; default: detected")] = None,
    to_english: Annotated[bool, option("--to-english", help="translate into English")] = False,
    timestamps: Annotated[bool, option("--timestamps", help="print start and end of each segment")] = False,
    rate: Annotated[int, option(min=1, metavar="N", show_default=True, help="samples per second of `-`")] = 16_000,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: PathFileOptions,
    beam: BeamOption = None,
) -> None:
    """Transcribe sound files of any length, one line each.

    `-` reads a sound from standard input, a WAV file or 16-bit mono samples, and prints each line at a pause:
    `arecord -f S16_LE -r 16000 | allyouneed transcribe --model MODEL -`.
    """
    given = {"language": language, "task": "translate" if to_english else None, "timestamps": timestamps or None}
    options = {name: value for name, value in (given | {"beam": beam}).items() if value is not None}
    if sounds == ["-"]:
        _transcribe_stream(
            predictor_with(model, compute, "transcribe_full", "transcribe sound"), rate, options, as_json
        )
        return
    sounds, files = file_arguments(sounds, files, paths=True)
    _check_formats(sounds, files.input_)
    transcriber = predictor_with(model, compute, "transcribe_full", "transcribe sound")

    def plain(one: Paired) -> str:
        if not timestamps:
            return one_line(one.found.text.strip()) + "\n"
        parts = [f"{s.start:.2f}\t{s.end:.2f}\t{one_line(s.text.strip())}\n" for s in one.found.segments]
        return "".join(parts) + "\n"

    command = paired(
        "transcribing",
        lambda paths: transcriber.transcribe_full(paths, **options),
        plain,
        lambda one: {"sound": one.given, **asdict(one.found)},
        chunk=4,
    )
    run(command, sounds, files, as_json, SOUND_SUFFIXES)


def _transcribe_stream(model: Any, rate: int, options: dict[str, Any], as_json: bool) -> None:
    """Each segment on a line as soon as it is known."""
    from allyouneed.infer.speech.stream import read_pieces

    if sys.stdin.isatty():
        raise UserError("standard input is a terminal; pipe sound into it: arecord -f S16_LE -r 16000 | …")
    pieces, rate = read_pieces(sys.stdin.buffer, rate)
    timed = options.pop("timestamps", False)
    for one in model.stream(pieces, rate, **options):
        plain = (f"{one.start:.2f}\t{one.end:.2f}\t" if timed else "") + one_line(one.text.strip())
        print(json.dumps(asdict(one), ensure_ascii=False) if as_json else printable(plain), flush=True)


def classify_audio(
    sounds: SoundsArgument = None,
    *,
    model: ModelOption,
    top: TopOption = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: PathFileOptions,
) -> None:
    """Classify sounds."""
    sounds, files = file_arguments(sounds, files, paths=True)
    _check_formats(sounds, files.input_)
    classifier = predictor_with(model, compute, "classify_audio_full", "classify sounds")
    command = _classes("sound", lambda paths: classifier.classify_audio_full(paths, top=top or 5), top)
    run(command, sounds, files, as_json, SOUND_SUFFIXES)


def _classes(noun: str, find: Callable[[list[Any]], Sequence[Any]], top: int | None) -> TextCommand[Paired]:
    return paired(
        "classifying",
        find,
        lambda one: ranked_lines(
            top is not None, [(s, label) for label, s in list(one.found.scores.items())[: top or 1]]
        ),
        lambda one: {noun: one.given, "label": one.found.label, "scores": one.found.scores},
        chunk=64,
    )


def classify_image(
    images: ImagesArgument = None,
    *,
    model: ModelOption,
    top: TopOption = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: PathFileOptions,
) -> None:
    """Classify images."""
    require("image", "an image file")
    images, files = file_arguments(images, files, paths=True)
    classifier = predictor_with(model, compute, "classify_image_full", "classify images")
    command = _classes("image", lambda paths: classifier.classify_image_full(paths, top=top or 5), top)
    run(command, images, files, as_json, IMAGE_SUFFIXES)


def match_image(
    images: ImagesArgument = None,
    *,
    model: ModelOption,
    texts: Annotated[
        list[str] | None, option("--text", "-t", metavar="TEXT", help="a candidate text; repeatable")
    ] = None,
    file: Annotated[
        Path | None, option("--texts", panel=FILES, metavar="FILE", help="candidate texts, one per line")
    ] = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: PathFileOptions,
) -> None:
    """Match images with texts.

    Prints each text with its probability, most likely first, and an empty line after each image.
    """
    candidates = [*(texts or []), *(line for line in (read_lines(file) if file else ()) if line.strip())]
    if not candidates:
        raise UserError("no candidate texts; give --text TEXT (repeatable) or --texts FILE")
    require("image", "an image file")
    images, files = file_arguments(images, files, paths=True)
    matcher = predictor_with(model, compute, "match_image_full", "match images and texts")

    def plain(one: Paired) -> str:
        return ranked_lines(True, sorted(((s, one_line(text)) for text, s in one.found.scores.items()), reverse=True))

    command = paired(
        "matching",
        lambda paths: matcher.match_image_full(paths, candidates) if paths else [],
        plain,
        lambda one: {"image": one.given, **asdict(one.found)},
        chunk=64,
    )
    run(command, images, files, as_json, IMAGE_SUFFIXES)


def caption(
    images: ImagesArgument = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: PathFileOptions,
    beam: BeamOption = None,
) -> None:
    """Describe images, one line each."""
    require("image", "an image file")
    images, files = file_arguments(images, files, paths=True)
    captioner = predictor_with(model, compute, "caption_full", "describe images")
    options = {} if beam is None else {"beam": beam}
    command = paired(
        "describing",
        lambda paths: captioner.caption_full(paths, **options),
        lambda one: one_line(one.found.text) + "\n",
        lambda one: {"image": one.given, **asdict(one.found)},
        chunk=16,
    )
    run(command, images, files, as_json, IMAGE_SUFFIXES)
