"""Whisper: log-mel frames, logits, gradients and decoding steps of Hugging Face's Whisper."""

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import allyouneed as ayn
import parity
from allyouneed.config import parse
from allyouneed.data.media.sound import log_mel
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.models.base import Model

# an embedding gives its padding no gradient, so nothing here is padding
MARKS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None)
CASES = {
    "tiny": dict(
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        vocab_size=31,
        max_source_positions=9,
        max_target_positions=12,
        num_mel_bins=7,
    ),
    "uneven, scaled, relu": dict(
        d_model=20,
        encoder_layers=1,
        decoder_layers=3,
        encoder_attention_heads=5,
        decoder_attention_heads=2,
        encoder_ffn_dim=33,
        decoder_ffn_dim=17,
        vocab_size=29,
        max_source_positions=6,
        max_target_positions=8,
        num_mel_bins=5,
        activation_function="relu",
        scale_embedding=True,
    ),
}
TEXTS = [[1, 5, 7, 9, 3, 2], [1, 4, 8, 2, 6, 6]]


def theirs(name):
    return WhisperForConditionalGeneration(WhisperConfig(**CASES[name], **MARKS)).eval()


def both(name, folder):
    model = theirs(name)
    parity.randomise(model)
    frames = torch.randn(2, CASES[name]["num_mel_bins"], 2 * CASES[name]["max_source_positions"])
    return model, parity.ours(model, folder), frames


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name, tmp_path, record_difference):
    theirs, model, frames = both(name, tmp_path)
    tokens = torch.tensor(TEXTS)
    expected = theirs(input_features=frames, decoder_input_ids=tokens).logits
    found = model.logits(Batch(target=Rows(tokens), source=Signal(frames)))
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    worst = parity.difference(found, expected)
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = parity.gradient_difference(model, theirs, tmp_path, *losses)
    record_difference("Whisper", "transformers WhisperForConditionalGeneration", worst, gradients)
    assert worst < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_decoding_matches_the_whole_pass(tmp_path):
    theirs, model, frames = both("tiny", tmp_path)
    tokens = torch.tensor(TEXTS)
    with torch.no_grad():
        expected = theirs(input_features=frames, decoder_input_ids=tokens).logits
        states = model.start(Signal(frames))
        steps = [model.head(model.advance(Rows(tokens[:, t : t + 1]), states)) for t in range(tokens.shape[1])]
    assert parity.difference(torch.cat(steps, 1), expected) < parity.TOLERANCE


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.4, 3.21, 31.0])
def test_log_mel_frames(mels, seconds, record_difference):
    """Noise, a rising tone and silence; shorter than 30 seconds is padded, longer is cut."""
    time = np.arange(int(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(0).normal(size=len(time))
    sound = 0.3 * np.sin(2 * np.pi * 440 * time * (1 + time / 9)) + 0.05 * noise
    sound[len(sound) // 2 : len(sound) * 3 // 4] = 0
    theirs = WhisperFeatureExtractor(feature_size=mels)(sound, sampling_rate=16_000, return_tensors="pt")
    found = log_mel(torch.from_numpy(sound), mels, seconds=30)
    worst = parity.difference(found, theirs.input_features[0])
    record_difference("log-mel", "transformers WhisperFeatureExtractor", worst)
    assert found.shape == (mels, 3000) and worst < parity.TOLERANCE


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("whisper-tiny", dict()),  # the defaults of WhisperConfig
        (
            "whisper-base",
            dict(d_model=512)
            | {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
               (("layers", 6), ("attention_heads", 8), ("ffn_dim", 2048))},
        ),
    ],
)  # fmt: skip
def test_the_presets_are_the_models_of_the_reference(name, sizes):
    """Only trained parameters are compared: their encoder stores its sinusoids as a frozen parameter."""
    config = WhisperConfig(**sizes)
    with torch.device("meta"):
        theirs = WhisperForConditionalGeneration(config)
    trained, ours = sum(p.numel() for p in theirs.parameters() if p.requires_grad), ayn.model_config(name)
    assert ours.cost().parameters == trained
    read = parse(Model, FAMILIES["whisper"].tree(config.to_dict()))
    assert read.model_copy(update={"init": ours.init}) == ours


def test_files_without_a_head_load(tmp_path):
    theirs, model, frames = both("tiny", tmp_path)
    theirs.model.save_pretrained(tmp_path / "bare")
    again = parity.ours(theirs.model, tmp_path / "bare")
    batch = Batch(target=Rows(torch.tensor(TEXTS)), source=Signal(frames))
    with torch.no_grad():
        assert torch.equal(again.logits(batch), model.logits(batch))


def test_other_positions_in_the_encoder_are_refused(tmp_path):
    theirs, _, _ = both("tiny", tmp_path)
    with torch.no_grad():
        theirs.model.encoder.embed_positions.weight.add_(0.1)
    with pytest.raises(UserError, match="positions are not sinusoids"):
        parity.ours(theirs, tmp_path)
