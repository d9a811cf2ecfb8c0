"""Sounds in folders, tables, arrays and Parquet: the same samples; what cannot be read is reported by its row."""

import io
import json
import random
import struct

import numpy as np
import pytest

from allyouneed.data.batches.encoding import Dropped
from allyouneed.data.batches.media import MediaEncoding
from allyouneed.data.files.media import label_names
from allyouneed.data.files.readers import Report
from allyouneed.data.files.sounds import SoundFiles, TranscribedSounds
from allyouneed.data.media.sound_input import SoundInput
from allyouneed.errors import UserError
from toy_sounds import RATE, TONES, sound, write_wav

READER = SoundInput(mels=20, seconds=5)


@pytest.fixture
def recordings():
    dice = random.Random(3)
    labels = [dice.choice(list(TONES)) for _ in range(6)]
    return [sound([label], dice) for label in labels], labels


def write(form, folder, sounds, labels):
    """The sounds in this form; the path that a recipe names."""
    names = [f"a{number}.wav" for number in range(len(sounds))]
    places = {"folders": "", "ljspeech": "wavs", "common voice": "clips"}
    for number, (samples, label) in enumerate(zip(sounds, labels, strict=True)):
        place = label if form == "folders" else places.get(form, "")
        write_wav(folder / place / names[number], samples)
    rows = list(zip(names, labels, strict=True))
    lines = {
        "tsv": ["\t".join(row) for row in rows],
        "audiofolder": ["file_name,transcription", *(",".join(row) for row in rows)],
        "jsonl": [json.dumps({"audio": name, "text": text}) for name, text in rows],
        "ljspeech": [f"{name[:-4]}|{text.upper()}, yes|{text}" for name, text in rows],
        "common voice": ["client_id\tpath\tsentence\tage", *(f"x\t{name}\t{text}\t" for name, text in rows)],
    }
    if form in lines:
        path = folder / {"audiofolder": "metadata.csv", "ljspeech": "metadata.csv"}.get(form, "train.tsv")
        path = path.with_suffix(".jsonl") if form == "jsonl" else path
        path.write_text("\n".join(lines[form]) + "\n")
        return folder if path.name == "metadata.csv" else path
    if form == "npz":
        classes = sorted(set(labels))
        offsets = np.cumsum([0, *map(len, sounds)])
        numbers = np.array([classes.index(label) for label in labels], np.uint8)
        joined = {"audio": np.concatenate(sounds), "offsets": offsets, "rate": np.array(RATE)}
        np.savez(folder / "a.npz", **joined, label=numbers, classes=np.array(classes))
        return folder / "a.npz"
    if form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        cells = [{"bytes": (folder / name).read_bytes(), "path": None} for name in names]
        parquet.write_table(pyarrow.table({"audio": cells, "label": labels}), folder / "a.parquet")
    return folder


def read(entry, encoding=None):
    report = Report()
    examples = list(entry.read(report))
    encoding = encoding or MediaEncoding(READER, label_names([entry]))
    return report, {(one.label, bytes(row[0])) for one, row in zip(examples, encoding.encode(examples), strict=True)}


@pytest.mark.parametrize("form", ["tsv", "audiofolder", "jsonl", "ljspeech", "common voice", "npz", "parquet"])
def test_every_form_has_the_same_sounds_and_texts(form, recordings, tmp_path):
    (tmp_path / "there").mkdir()
    _, expected = read(SoundFiles(path=write("folders", tmp_path / "folders", *recordings)))
    path = write(form, tmp_path / "there", *recordings)
    report, found = read(TranscribedSounds(path=path))
    assert (report.read, report.dropped) == (6, 0)
    assert found == expected


def test_a_folder_of_common_voice_names_its_tables(recordings, tmp_path):
    write("common voice", tmp_path, *recordings)
    with pytest.raises(UserError, match=r"give one of its tables \(train\.tsv\)"):
        list(SoundFiles(path=tmp_path).read(Report()))


def test_arrays_need_a_rate_and_labels_may_have_names(recordings, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, audio=np.stack([np.zeros(4000, np.int16)] * 2), label=np.array([0, 1]))
    with pytest.raises(UserError, match="how many samples per second"):
        list(SoundFiles(path=path).read(Report()))
    entry = SoundFiles(path=path, rate=8000, names=("no", "yes"))
    assert [one.label for one in entry.read(Report())] == ["no", "yes"]
    np.savez(path, audio=np.zeros(9, np.int16), offsets=np.array([0, 5, 12]), label=np.array([0, 1]))
    with pytest.raises(UserError, match="offsets from 0 to 12, but there are 9 values"):
        list(SoundFiles(path=path, rate=8000).read(Report()))


def test_segments_become_a_transcript_with_times(recordings, tmp_path):
    path = write_wav(tmp_path / "a.wav", recordings[0][0]).with_suffix(".jsonl")
    rows = [
        {
            "audio": "a.wav",
            "segments": [{"start": 0, "end": 0.5, "text": "low"}, {"start": 0.5, "end": 1, "text": "a"}],
        },
        {"audio": "a.wav", "segments": [{"start": 0}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = Report()
    (found,) = TranscribedSounds(path=path).read(report)
    assert found.value == "<|0.00|>low<|0.50|><|0.50|>a<|1.00|>" and found.texts == ("low a",)
    assert "expected a list of {start, end, text}" in report.text()


def header(rate=8000, channels=1, size=400, kind=1, bits=16):
    form = struct.pack("<HHIIHH", kind, channels, rate, 0, 2, bits)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size)


def test_unreadable_sounds_are_dropped_with_their_row(tmp_path):
    good = header(size=4000) + bytes(4000)
    stereo = header(channels=2, size=8000) + bytes(8000)
    contents = {
        "good": good,
        "stereo": stereo,
        "lies": header(size=0xFFFFFFFF) + bytes(4000),  # an interrupted recording: what is there is read
        "empty": b"",
        "short": header() + bytes(20),
        "cut": good[:30],
        "no rate": header(rate=0) + bytes(4000),
        "absurd": header(rate=4_000_000_000) + bytes(4000),
        "no channels": header(channels=0) + bytes(4000),
        "text": b"no sound at all, just a text",
        "not finite": header(kind=3, bits=32, size=4000) + np.full(1000, np.nan, np.float32).tobytes(),
        "long": header(size=100_000) + bytes(100_000),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.wav").write_bytes(content)
    names = [*contents, "missing"]
    (tmp_path / "a.tsv").write_text("".join(f"{name}.wav\tx\n" for name in names))
    examples = list(SoundFiles(path=tmp_path / "a.tsv").read(Report()))
    found = dict(zip(names, MediaEncoding(READER, ["x"]).encode(examples), strict=True))
    assert [name for name, row in found.items() if not isinstance(row, Dropped)] == ["good", "stereo", "lies"]
    assert "longer than 5 s" in found["long"].detail and "non-finite" in found["not finite"].detail
    assert "too short" in found["short"].detail and "No such file" in found["missing"].detail


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_give_a_message_or_a_dropped_row_but_never_another_error(seed, recordings, tmp_path):
    """Bytes changed at random in recordings and in archives of them."""
    dice = random.Random(seed)
    whole = write("npz", tmp_path, *recordings).read_bytes()
    out = io.BytesIO((tmp_path / "a0.wav").read_bytes())
    encoding = MediaEncoding(READER, list(TONES))
    for number in range(50):
        changed = bytearray(out.getvalue() if number % 2 else whole)
        for _ in range(dice.randint(1, 8)):
            changed[dice.randrange(min(len(changed), 60) if number % 2 else len(changed))] = dice.randrange(256)
        changed = bytes(changed[: dice.randint(1, len(changed))] if dice.random() < 0.3 else changed)
        path = tmp_path / "damaged.npz"
        if number % 2:
            (tmp_path / "x.wav").write_bytes(changed)
            path = tmp_path / "damaged.tsv"
            path.write_text("x.wav\tlow\n")
        else:
            path.write_bytes(changed)
        try:
            list(encoding.encode(list(SoundFiles(path=path).read(Report()))))
        except UserError:
            continue
