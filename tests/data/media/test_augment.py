"""Augmentation: same size, same choice for the same seed, and what each paper says."""

import numpy as np
import pytest

from allyouneed.config import parse
from allyouneed.data.media.augment import OPERATIONS, Augment, mixed

pytest.importorskip("PIL")
EVERY = ["crop", "resized-crop", "flip", "erasing", "randaugment", "mixup", "cutmix"]


def image(seed=0, shape=(12, 10, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def changed(kind, seed, shape=(12, 10, 3), **keys):
    one, rng = parse(Augment, {"kind": kind, **keys}), np.random.default_rng(seed)
    if one.mixes:
        return mixed(one, image(0, shape), lambda: image(1, shape), rng)[0]
    return one.change(image(0, shape), rng)


def test_every_augmentation_is_tried_here():
    parse(Augment, "crop")
    assert set(EVERY) == set(Augment.registry)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("shape", [(12, 10, 3), (7, 9, 1)])
def test_the_size_is_kept_and_the_choice_is_the_seeds(kind, shape):
    made = [changed(kind, seed, shape) for seed in range(20)]
    assert all(one.shape == shape and 0 <= one.min() <= one.max() <= 255 for one in made)
    assert all(np.array_equal(one, changed(kind, seed, shape)) for seed, one in enumerate(made))
    assert any(not np.array_equal(one, made[0]) for one in made), "it is random"


@pytest.mark.parametrize("kind", EVERY)
def test_the_given_image_is_not_changed(kind):
    before = image()
    one = parse(Augment, kind)
    for seed in range(10):
        given, rng = before.copy(), np.random.default_rng(seed)
        mixed(one, given, image, rng) if one.mixes else one.change(given, rng)
        assert np.array_equal(given, before)


def test_a_crop_moves_the_image_by_at_most_the_padding():
    made = [changed("crop", seed, padding=1) for seed in range(40)]
    wide = np.pad(image(), ((1, 1), (1, 1), (0, 0)))
    places = [wide[top : top + 12, left : left + 10] for top in range(3) for left in range(3)]
    found = {next(n for n, place in enumerate(places) if np.array_equal(one, place)) for one in made}
    assert len(found) > 5


def test_a_flip_mirrors():
    assert np.array_equal(changed("flip", 0, probability=1), image()[:, ::-1])
    assert np.array_equal(changed("flip", 0, probability=0), image())


def test_mixup_is_the_weighted_mean_and_its_share_the_weight():
    one = parse(Augment, {"kind": "mixup", "alpha": 1.0})
    for seed in range(5):
        found, share = mixed(one, image(0), lambda: image(1), np.random.default_rng(seed))
        np.testing.assert_allclose(found, share * image(0) + (1 - share) * image(1), rtol=1e-5)


def test_cutmix_counts_the_pixels_of_both_images():
    black, white = np.zeros((12, 10, 3), np.uint8), np.full((12, 10, 3), 255, np.uint8)
    shares = []
    for seed in range(30):
        found, share = mixed(parse(Augment, "cutmix"), black, lambda: white, np.random.default_rng(seed))
        assert share == pytest.approx(float((found == 0).mean()))
        shares.append(share)
    assert min(shares) < 0.3 and max(shares) > 0.7


def test_erasing_keeps_the_area_it_says():
    for seed in range(30):
        found = changed("erasing", seed, (40, 40, 3), probability=1, area=[0.1, 0.2])
        assert 0.07 < float((found != image(0, (40, 40, 3))).any(-1).mean()) < 0.23


def test_no_operation_of_randaugment_changes_anything_at_strength_zero_but_those_without_strength():
    from PIL import Image

    picture = Image.fromarray(image(0, (16, 16, 3)))
    same = [np.array_equal(np.asarray(operation(picture, 0.0)), picture) for operation in OPERATIONS]
    assert same.count(False) <= 2, "autocontrast and equalize"


@pytest.mark.parametrize("area", [[0.5, 0.2], [0, 1]])
def test_an_empty_area_is_refused(area):
    with pytest.raises(Exception, match="area"):
        parse(Augment, {"kind": "resized-crop", "area": area})
