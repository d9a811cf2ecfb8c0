"""What a preprocessor_config.json may ask for, and what is refused by name."""

import json

import pytest

from allyouneed.errors import UserError
from allyouneed.interop.hf.preprocessor import read, tree

VIT = {"image_processor_type": "ViTImageProcessor"}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"do_pad": True}, "do_pad: not supported, and may change the image"),
        ({"do_reduce_labels": True, "do_flip": 1}, "do_reduce_labels, do_flip"),
        ({"size": {"longest_edge": 30}}, "size .*longest_edge.* is not supported"),
        ({"resample": 9}, "resample: 9 is not supported"),
        ({"image_mean": [0.5]}, "1 means or deviations for 3 channels"),
        (
            {"image_processor_type": "SegformerImageProcessor"},
            "image preprocessing of SegformerImageProcessor is not supported",
        ),
    ],
)
def test_unsupported_image_options_are_refused_by_name(said, message):
    with pytest.raises(UserError, match=message):
        tree(VIT | said, "segformer")


def test_options_without_effect_are_ignored():
    assert tree(VIT | {"do_pad": False, "do_convert_rgb": True, "data_format": "channels_first"}, "x") == tree(VIT, "x")


def test_the_image_processor_of_a_combined_config_is_read(tmp_path):
    said = {"image_processor": VIT | {"size": {"height": 8, "width": 6}}, "processor_class": "CLIPProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    assert read(tmp_path, "clip")["size"] == [8, 6]


def test_missing_and_broken_files_give_a_reason(tmp_path):
    assert "preprocessor_config.json is missing" in read(tmp_path, "vit")["lacks"]
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match=r"preprocessor_config.json: not valid JSON"):
        read(tmp_path, "vit")
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object"):
        read(tmp_path, "vit")


def test_models_of_gray_images_are_read(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"image_mean": 0.5, "image_std": [0.25]}))
    found = read(tmp_path, "vit", channels=1)
    assert (found["channels"], found["mean"], found["std"]) == (1, [0.5], [0.25])


def test_the_reason_is_reported_when_an_image_is_given(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"do_pad": True}))
    assert "do_pad: not supported" in read(tmp_path, "vit")["lacks"]
