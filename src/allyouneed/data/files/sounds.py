"""Sounds with a label or a transcript (media.py): folders, tables, Parquet, arrays of samples; the layouts of LJSpeech,
Common Voice and Hugging Face's audiofolder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from allyouneed.data.files.lines import DataFile, inner_suffix, raw_lines
from allyouneed.data.files.media import DescribedMedium, LabelledMedium, MediaFiles, Source, Stored
from allyouneed.data.files.readers import JSON_SUFFIXES, Report
from allyouneed.data.files.tables import Layout, read_objects
from allyouneed.data.media.speech import split_marks
from allyouneed.errors import UserError

SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".m4a", ".opus", ".aiff")
RATE_NAMES = ("rate", "sample_rate", "sampling_rate", "sr")
BESIDE = ("clips", "wavs", "wav", "audio")  # folders beside a table whose files it names: Common Voice, LJSpeech
LJSPEECH = re.compile(r"[^|,]+\|[^|]*(\|[^|]*)?")  # id|transcript|normalised transcript
SAMPLES = ("int8", "int16", "int32", "float16", "float32", "float64")  # of an array
SEGMENTS = "segments"


class LabelledSound(LabelledMedium):
    """A sound with its label."""


class TranscribedSound(DescribedMedium):
    """A sound with its transcript, which may have times: `<|0.00|> good morning<|1.20|>`."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (split_marks(self.value)[0],)


class SoundFiles(MediaFiles):
    """Sounds with labels. A folder has a folder of sounds for each class, or a `metadata.csv` (or .jsonl) that names
    its sounds, or Parquet files; a table (.tsv, .csv, .jsonl) has paths, relative to it or to `clips` or `wavs` beside
    it; .npz files have samples; .parquet files have the bytes of sound files."""

    examples: ClassVar[str] = "sounds"
    noun: ClassVar[str] = "sound"
    article: ClassVar[str] = "a"
    suffixes: ClassVar[tuple[str, ...]] = SOUND_SUFFIXES
    names_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "content": ("audio", "sound", "file_name", "path", "file", "filename", "wav", "samples", "x"),
        "value": ("label", "labels", "class", "category", "intent", "emotion", "text", "y"),
    }
    joined: ClassVar[tuple[str, ...]] = ("audio", "samples")
    example: ClassVar[type[LabelledMedium]] = LabelledSound
    kind: Literal["sounds"] = "sounds"
    rate: Annotated[int, Field(gt=0)] | None = None
    """Samples per second of arrays; default: as the file says (`rate` or `sampling_rate`)."""
    names: tuple[str, ...] | None = None
    """What labels that are numbers from 0 stand for."""

    def read(self, report: Report) -> Iterator[LabelledMedium]:
        for one in super().read(report):
            if self.names is not None and one.value.isdecimal() and int(one.value) < len(self.names):
                one = one._replace(value=self.names[int(one.value)])
            yield one

    def sources_of(self, path: Path) -> list[Path]:
        if path.is_dir() and (path / "clips").is_dir() and (tables := sorted(path.glob("*.tsv"))):
            listed = ", ".join(table.name for table in tables)
            raise UserError(f"{path}: a folder of Common Voice; give one of its tables ({listed})")
        return super().sources_of(path)

    def reader_of(self, file: Path) -> Source:
        json = self.described and inner_suffix(file) in JSON_SUFFIXES
        return _segmented if json and self.keys is None and _has_segments(file) else super().reader_of(file)

    def table_layout(self, file: Path) -> tuple[DataFile, Layout]:
        if self.columns is None and self.keys is None and file.name == "metadata.csv":
            first = next(raw_lines(file)).decode("utf-8", "replace")
            cells = first.split("|")
            if LJSPEECH.fullmatch(first) and self.named_file(file.parent, cells[0]).is_file():
                layout = Layout((0, len(cells) - 1), (self.noun, "text"), header=False, quotes=False)
                return DataFile(file, separator="|"), layout
        return super().table_layout(file)

    def named_file(self, folder: Path, name: str) -> Path:
        """The file of this name, with or without its suffix, in the folder or in one of those beside a table."""
        names = (name,) if Path(name).suffix.lower() in SOUND_SUFFIXES else (name, f"{name}.wav")
        places = (folder, *(folder / beside for beside in BESIDE))
        return next((place / one for place in places for one in names if (place / one).is_file()), folder / name)

    def from_array(self, file: Path, contents: Any, arrays: Mapping[str, Any]) -> Sequence[Any]:
        given = next((int(arrays[name]) for name in RATE_NAMES if name in arrays), None)
        rate = self.rate or given
        if rate is None:
            raise UserError(f"{file}: how many samples per second? Set rate: NUMBER")
        kind = contents[0].dtype if len(contents) else np.dtype(np.float32)
        if kind.name not in SAMPLES:
            raise UserError(f"{file}: samples of type {kind}, expected int16 or floats from -1 to 1")
        return [(one, rate) for one in contents]

    def from_cell(self, file: Path, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("array"), list):
            return np.asarray(value["array"], np.float32), self.rate or int(value.get("sampling_rate") or 0)
        return super().from_cell(file, value)


class TranscribedSounds(SoundFiles):
    """Sounds with transcripts, in any of the forms of labelled sounds; in a folder, `a.txt` may be the transcript of
    `a.wav`. JSON may have `segments` with `start`, `end` and `text` in place of a text."""

    names_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "content": SoundFiles.names_of["content"],
        "value": ("transcription", "transcript", "sentence", "text", "normalized_text", "label", "labels"),
    }
    kind: Literal["transcribed-sounds"] = "transcribed-sounds"  # type: ignore[assignment]
    example: ClassVar[type[LabelledMedium]] = TranscribedSound


def _has_segments(file: Path) -> bool:
    first = next(raw_lines(file))[: 1 << 16]
    return b'"segments"' in first


def _segmented(entry: SoundFiles, file: Path, report: Report) -> Iterator[Stored]:
    """Rows with timed segments, as `allyouneed transcribe --json` prints them."""
    present: list[str] = []
    for number, row, _ in read_objects(file, (SEGMENTS,), report):
        present = present or [entry.name_of("content", list(row), file)]
        try:
            text = "".join(f"<|{float(s['start']):.2f}|>{s['text']}<|{float(s['end']):.2f}|>" for s in row[SEGMENTS])
            yield number, entry.named_file(file.parent, str(row[present[0]])), text
        except (KeyError, TypeError, ValueError):
            report.drop("broken", file, number, "segments: expected a list of {start, end, text}", str(row)[:60])
