"""Real weights, used as a user would use them. `make real-weights-test` fetches them and runs this with REAL_WEIGHTS
set; the suite does not collect this file."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import flan_t5
import pytest
import torch
from transformers import logging

import allyouneed as ayn
from allyouneed.data.media.resampling import resample
from allyouneed.data.media.sound import log_mel
from allyouneed.data.media.sound_files import read_sound
from allyouneed.infer.decoding.options import Decoding
from allyouneed.metrics.words import word_error_rate
from plain_llama import PlainLlama, PlainPieces

logging.disable_progress_bar()
logging.set_verbosity_error()
HERE = Path(os.environ["REAL_WEIGHTS"])
JFK = HERE / "jfk.wav"
TEXT = "And so, my fellow Americans, ask not what your country can do for you, ask what you can do for your country."


def command(*words: object) -> str:
    """What `allyouneed …` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "allyouneed", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tell(name: str, value: object) -> None:
    print(f"\n  {name}: {value}", end="", flush=True)


# --- all-MiniLM-L6-v2 -------------------------------------------------------------------------------------------------

ALIKE = ("How old are you?", "What is your age?")
UNLIKE = ("A man is eating food.", "The stock market fell today.")


def mean_vectors(folder: Path, texts: list[str]) -> torch.Tensor:
    """transformers, and the mean over the tokens of each text, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(texts, padding="longest", return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    real = given["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def test_sentences_that_mean_the_same_are_near_each_other(tmp_path):
    model = ayn.load(HERE / "minilm")
    near, far = model.similarity([ALIKE, UNLIKE])
    tell(f"{ALIKE}", f"{near:.3f}")
    tell(f"{UNLIKE}", f"{far:.3f}")
    assert near == pytest.approx(0.761, abs=5e-4) and far == pytest.approx(-0.017, abs=5e-4)
    texts = [*ALIKE, *UNLIKE, "é ☃ 你好 " * 7]
    worst = (model.embed(texts) - mean_vectors(HERE / "minilm", texts)).abs().max().item()
    tell("embeddings against transformers with mean pooling", f"{worst:.1e}")
    assert worst < 1e-5
    said = command("similarity", *ALIKE, "--model", HERE / "minilm")
    tell("allyouneed similarity", said.strip())
    assert "0.761" in said


# --- m3e-small --------------------------------------------------------------------------------------------------------


def test_chinese_sentences():
    model = ayn.load(HERE / "m3e-small")
    texts = ["今天天气很好", "今天天气不错，适合出门。", "机器学习很有趣", "他昨天买了一台新电脑！"]
    found = torch.nn.functional.normalize(model.embed(texts), dim=-1)
    worst = (found - mean_vectors(HERE / "m3e-small", texts)).abs().max().item()
    near, far = model.similarity([(texts[0], texts[1]), (texts[0], texts[3])])
    tell("embeddings against transformers with mean pooling", f"{worst:.1e}")
    tell("今天天气很好 | 今天天气不错", f"{near:.3f}")
    tell("今天天气很好 | 他昨天买了一台新电脑", f"{far:.3f}")
    assert worst < 1e-5 and near > far + 0.1


# --- stories15M -------------------------------------------------------------------------------------------------------


def test_a_story_is_that_of_the_plain_loop_token_for_token():
    path = HERE / "stories" / "stories15M.bin"
    model, plain = ayn.load(path), PlainLlama(path)
    prompt = PlainPieces(HERE / "stories" / "tokenizer.bin").encode("Once upon a time")
    assert [*model.tokenizer.opening, *model.tokenizer.encode("Once upon a time")] == prompt
    expected = plain.story(prompt, 200)
    greedy = Decoding(method="greedy", max_length=len(expected))
    assert len(expected) > 150 and model.engine.complete([prompt], greedy)[0][0].tokens == expected
    story = model.generate("Once upon a time", decoding=greedy)
    tell(f"a story of {len(expected)} tokens", f"Once upon a time{story}")
    said = command("generate", "Once upon a time", "--model", path, "--method", "greedy", "--max-length", len(expected))
    assert story.strip() in said
    again = model.generate(["Once upon a time", "The dog"], method="greedy", max_length=60)
    assert story.startswith(again[0]), "in a batch as alone"


# --- Whisper tiny.en --------------------------------------------------------------------------------------------------


def their_hearing() -> types.ModuleType:
    """OpenAI's audio.py, without the rest of its package."""
    package = types.ModuleType("openai_parts")
    package.__path__ = [str(HERE / "openai")]
    sys.modules["openai_parts"] = package
    return importlib.import_module("openai_parts.audio")


def test_the_features_of_the_clip_are_those_of_both_references():
    from transformers import WhisperFeatureExtractor

    samples = read_sound(JFK)
    found = log_mel(samples, seconds=30)
    audio = their_hearing()
    theirs = audio.log_mel_spectrogram(audio.pad_or_trim(samples))
    other = WhisperFeatureExtractor()(samples.numpy(), sampling_rate=16_000, return_tensors="pt").input_features[0]
    for name, expected in (("OpenAI's", theirs), ("transformers'", other)):
        worst = (found - expected).abs().max().item()
        tell(f"log-mel against {name}", f"{worst:.1e}")
        assert worst < 1e-4


def spoken(prompt: list[int], beam: int) -> list[int]:
    """What CTranslate2 hears in the clip, with a folder that others converted."""
    import ctranslate2

    oracle = ctranslate2.models.Whisper(str(HERE / "whisper-ctranslate2"), device="cpu", compute_type="float32")
    features = ctranslate2.StorageView.from_array(log_mel(read_sound(JFK), seconds=30)[None].numpy())
    found = oracle.generate(features, [prompt], beam_size=beam, return_scores=True)[0]
    ids: list[int] = found.sequences_ids[0]
    return ids


@pytest.mark.parametrize("beam", [1, 5])
def test_the_clip_is_transcribed_as_ctranslate2_does(beam):
    model = ayn.load(HERE / "whisper" / "tiny.en.pt")
    speech = model.speech
    text = model.transcribe(JFK, beam=beam)
    expected = model.tokenizer.decode(spoken([speech.start, speech.no_timestamps], beam)).strip()
    tell(f"beam {beam}", text)
    assert text == expected and "ask not what your country can do for you" in text
    (timed,) = model.transcribe_full([JFK], timestamps=True, beam=beam)
    told = [token for token in spoken([speech.start], beam) if token < speech.end]
    assert timed.text == model.tokenizer.decode(told).strip()
    tell("with times", [(s.start, s.end, s.text) for s in timed.segments])


def test_its_suppressed_tokens_are_those_others_wrote_down():
    import json

    said = json.loads((HERE / "whisper-ctranslate2" / "config.json").read_text(encoding="utf-8"))
    speech = ayn.load(HERE / "whisper" / "tiny.en.pt").speech
    assert list(speech.suppress) == said["suppress_ids"]
    assert list(speech.begin_suppress) == said["suppress_ids_begin"]


def test_a_long_sound_is_transcribed_window_after_window(tmp_path):
    """The clip four times with pauses, 50 seconds, as FLAC at another rate: with the segments and times that
    transformers finds with the same weights, which `export` wrote for it, and well enough."""
    import soundfile
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    clip = torch.cat([read_sound(JFK), torch.zeros(24_000)])
    path = tmp_path / "long.flac"
    soundfile.write(path, resample(clip.repeat(4), 16_000, 22_050).numpy(), 22_050)
    source = HERE / "whisper" / "tiny.en.pt"
    command("import", source, tmp_path / "ours")
    command("export", tmp_path / "ours", tmp_path / "theirs", "--to", "hf")
    model = ayn.load(tmp_path / "ours")
    (found,) = model.transcribe_full([path], beam=1, temperatures=(0.0,), previous=False, silence=None)
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path / "theirs")
    given = dict(sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest")
    features = extractor(read_sound(path).numpy(), return_attention_mask=True, **given)
    theirs = WhisperForConditionalGeneration.from_pretrained(tmp_path / "theirs").eval()
    said = theirs.generate(**features, return_timestamps=True, return_segments=True)["segments"][0]
    expected = [(float(s["start"]), float(s["end"]), words(model, s["tokens"].tolist())) for s in said]
    assert [s.text for s in found.segments] == [text for _, _, text in expected]
    for ours, (start, end, _) in zip(found.segments, expected, strict=True):
        assert (ours.start, ours.end) == pytest.approx((start, min(end, found.seconds)), abs=1e-6)
    told = command("transcribe", path, "--model", source, "--timestamps")
    tell("allyouneed transcribe --timestamps", "\n" + told)
    heard = " ".join(line.split("\t")[2] for line in told.splitlines() if line.strip())
    wrong = word_error_rate([heard], [" ".join([TEXT] * 4)])
    tell("word error rate", f"{wrong:.1f} %")
    assert wrong < 10


def words(model, tokens: list[int]) -> str:
    return model.tokenizer.decode([token for token in tokens if token < model.speech.end]).strip()


# --- flan-t5-small ----------------------------------------------------------------------------------------------------


def test_a_translation():
    folder = flan_t5.written(HERE / "flan-t5-onnx", HERE / "flan-t5-small")
    source = "translate English to German: The house is wonderful."
    model = ayn.load(folder)
    tell(source, model.seq2seq(source))
    assert model.seq2seq(source) == model.seq2seq(source, method="beam", beam=4) == "Das Haus ist wunderbar."
    assert command("seq2seq", source, "--model", folder).strip() == "Das Haus ist wunderbar."
