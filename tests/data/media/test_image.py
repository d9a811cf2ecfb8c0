"""Errors for images that cannot be read (the pixels: tests/parity/test_images_against_transformers.py)."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from allyouneed.data.media.image import Pixels
from allyouneed.errors import UserError


def test_one_channel_for_models_that_read_gray():
    image = Image.new("RGB", (4, 2), (10, 20, 30))
    found = Pixels(channels=1, scale=None).read(image)
    assert found.shape == (1, 2, 4) and found.unique().tolist() == [18.0]


def test_an_image_too_small_for_its_crop_has_black_around_it():
    found = Pixels(crop=(4, 3), scale=None).read(np.full((1, 1, 3), 9, np.uint8))
    assert found.shape == (3, 4, 3) and found[0].nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an image that Pillow can read"),
        (b"just a text", "not an image that Pillow can read"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not an image|cannot be read as an image"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused(content, said, tmp_path):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=f"a.png: ({said})"):
        Pixels().read(tmp_path / "a.png")


def test_a_truncated_image_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (50, 50, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a.png: cannot be read as an image"):
        Pixels().read(tmp_path / "a.png")


def test_an_image_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    Image.new("1", (300, 300)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(UserError, match="decompression bomb"):
        Pixels().read(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((4, 4, 3)), "uint8"),
        (np.zeros((4, 4, 5), np.uint8), "channels .* must be last"),
        (np.zeros((0, 4, 3), np.uint8), "uint8"),
        (torch.zeros(3, 4, 4, 4, dtype=torch.uint8), "an image is a path"),
        (None, "an image is a path"),
    ],
)
def test_invalid_images_are_rejected(image, said):
    with pytest.raises(UserError, match=said):
        Pixels().read(image)


def test_an_image_that_is_too_thin_is_refused():
    with pytest.raises(UserError, match="too thin"):
        Pixels(size=224).read(Image.new("RGB", (1, 10_000)))


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="a folder, not an image file"):
        Pixels().read(tmp_path)
    with pytest.raises(UserError, match=r"a.png: cannot be read as an image: No such file"):
        Pixels().read(str(tmp_path / "a.png"))


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"an image needs PIL: pip install .*\[image\]'"):
        Pixels().read("a.png")
