"""Speech in pieces, from a microphone or a long file: what is said is transcribed at every pause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.media.sound_files import PCM, RATES, WavFormat, read_header
from allyouneed.errors import UserError
from allyouneed.infer.speech.tracks import Segment

if TYPE_CHECKING:
    from allyouneed.infer.predictors.transcriber import Transcriber

FRAME = 0.02  # seconds whose loudness is measured together
PAUSE = 0.4  # seconds that end what is transcribed together
LEAST = 1.0  # seconds that are transcribed together, unless the sound ends
QUIET, SILENT = 0.08, 1e-3  # of the loudest frame; of full scale
PIECE = 0.1  # seconds read at a time


def stream(model: Transcriber, pieces: Iterable[Any], rate: int, **options: Any) -> Iterator[Segment]:
    """The segments of a sound that comes in pieces, mono samples at this rate, as soon as a pause follows."""
    low, high = RATES
    if not low <= rate <= high:
        raise UserError(f"{rate:,} samples per second; supported: {low:,} to {high:,}")
    longest = min(30.0, model.seconds)
    held, begin = torch.zeros(0), 0
    for piece in pieces:
        held = torch.cat([held, torch.as_tensor(piece).float().flatten()])
        while (cut := _ready(held, rate, longest)) is not None:
            yield from _segments(model, held[:cut], rate, begin, options)
            held, begin = held[cut:].clone(), begin + cut
    yield from _segments(model, held, rate, begin, options)


def _ready(held: Tensor, rate: int, longest: float) -> int | None:
    """The samples that can be transcribed now: up to the middle of a pause, or the quietest place of the second half
    of the longest piece."""
    size = round(FRAME * rate)
    frames = held[: len(held) // size * size].view(-1, size)
    if len(frames) * FRAME < LEAST:
        return None
    loudness = frames.square().mean(1).sqrt()
    quiet = (loudness < max(SILENT, QUIET * float(loudness.max()))).numpy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], quiet, [False]]).astype(np.int8)))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        middle = (first + last) // 2
        if (last - first) * FRAME >= PAUSE and middle * FRAME >= LEAST:
            return middle * size
    if len(frames) * FRAME < longest:
        return None
    half = len(frames) // 2
    return (half + int(loudness[half:].argmin()) + 1) * size


def _segments(model: Transcriber, samples: Tensor, rate: int, begin: int, options: dict[str, Any]) -> Iterator[Segment]:
    if not len(samples) or float(samples.abs().max()) < SILENT:
        return
    (found,) = model.transcribe_full([(samples, rate)], **options)
    for one in found.segments:
        yield replace(one, start=round(one.start + begin / rate, 3), end=round(one.end + begin / rate, 3))


def read_pieces(file: BinaryIO, rate: int) -> tuple[Iterator[Tensor], int]:
    """The samples of a pipe piece by piece, and their rate: a WAV file of any length, or 16-bit little-endian mono
    samples at `rate`."""
    head = file.read(12)
    form = WavFormat(PCM, 1, rate, 16)
    rest = head
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        (form, _), rest = read_header(file, "standard input"), b""
    if not head:
        raise UserError("standard input: no sound; pipe a WAV file or 16-bit samples into it")
    return _pieces(file, form, rest), form.rate


def _pieces(file: BinaryIO, form: WavFormat, held: bytes) -> Iterator[Tensor]:
    size = max(1, round(PIECE * form.rate)) * form.frame
    while block := file.read(size):
        held += block
        whole = len(held) // form.frame * form.frame
        yield form.mono(held[:whole])
        held = held[whole:]
    if len(held) >= form.frame:
        yield form.mono(held[: len(held) // form.frame * form.frame])
