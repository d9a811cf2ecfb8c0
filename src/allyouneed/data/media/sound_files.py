"""Read sound files: mono, resampled to the models' rate, between -1 and 1.

    samples = read_sound("speech.wav")

WAV is read here; FLAC, OGG, MP3 and the like by `soundfile` (the extra `sound`).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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


def read_sound(path: Path | str | bytes, rate: int = RATE, longest: float | None = None) -> Tensor:
    """(time,) The mean of the channels, at `rate` samples per second. `path`: a file, or the bytes of one; `longest`:
    refuse a longer sound, in seconds, without reading all of it."""
    if isinstance(path, bytes):
        return _read(BytesIO(path), "sound", rate, longest)
    if Path(path).exists() and not Path(path).is_file():
        raise UserError(f"{path}: a {'folder' if Path(path).is_dir() else 'device'}, not a sound file")
    try:
        with Path(path).open("rb") as file:
            return _read(file, str(path), rate, longest)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read(file: BinaryIO, name: str, rate: int, longest: float | None) -> Tensor:
    head = file.read(12)
    if not head:
        raise UserError(f"{name}: the file is empty")
    riff = head[:4] == b"RIFF" and head[8:] == b"WAVE"
    sound = _read_wav(file, name, longest) if riff else _read_soundfile(file, name, longest)
    if longest is not None and len(sound.samples) > longest * max(1, sound.rate):
        raise UserError(f"{name}: longer than {longest:g} s, the limit; split it")
    return to_rate(sound, rate, name)


def read_samples(sound: Any, longest: float | None = None) -> Tensor:
    """(time,) at `RATE`, of a path, the bytes of a file, mono samples at `RATE`, or (samples, rate). `longest`: see
    `read_sound`."""
    if isinstance(sound, str | Path | bytes):
        return read_sound(sound, longest=longest)
    values, rate = sound if isinstance(sound, tuple) and len(sound) == 2 else (sound, RATE)
    if isinstance(values, np.ndarray):
        if sound is not values and values.dtype.kind == "i":  # samples of a file, with their rate
            values = values.astype(np.float32) / -float(np.iinfo(values.dtype).min)
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


class WavFormat(NamedTuple):
    """What the chunk `fmt ` says of the samples."""

    kind: int
    channels: int
    rate: int
    bits: int

    @classmethod
    def parse(cls, body: bytes, name: str) -> WavFormat:
        kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
        if kind == EXTENSIBLE and len(body) >= 26:
            kind = int.from_bytes(body[24:26], "little")
        if not channels:
            raise UserError(f"{name}: a WAV file with no channels; it is damaged")
        if (kind, bits) != (PCM, 24) and (kind, bits) not in KINDS:
            raise UserError(f"{name}: WAV format {kind} with {bits} bits is not supported; convert it to 16-bit PCM")
        return cls(kind, channels, rate, bits)

    @property
    def frame(self) -> int:
        """Bytes of one sample of all channels."""
        return self.channels * self.bits // 8

    def mono(self, body: bytes) -> Tensor:
        """(time,) between -1 and 1."""
        values = _decode_samples(body, self.kind, self.bits)
        whole = values[: len(values) // self.channels * self.channels].reshape(-1, self.channels)
        return torch.from_numpy(np.ascontiguousarray(whole.mean(1, dtype=np.float32)))


def read_header(file: BinaryIO, name: str) -> tuple[WavFormat, int]:
    """The format of a RIFF file, read up to its samples, and the number of bytes that it says they have. Chunks are
    (name, size, bytes)."""
    found: WavFormat | None = None
    while len(head := file.read(8)) == 8:
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data":
            break
        if head[:4] == b"fmt ":
            body = file.read(min(size + size % 2, 1 << 16))
            found = WavFormat.parse(body, name) if len(body) >= 16 else found
        else:
            deque(_take(file, size + size % 2), maxlen=0)
    if found is None or len(head) < 8:
        raise UserError(f"{name}: a WAV file without samples; it is damaged")
    return found, size


def _take(file: BinaryIO, count: int) -> Iterator[bytes]:
    """`count` bytes, fewer at the end, block by block: memory for what a header promises is not taken before."""
    while count > 0 and (block := file.read(min(count, 1 << 20))):
        count -= len(block)
        yield block


def _read_wav(file: BinaryIO, name: str, longest: float | None) -> Sound:
    form, size = read_header(file, name)
    if longest is not None:  # and one sample more, which shows that it is longer
        size = min(size, (int(longest * form.rate) + 1) * form.frame)
    body = b"".join(_take(file, size))  # an interrupted recording leaves a size that is too large
    return Sound(form.mono(body), form.rate)


def _decode_samples(body: bytes, kind: int, bits: int) -> Any:
    """Between -1 and 1."""
    if (kind, bits) == (PCM, 24):
        raw = np.frombuffer(body[: len(body) // 3 * 3], "u1").reshape(-1, 3).astype(np.int32)
        return ((raw[:, 0] << 8 | raw[:, 1] << 16 | raw[:, 2] << 24) >> 8).astype(np.float32) / 2**23
    dtype = np.dtype(KINDS[kind, bits])
    values = np.frombuffer(body[: len(body) // dtype.itemsize * dtype.itemsize], dtype).astype(np.float32)
    if kind == FLOAT:
        return values
    return (values - 128) / 128 if bits == 8 else values / np.float32(2 ** (bits - 1))


def _read_soundfile(file: BinaryIO, name: str, longest: float | None = None) -> Sound:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: libsndfile is missing
        raise missing("sound", f"{name}: every format but WAV") from None
    size = file.seek(0, 2)
    file.seek(0)
    try:
        with soundfile.SoundFile(file) as opened:
            rate = int(opened.samplerate)
            left, read = inf if longest is None else int(longest * rate) + 1, 0
            parts, block = [], max(1, BLOCK // opened.channels)
            # the number of frames in the header may be a lie
            while left > 0 and len(values := opened.read(int(min(left, block)), dtype="float32", always_2d=True)):
                parts.append(values.mean(1, dtype=np.float32))
                left, read = left - len(values), read + parts[-1].nbytes
                if read > LARGE and read > MOST_EXPANDED * size:
                    raise UserError(f"{name}: {size:,} bytes that expand to hours of sound; cut it")
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{name}: cannot be read as sound: {error}") from None
    return Sound(torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])), rate)
