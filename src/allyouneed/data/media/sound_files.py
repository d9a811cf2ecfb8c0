"""Read sound files: mono, resampled to the models' rate, between -1 and 1.

    samples = read_sound("speech.wav")

WAV is read here; FLAC, OGG, MP3 and the like by `soundfile` (the extra `sound`).
"""

from __future__ import annotations

import struct
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.media.resampling import resample
from allyouneed.data.media.sound import RATE
from allyouneed.errors import UserError
from allyouneed.errors.extras import missing

BLOCK = 1 << 22  # samples decoded at once
LARGE, MOST_EXPANDED = 256 << 20, 1000  # bytes of samples that may be a bomb, and times the bytes of the file
RATES = (1_000, 768_000)  # plausible sample rates; anything else is a damaged header
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
KINDS = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}


class Sound(NamedTuple):
    """`samples` (time,)"""

    samples: Tensor
    rate: int


def read_sound(path: Path | str, rate: int = RATE, longest: float | None = None) -> Tensor:
    """(time,) The mean of the channels, at `rate` samples per second. `longest`: refuse a longer sound, in seconds,
    without decoding all of it."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: a {'folder' if path.is_dir() else 'device'}, not a sound file")
    try:
        with path.open("rb") as file:
            head = file.read(12)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not head:
        raise UserError(f"{path}: the file is empty")
    riff = head[:4] == b"RIFF" and head[8:] == b"WAVE"
    sound = _read_wav(path) if riff else _read_soundfile(path, longest)
    if longest is not None and len(sound.samples) > longest * max(1, sound.rate):
        raise UserError(f"{path}: longer than {longest:g} s, the limit; split it")
    return to_rate(sound, rate, str(path))


def read_samples(sound: Any, longest: float | None = None) -> Tensor:
    """(time,) at `RATE`, of a path, mono samples at `RATE`, or (samples, rate). `longest`: see `read_sound`."""
    if isinstance(sound, str | Path):
        return read_sound(sound, longest=longest)
    values, rate = sound if isinstance(sound, tuple) and len(sound) == 2 else (sound, RATE)
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.ascontiguousarray(values))
    if not isinstance(values, Tensor) or values.dim() != 1 or not isinstance(rate, int):
        got = (
            f"{type(values).__name__} of {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        )
        raise UserError(f"expected a path, mono samples, or (samples, rate), got {got}")
    if not values.is_floating_point():
        raise UserError(f"sound as {values.dtype}: expected floats between -1 and 1; divide by its maximum")
    if longest is not None and len(values) > longest * rate:
        raise UserError(f"sound of {len(values) / rate:g} s: longer than {longest:g} s, the limit; split it")
    return to_rate(Sound(values.float().cpu(), rate))


def to_rate(sound: Sound, rate: int = RATE, name: str = "sound") -> Tensor:
    low, high = RATES
    if not low <= sound.rate <= high:
        raise UserError(f"{name}: {sound.rate:,} samples per second; supported: {low:,} to {high:,}")
    if not sound.samples.isfinite().all():
        raise UserError(f"{name}: contains non-finite samples; record or convert it again")
    return resample(sound.samples, sound.rate, rate)


def _read_wav(path: Path) -> Sound:
    """RIFF: chunks of (name, size, bytes); `fmt ` describes the samples in `data`."""
    content = memoryview(path.read_bytes())
    header: tuple[int, int, int, int] | None = None
    at = 12
    while at + 8 <= len(content):
        name, size = bytes(content[at : at + 4]), int.from_bytes(content[at + 4 : at + 8], "little")
        body = content[at + 8 : at + 8 + size]  # an interrupted recording leaves a size that is too large
        if name == b"fmt " and len(body) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            if kind == EXTENSIBLE and len(body) >= 26:
                kind = int.from_bytes(body[24:26], "little")
            header = kind, channels, rate, bits
        if name == b"data":
            if header is None:
                break
            kind, channels, rate, bits = header
            return Sound(_to_mono(_decode_samples(path, body, kind, bits), channels, path), rate)
        at += 8 + size + size % 2
    raise UserError(f"{path}: a WAV file without samples; it is damaged")


def _decode_samples(path: Path, body: memoryview, kind: int, bits: int) -> Any:
    """Between -1 and 1."""
    if (kind, bits) == (PCM, 24):
        raw = np.frombuffer(body[: len(body) // 3 * 3], "u1").reshape(-1, 3).astype(np.int32)
        return ((raw[:, 0] << 8 | raw[:, 1] << 16 | raw[:, 2] << 24) >> 8).astype(np.float32) / 2**23
    if (kind, bits) not in KINDS:
        raise UserError(f"{path}: WAV format {kind} with {bits} bits is not supported; convert it to 16-bit PCM")
    dtype = np.dtype(KINDS[kind, bits])
    values = np.frombuffer(body[: len(body) // dtype.itemsize * dtype.itemsize], dtype).astype(np.float32)
    if kind == FLOAT:
        return values
    return (values - 128) / 128 if bits == 8 else values / np.float32(2 ** (bits - 1))


def _to_mono(values: Any, channels: int, path: Path) -> Tensor:
    if not channels:
        raise UserError(f"{path}: a WAV file with no channels; it is damaged")
    whole = values[: len(values) // channels * channels].reshape(-1, channels)
    return torch.from_numpy(np.ascontiguousarray(whole.mean(1, dtype=np.float32)))


def _read_soundfile(path: Path, longest: float | None = None) -> Sound:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: libsndfile is missing
        raise missing("sound", f"{path}: every format but WAV") from None
    try:
        with soundfile.SoundFile(path) as file:
            rate = int(file.samplerate)
            left, read, size = inf if longest is None else int(longest * rate) + 1, 0, path.stat().st_size
            parts, block = [], max(1, BLOCK // file.channels)
            # the number of frames in the header may be a lie
            while left > 0 and len(values := file.read(int(min(left, block)), dtype="float32", always_2d=True)):
                parts.append(values.mean(1, dtype=np.float32))
                left, read = left - len(values), read + parts[-1].nbytes
                if read > LARGE and read > MOST_EXPANDED * size:
                    raise UserError(f"{path}: {size:,} bytes that expand to hours of sound; cut it")
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as sound: {error}") from None
    return Sound(torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])), rate)
