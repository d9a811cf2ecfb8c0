"""Sound files: all kinds of WAV, FLAC, several channels, any rate; and files that are not sound."""

import struct
import sys
import wave

import numpy as np
import pytest
import soundfile
import torch

from allyouneed.data.media.sound_files import read_sound
from allyouneed.errors import UserError

SOUND = 0.5 * np.sin(np.arange(4_000) / 9)
KINDS = {"PCM_U8": 2**-7, "PCM_16": 2**-15, "PCM_24": 2**-23, "PCM_32": 1e-7, "FLOAT": 1e-7, "DOUBLE": 1e-7}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_every_wav_format_is_read(kind, container, tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, SOUND, 16_000, subtype=kind, format=container)
    found = read_sound(path)
    expected, _ = soundfile.read(path, dtype="float32")
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=0, rtol=0)
    torch.testing.assert_close(found, torch.from_numpy(SOUND).float(), atol=KINDS[kind], rtol=0)


@pytest.mark.parametrize("suffix", [".flac", ".ogg", ".wav", ".aiff"])
def test_channels_become_one_and_other_rates_sixteen_thousand(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    time = np.arange(22_050) / 22_050
    left, right = 0.4 * np.sin(2 * np.pi * 300 * time), 0.2 * np.sin(2 * np.pi * 700 * time)
    soundfile.write(path, np.stack([left, right], 1), 22_050)
    found = read_sound(path)
    time = torch.arange(16_000) / 16_000
    expected = 0.2 * torch.sin(2 * torch.pi * 300 * time) + 0.1 * torch.sin(2 * torch.pi * 700 * time)
    assert len(found) == 16_000
    atol = 0.05 if suffix == ".ogg" else 1e-4
    torch.testing.assert_close(found[300:-300], expected[300:-300], atol=atol, rtol=0)


def test_wav_needs_no_library_and_other_formats_name_theirs(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.wav", SOUND, 16_000)
    soundfile.write(tmp_path / "a.flac", SOUND, 16_000)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(read_sound(tmp_path / "a.wav")) == 4_000
    with pytest.raises(UserError, match=r"a.flac: every format but WAV needs soundfile: pip install .*\[sound\]'"):
        read_sound(tmp_path / "a.flac")


def written(path, rate=16_000, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((SOUND * 32_767).astype("<i2").tobytes())
    return path.read_bytes()


def test_a_truncated_recording_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.wav"
    whole = written(path)
    path.write_bytes(whole[:-1_001])
    assert len(read_sound(path)) == 4_000 - 501


def test_unknown_chunks_are_skipped(tmp_path):
    path = tmp_path / "a.wav"
    whole = written(path)
    path.write_bytes(whole[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + whole[12:])
    assert len(read_sound(path)) == 4_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: b"", "the file is empty"),
        (lambda whole: b"This is no sound at all, just a text.", "cannot be read as sound"),
        (lambda whole: whole[:20], "a WAV file without samples"),
        (lambda whole: whole[:24] + struct.pack("<I", 4_000_000_000) + whole[28:], "4,000,000,000 samples per second"),
        (lambda whole: whole[:24] + struct.pack("<I", 0) + whole[28:], "0 samples per second"),
        (lambda whole: whole[:22] + struct.pack("<H", 0) + whole[24:], "no channels"),
        (lambda whole: whole[:34] + struct.pack("<H", 13) + whole[36:], "13 bits is not supported; convert it"),
        (lambda whole: whole[:20] + struct.pack("<H", 6) + whole[22:], "format 6 with 16 bits"),
    ],
)
def test_files_without_sound_are_rejected(change, said, tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(change(written(path)))
    with pytest.raises(UserError, match=said):
        read_sound(path)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="a folder, not a sound file"):
        read_sound(tmp_path)
    with pytest.raises(UserError, match=r"b.wav: cannot be read: No such file"):
        read_sound(tmp_path / "b.wav")
