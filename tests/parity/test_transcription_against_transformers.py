"""Transcription: the texts and times Hugging Face's Whisper generates from the same sound, window after window."""

from __future__ import annotations

import pytest
import torch
from transformers import WhisperFeatureExtractor

import tiny_whisper as whisperlet
from allyouneed.infer.speech.fallback import TranscriptionOptions

PLAIN = dict(temperatures=(0.0,), silence=None, previous=False)


@pytest.fixture
def hearing():
    """What their feature extractor makes of a sound: a window, or all of one that is longer."""
    extractor = WhisperFeatureExtractor(feature_size=whisperlet.MELS, chunk_length=1)

    def make(sound: torch.Tensor) -> dict[str, torch.Tensor]:
        given = dict(sampling_rate=16_000, return_tensors="pt")
        if len(sound) <= 16_000:
            return dict(extractor(sound.numpy(), **given))
        return dict(extractor(sound.numpy(), truncation=False, padding="longest", return_attention_mask=True, **given))

    return make


def told(segments, seconds: float) -> list[tuple[float, float, str]]:
    """Their segments in our form: nothing after the end of the audio, no segment without text."""
    decode = whisperlet.vocabulary().decode
    found = []
    for segment in segments:
        text = decode([token for token in segment["tokens"].tolist() if token < 256]).strip()
        start, end = float(segment["start"]), min(float(segment["end"]), seconds)
        if text and start < end - 1e-6:
            found.append((round(start, 4), round(end, 4), text))
    return found


def ours(transcript) -> list[tuple[float, float, str]]:
    return [(round(s.start, 4), round(s.end, 4), s.text) for s in transcript.segments]


@pytest.mark.parametrize("seconds", [1.0, 2.9])
@pytest.mark.parametrize(("seed", "likely"), [(1, 0.3), (2, 0.3), (4, 0.3), (5, 0.0), (7, 0.0)])
def test_segments_with_timestamps(seed, likely, seconds, hearing, tmp_path):
    theirs = whisperlet.theirs(seed, likely=likely)
    sound = whisperlet.sound(seconds, seed)
    given = dict(language="de", return_timestamps=True, return_segments=True, max_new_tokens=24)
    expected = told(theirs.generate(**hearing(sound), **given)["segments"][0], seconds)
    model = whisperlet.ours(theirs, tmp_path)
    found = model.transcribe_full([sound], "de", timestamps=True, beam=1, **PLAIN)[0]
    assert len(expected) > 1 and ours(found) == expected
    assert found.text == "".join(text for _, _, text in expected)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("multilingual", [True, False])
def test_text_without_timestamps(beam, multilingual, hearing, tmp_path, monkeypatch):
    """Theirs may emit timestamps unasked; here neither may. Theirs normalises before banning tokens unless told to
    renormalise, and counts the end token when comparing hypotheses."""
    monkeypatch.setattr(TranscriptionOptions, "best", staticmethod(lambda found: found[0]))
    texts = set()
    for seed in range(6):
        theirs = whisperlet.theirs(seed, multilingual, likely=0.3)
        settled = theirs.generation_config
        first = settled.no_timestamps_token_id
        settled.suppress_tokens = [*settled.suppress_tokens, *range(first, theirs.config.vocab_size)]
        sound = whisperlet.sound(0.8, seed)
        which = dict(language="zh", task="translate") if multilingual else {}
        made = theirs.generate(
            **hearing(sound), **which, num_beams=beam, max_new_tokens=24, renormalize_logits=True, length_penalty=1.0
        )
        expected = whisperlet.vocabulary().decode([token for token in made[0].tolist() if token < 256]).strip()
        model = whisperlet.ours(theirs, tmp_path)
        assert model.transcribe(sound, **which, beam=beam, **PLAIN) == expected
        texts.add(expected)
    assert len(texts) > 3


def test_language_detection(hearing, tmp_path):
    heard = set()
    for seed in range(6):
        theirs = whisperlet.theirs(seed)
        model = whisperlet.ours(theirs, tmp_path)
        sound = whisperlet.sound(0.9, seed)
        expected = theirs.detect_language(**hearing(sound)).item()
        (chances,) = model.detect([sound])
        best = next(iter(chances))
        assert model.speech.languages[best] == expected and sum(chances.values()) == pytest.approx(1)
        assert model.transcribe_full([sound], beam=1, **PLAIN)[0].language == best
        heard.add(best)
    assert len(heard) > 1
