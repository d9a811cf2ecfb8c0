"""Images and sounds among the tokens of a text: every way of reading it gives the same numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import MEDIA, Batch, Media, Rows
from allyouneed.nn.models.base import Model
from any_part import build

SLOTS = {"image": 2, "audio": 3}
ENCODER = [{"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 9}}]
PATCHES = {"kind": "patches", "image": 4, "patch": 2, "channels": 1}
FRAMES = {"kind": "frames", "mels": 5, "positions": "sinusoidal"}
SHAPES = {"image": (1, 4, 4), "audio": (5, 6)}


def tree(**keys):
    layer = {"repeat": 2, "wiring": "pre-norm", "channel": {"kind": "ffn", "hidden": 14}}
    layer["mixer"] = {"kind": "attention", "heads": 3, "pattern": "causal", "positions": "rotary"}
    image = {"kind": "perceiver", "slots": SLOTS["image"], "heads": 3, "layers": 1}
    audio = {"kind": "attentive-pooling", "slots": SLOTS["audio"], "heads": 2}
    return {
        "kind": "interleaved",
        "vocab": 11,
        "width": 12,
        "embed": {"positions": {"kind": "learned", "length": 40}},
        "decoder": [layer],
        "image": {"encoder": {"width": 6, "embed": PATCHES, "encoder": ENCODER}, "resampler": image},
        "audio": {"encoder": {"width": 4, "embed": FRAMES, "encoder": ENCODER}, "resampler": audio, "normalize": True},
    } | keys


MODEL = build(tree())
# a text: tokens, and media as (name, seed)
piece = st.one_of(st.integers(1, 10), st.tuples(st.sampled_from(MEDIA), st.integers(0, 9)))
texts = st.lists(st.lists(piece, min_size=1, max_size=6), min_size=1, max_size=4)


def values(name, seed):
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def read(pieces):
    """Tokens, slots, media in order."""
    tokens, slots, media = [], [], []
    for one in pieces:
        count = 1 if isinstance(one, int) else SLOTS[one[0]]
        tokens += [one if isinstance(one, int) else 0] * count
        slots += [0 if isinstance(one, int) else MEDIA.index(one[0]) + 1] * count
        media += [] if isinstance(one, int) else [one]
    return tokens, slots, media


def batch(texts, side="right", packed=False):
    found = [read(text) for text in texts]
    tokens, slots = [text[0] for text in found], [text[1] for text in found]
    rows = Rows.of(tokens, pad=3, side=side)
    rows = replace(rows, slots=Rows.of(slots, side=side).tokens)
    if packed:
        numbers = torch.tensor([[n + 1 for n, row in enumerate(tokens) for _ in row]])
        flat = [torch.tensor([[one for row in side for one in row]]) for side in (tokens, slots)]
        rows = Rows(flat[0], segments=numbers, slots=flat[1])
    media = [one for text in found for one in text[2]]
    given = {name: [values(*one) for one in media if one[0] == name] for name in MEDIA}
    return Batch(rows, Media(**{name: torch.stack(found) for name, found in given.items() if found}))


def alone(text):
    with torch.no_grad():
        return MODEL.logits(batch([text]))[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@settings(max_examples=4)
@given(texts, st.integers(1, 4))
def test_padding_packing_and_chunks_equal_a_text_alone(texts, chunk):
    expected = [alone(text) for text in texts]
    with torch.no_grad():
        (packed,) = MODEL.logits(batch(texts, packed=True))
        close(packed, torch.cat(expected))
        for side in ("right", "left"):
            padded = MODEL.logits(batch(texts, side))
            for row, found in zip(padded, expected, strict=True):
                close(row[: len(found)] if side == "right" else row[-len(found) :], found)
        rows, states = MODEL.rows(batch(texts)), MODEL.start(len(texts))
        lengths = torch.tensor([len(found) for found in expected])
        pieces = []
        for at in range(0, rows.tokens.shape[1], chunk):  # a chunk may end inside an image
            part = slice(at, at + chunk)
            given = [x[:, part] for x in (rows.tokens, rows.slots, rows.vectors)]
            left = (lengths - at).clamp(0, chunk).clamp(max=given[0].shape[1])
            pieces.append(MODEL.advance(Rows(given[0], left, slots=given[1], vectors=given[2]), states))
        found = MODEL.head(torch.cat(pieces, 1))
    for row, whole in zip(found, expected, strict=True):
        close(row[: len(whole)], whole)


@settings(max_examples=6)
@given(st.lists(piece, min_size=2, max_size=6), st.integers(0, 5), st.integers(10, 19))
def test_nothing_before_an_image_depends_on_it(text, at, seed):
    at %= len(text)
    name = MEDIA[seed % 2]
    one, other = (alone([*text[:at], (name, n), *text[at:]]) for n in (seed, seed + 1))
    before = len(read(text[:at])[0])
    assert torch.equal(one[:before], other[:before])
    assert not torch.allclose(one[before:], other[before:])


def test_gradients_reach_both_towers_and_packing_does_not_change_them():
    texts = [[1, ("image", 0), 2], [("audio", 1), 3, ("image", 2), 4]]

    def gradients(packed):
        MODEL.zero_grad()
        given = batch(texts, packed=packed)
        logits = MODEL.logits(given)
        real = torch.ones_like(given.rows.tokens, dtype=torch.bool)
        if given.rows.lengths is not None:
            real = torch.arange(real.shape[1]) < given.rows.lengths[:, None]
        logits[real].square().sum().backward()
        return {name: weight.grad for name, weight in MODEL.named_parameters()}

    one, other = gradients(False), gradients(True)
    MODEL.zero_grad()
    # the embedding of a padding token, and of a class token's positions, may have none
    assert all(grad is not None and grad.any() for name, grad in one.items() if name.startswith("towers"))
    for name, grad in one.items():
        close(other[name], grad)


def test_a_batch_must_have_as_many_images_as_slots():
    given = batch([[1, ("image", 0)]])
    with pytest.raises(ValueError, match="has slots of image, but no image"):
        MODEL.logits(Batch(given.rows))
    twice = replace(given, source=Media(image=torch.cat([given.source.image] * 2)))
    with pytest.raises(ValueError, match="2 slots, but 2 image with 2 slots each"):
        MODEL.logits(twice)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None, "audio": None}, "no tower: set image or audio, or use kind: decoder"),
        ({"image": tree()["audio"]}, "image.encoder.embed.kind: expected patches, which reads image"),
        ({"image": tree()["image"] | {"resampler": {"kind": "perceiver", "slots": 2, "heads": 5}}}, "resampler.heads"),
        ({"audio": tree()["audio"] | {"slots": 2}}, "audio.slots: unknown"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(Model, tree(**changes))
