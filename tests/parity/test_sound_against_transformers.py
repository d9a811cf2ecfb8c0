"""Sound models and their losses against transformers: Wav2Vec2ForCTC, and Whisper trained with labels."""

from __future__ import annotations

import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, WhisperConfig, WhisperForConditionalGeneration

import allyouneed as ayn
import parity
from allyouneed.config import parse
from allyouneed.data.media.sound_input import SoundInput
from allyouneed.nn.batch import IGNORE, Batch, Rows, Signal
from allyouneed.tasks.task import Task

WIDTH, HEADS, LAYERS, VOCAB, CHANNELS = 32, 4, 2, 13, 16
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def ours_wav2vec2():
    layer = {"repeat": LAYERS, "wiring": "post-norm", "mixer": {"kind": "attention", "heads": HEADS}}
    tree = {
        "kind": "encoder",
        "vocab": VOCAB,
        "width": WIDTH,
        "embed": {"kind": "waveform", "channels": CHANNELS, "reach": 16, "groups": 4},
        "encoder": [layer | {"channel": {"kind": "ffn", "hidden": 64, "activation": "gelu"}}],
        "head": {"kind": "vocabulary", "bias": True},
    }
    return ayn.build(tree)


@pytest.fixture
def both():
    """The same weights in both; the convolution of positions is weight-normalised there."""
    torch.manual_seed(3)
    config = Wav2Vec2Config(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=64,
        conv_dim=[CHANNELS] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
        mask_time_prob=0.0, mask_feature_prob=0.0, ctc_loss_reduction="sum", ctc_zero_infinity=True, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Wav2Vec2ForCTC(config).train()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ours, named = ours_wav2vec2().train(), dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(torch.cat([_value(theirs, named, other) for other in name_there(name)]))
    return ours, theirs


def _value(theirs, named, name):
    return theirs.wav2vec2.encoder.pos_conv_embed.conv.weight if name == "pos" else named[name]


def name_there(name):
    """The names of the parameters of theirs that make this one."""
    end, front = name.rsplit(".", 1)[-1], "wav2vec2.feature_extractor.conv_layers"
    if ".convolutions." in name:
        return [f"{front}.{name.split('.')[2]}.conv.weight"]
    whole = {
        "embed.channel_norm": f"{front}.0.layer_norm",
        "embed.before": "wav2vec2.feature_projection.layer_norm",
        "embed.project": "wav2vec2.feature_projection.projection",
        "embed.norm": "wav2vec2.encoder.layer_norm",
        "head": "lm_head",
    }
    if (top := name.rsplit(".", 1)[0]) in whole:
        return [f"{whole[top]}.{end}"]
    if top == "embed.positions":
        return ["pos"] if end == "weight" else ["wav2vec2.encoder.pos_conv_embed.conv.bias"]
    layer = f"wav2vec2.encoder.layers.{name.split('.')[2]}"
    part = {
        "mixer.qkv": [f"attention.{one}_proj" for one in "qkv"],
        "mixer.out": ["attention.out_proj"],
        "channel.up": ["feed_forward.intermediate_dense"],
        "channel.down": ["feed_forward.output_dense"],
        "norms.0": ["layer_norm"],
        "norms.1": ["final_layer_norm"],
    }[".".join(top.split(".")[-2:])]
    return [f"{layer}.{one}.{end}" for one in part]


def test_wav2vec2_has_the_logits_the_ctc_loss_and_the_gradients_of_transformers(both, record_difference):
    ours, theirs = both
    read = SoundInput(seconds=2)
    sounds = [read.features(torch.randn(6400)) for _ in range(3)]
    signal = read.signal(sounds)
    labels = torch.tensor([[5, 6, 7, 7], [8, IGNORE, IGNORE, IGNORE], [9, 10, 11, IGNORE]])
    expected = theirs(signal.values[:, 0], labels=labels)
    logits = ours.logits(Batch(signal))
    torch.testing.assert_close(logits, expected.logits, **CLOSE)
    task = parse(Task, {"kind": "transcription", "ctc": True}, "task")
    loss = task.loss(ours, Batch(signal, labels=labels))
    assert int(loss.tokens) == 8
    torch.testing.assert_close(loss.total, expected.loss, **CLOSE)
    loss.total.backward()
    expected.loss.backward()
    named, worst = dict(theirs.named_parameters()), 0.0
    for name, parameter in ours.named_parameters():
        if (there := name_there(name)) != ["pos"]:  # theirs is in two parts
            gradient = torch.cat([named[other].grad for other in there])
            torch.testing.assert_close(
                parameter.grad, gradient, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
            worst = max(worst, parity.difference(parameter.grad, gradient))
    judge = "transformers Wav2Vec2ForCTC"
    record_difference("wav2vec 2.0", judge, parity.difference(logits, expected.logits), worst)
    record_difference("CTC", judge, parity.difference(loss.total, expected.loss), worst)


@pytest.mark.parametrize("kind", ["waveform", "frames"])
def test_a_sound_has_the_same_outputs_alone_and_among_longer_ones(kind):
    torch.manual_seed(0)
    embed = {"kind": "waveform", "channels": 8, "reach": 16, "groups": 4}
    embed = embed if kind == "waveform" else {"kind": "frames", "mels": 20, "positions": "sinusoidal"}
    layer = {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 32}}
    model = ayn.build({"kind": "encoder", "vocab": 9, "width": 16, "embed": embed, "encoder": [layer]}).eval()
    read = SoundInput(seconds=2, mels=20 if kind == "frames" else None)
    sounds = [read.features(torch.randn(count)) for count in (3203, 8001, 5777, 402)]
    made = read.signal(sounds)
    hidden, layout = model.run(Batch(made), None)
    for number, sound in enumerate(sounds):
        alone, _ = model.run(Batch(Signal(sound[None])), None)
        assert int(layout.real[number].sum()) == alone.shape[1]
        torch.testing.assert_close(hidden[number, : alone.shape[1]], alone[0], atol=2e-6, rtol=1e-5)


def test_whisper_learns_labels_with_the_loss_and_gradients_of_transformers(tmp_path):
    torch.manual_seed(5)
    config = WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=20, max_source_positions=50,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    theirs = WhisperForConditionalGeneration(config).train()
    theirs.save_pretrained(tmp_path / "there")
    ours = ayn.load(tmp_path / "there", task="transcription").model.train()
    read = SoundInput(mels=20, seconds=1, padded=True)
    signal = read.signal([read.features(torch.randn(count)) for count in (16000, 9000)])
    tokens = torch.tensor([[1, 7, 8, 9], [1, 11, 0, 0]])
    labels = torch.tensor([[7, 8, 9, 2], [11, 2, IGNORE, IGNORE]])
    expected = theirs(signal.values, labels=labels, decoder_input_ids=tokens)
    task = parse(Task, {"kind": "transcription", "ctc": False}, "task")
    loss = task.loss(ours, Batch(Rows(tokens, lengths=torch.tensor([4, 2])), signal, labels))
    torch.testing.assert_close(loss.total / loss.tokens, expected.loss, **CLOSE)
    (loss.total / loss.tokens).backward()
    expected.loss.backward()
    there = theirs.model.encoder.conv1.weight.grad
    torch.testing.assert_close(ours.source_embed.first.weight.grad, there, atol=1e-6, rtol=1e-4)
    there = theirs.model.decoder.embed_tokens.weight.grad
    torch.testing.assert_close(ours.embed.tokens.weight.grad, there, atol=1e-6, rtol=1e-4)
