"""Images: the pixel values of Hugging Face's image processors, and the results of their pipelines."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    DeiTImageProcessorPil,
    ImageClassificationPipeline,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ZeroShotImageClassificationPipeline,
)

import allyouneed as ayn
import parity
from allyouneed.config import parse
from allyouneed.data.media.image import Pixels
from allyouneed.infer.predictors.image_classifier import ImageClassifier
from allyouneed.infer.predictors.image_matcher import ImageMatcher
from allyouneed.interop.hf import preprocessor

PROCESSORS = {
    "vit": ViTImageProcessorPil(),
    "vit, not square, lanczos, no centre": ViTImageProcessorPil(
        size={"height": 31, "width": 47}, resample=1, do_normalize=False
    ),
    "vit, as it is": ViTImageProcessorPil(do_resize=False, do_rescale=False, do_normalize=False),
    "deit": DeiTImageProcessorPil(),
    "deit, a crop larger than the image": DeiTImageProcessorPil(
        size={"height": 20, "width": 41}, crop_size={"height": 33, "width": 30}, image_mean=[0.1, 0.2, 0.3]
    ),
    "clip": CLIPImageProcessorPil(),
    "clip, small and odd": CLIPImageProcessorPil(
        size={"shortest_edge": 25}, crop_size={"height": 19, "width": 23}, resample=2
    ),
    "clip, rescaled otherwise": CLIPImageProcessorPil(size={"shortest_edge": 30}, rescale_factor=1 / 127.5),
}
SIZES = [(97, 61), (61, 97), (33, 33), (5, 300), (640, 480)]


def picture(width, height, seed=0, channels=3):
    """Smooth colours with noise on them."""
    dice = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(width, height)
    base = np.stack([np.sin(7 * x + n) * np.cos(5 * y - n) for n in range(channels)], -1)
    values = (127 + 90 * base + dice.normal(size=base.shape) * 20).clip(0, 255).astype(np.uint8)
    return Image.fromarray(values if channels > 1 else values[:, :, 0])


def ours(theirs, folder) -> Pixels:
    theirs.save_pretrained(folder)
    family = type(theirs).__name__.removesuffix("ImageProcessorPil").lower()
    return parse(Pixels, preprocessor.read(folder, family))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_same_pixels(name, size, tmp_path, record_difference):
    image = picture(*size)
    image.save(tmp_path / "a.png")
    expected = PROCESSORS[name](image, return_tensors="pt").pixel_values[0].float()
    found = ours(PROCESSORS[name], tmp_path).read(tmp_path / "a.png")
    worst = parity.difference(found, expected)
    record_difference("pixels", "transformers image processors", worst)
    assert found.shape == expected.shape and worst <= 1e-6


def test_jpeg_orientation(tmp_path):
    """A photo that lies on its side is turned before anything else."""
    image = picture(80, 50)
    sides = Image.Exif()
    sides[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "a.jpg", exif=sides, quality=90)
    with Image.open(tmp_path / "a.jpg") as opened:
        turned = opened.transpose(Image.Transpose.ROTATE_270)
    expected = PROCESSORS["clip"](turned, return_tensors="pt").pixel_values[0]
    assert parity.difference(ours(PROCESSORS["clip"], tmp_path).read(tmp_path / "a.jpg"), expected) <= 1e-6


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "1", "CMYK"])
def test_other_kinds_of_pixels(mode, tmp_path):
    """Gray, black and white, palettes, print; what can be seen through is seen on white."""
    image = picture(60, 45).convert("RGBA") if mode == "RGBA" else picture(60, 45).convert(mode)
    if mode == "RGBA":
        image.putalpha(picture(60, 45, 3, 1))
    expected = PROCESSORS["clip"](image, return_tensors="pt").pixel_values[0]
    assert parity.difference(ours(PROCESSORS["clip"], tmp_path).read(image), expected) <= 1e-6


def test_pixels_as_numbers(tmp_path):
    image = picture(60, 45)
    reader = ours(PROCESSORS["vit"], tmp_path)
    expected = reader.read(image)
    assert torch.equal(reader.read(np.asarray(image)), expected)
    assert torch.equal(reader.read(torch.from_numpy(np.asarray(image).copy())), expected)


OLD = {"do_normalize": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@pytest.mark.parametrize(
    ("said", "theirs"),
    [
        (OLD | {"size": 224, "resample": 2, "feature_extractor_type": "ViTFeatureExtractor"}, ViTImageProcessorPil()),
        (
            OLD | {"size": 30, "resample": 3, "crop_size": 24, "do_center_crop": True}
            | {"feature_extractor_type": "CLIPFeatureExtractor"},
            CLIPImageProcessorPil(size=30, crop_size=24, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        ),
        (
            OLD | {"size": 40, "resample": 3, "crop_size": 24, "do_center_crop": True}
            | {"feature_extractor_type": "DeiTFeatureExtractor"},
            DeiTImageProcessorPil(size=40, crop_size=24),
        ),
    ],
)  # fmt: skip
def test_keys_of_old_files_are_translated(said, theirs, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    image = picture(70, 51)
    expected = theirs(image, return_tensors="pt").pixel_values[0]
    found = parse(Pixels, preprocessor.read(tmp_path, "vit")).read(image)
    assert parity.difference(found, expected) <= 1e-6


@pytest.fixture
def files(tmp_path):
    paths = []
    for n, size in enumerate(SIZES[:3]):
        paths.append(tmp_path / f"{n}.png")
        picture(*size, seed=n).save(paths[-1])
    return paths


def test_classes_match_their_pipeline(files, tmp_path):
    config = ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, image_size=24, patch_size=8,
        id2label={n: name for n, name in enumerate(["cat", "dog", "bird", "fish", "moth", "newt", "toad"])},
    )  # fmt: skip
    theirs = ViTForImageClassification(config).eval()
    parity.randomise(theirs)
    processor = ViTImageProcessorPil(size={"height": 24, "width": 24})
    pipeline = ImageClassificationPipeline(model=theirs, image_processor=processor)
    for part in (theirs, processor):
        part.save_pretrained(tmp_path / "theirs")
    model = ayn.load(tmp_path / "theirs")
    assert isinstance(model, ImageClassifier) and model.labels == [config.id2label[n] for n in range(7)]
    found = model.classify_image_full(files, top=5)
    for path, ours in zip(files, found, strict=True):
        expected = {entry["label"]: entry["score"] for entry in pipeline(str(path), top_k=5)}
        assert list(ours.scores) == list(expected) and ours.label == next(iter(expected))
        assert ours.scores == pytest.approx(expected, abs=1e-5)
    assert model.classify_image(files) == [ours.label for ours in found]
    assert model.classify_image(files[0]) == found[0].label


def words() -> Tokenizer:
    names = ["<pad>", "<end>", "<begin>", "<unk>", "a", "photo", "of", "cat", "dog", "red", "house", "the"]
    made = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("<begin> $A <end>", None, [("<begin>", 2), ("<end>", 1)])
    return made


def test_matches_their_pipeline(files, tmp_path):
    shared = dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=20)
    config = CLIPConfig(
        projection_dim=14,
        text_config=dict(hidden_size=16, vocab_size=12, max_position_embeddings=9, eos_token_id=1, **shared),
        vision_config=dict(hidden_size=12, image_size=24, patch_size=8, **shared),
    )
    theirs = CLIPModel(config).eval()
    parity.randomise(theirs)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    their_tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="<pad>", eos_token="<end>")
    pipeline = ZeroShotImageClassificationPipeline(model=theirs, image_processor=processor, tokenizer=their_tokenizer)
    for part in (theirs, processor, their_tokenizer):
        part.save_pretrained(tmp_path / "theirs")
    model = ayn.load(tmp_path / "theirs")
    assert isinstance(model, ImageMatcher)
    texts = ["a photo of the red house", "cat", "the dog"]
    found = model.match_image_full(files, texts)
    for path, ours in zip(files, found, strict=True):
        said = pipeline(str(path), candidate_labels=texts, hypothesis_template="{}")
        expected = {entry["label"]: entry["score"] for entry in said}
        assert list(ours.scores) == list(expected) and ours.text == said[0]["label"]
        assert ours.scores == pytest.approx(expected, abs=1e-5)
        assert all(-1 <= cosine <= 1 for cosine in ours.cosines.values())
    assert model.match_image(files, texts) == [ours.text for ours in found]
    with pytest.warns(UserWarning, match="truncated to 7"):
        model.embed_texts(["a " * 20])


def test_without_a_preprocessor_file_only_pixels_are_accepted(files, tmp_path):
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8,
                       patch_size=4, num_labels=3)  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "theirs")
    model = ayn.load(tmp_path / "theirs")
    with pytest.raises(ayn.UserError, match="the image preprocessing is unknown"):
        model.classify_image(files)
    assert model.logits(pixels=torch.zeros(1, 3, 8, 8)).shape == (1, 3)
