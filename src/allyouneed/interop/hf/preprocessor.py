"""Image preprocessing of a Hugging Face folder: preprocessor_config.json, or `image_processor` in
processor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, read_json

FILES = ("preprocessor_config.json", "processor_config.json")
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
BICUBIC, BILINEAR = FILTERS.index("bicubic"), FILTERS.index("bilinear")
HALF = [0.5, 0.5, 0.5]
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# defaults of each kind
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}, "resample": BILINEAR, "image_mean": HALF, "image_std": HALF},
    "DeiT": {
        "size": {"height": 256, "width": 256},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "image_mean": HALF,
        "image_std": HALF,
    },
    "CLIP": {
        "size": {"shortest_edge": 224},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
}
KNOWN = {
    "do_resize",
    "do_rescale",
    "do_normalize",
    "rescale_factor",
    *(key for tree in DEFAULTS.values() for key in tree),
}
# provenance, devices and array layouts
IGNORED_KEYS = {
    "feature_extractor_type", "image_processor_type", "processor_class", "do_convert_rgb", "default_to_square",
    "device", "data_format", "input_data_format", "return_tensors", "auto_map", "image_seq_length",
    "disable_grouping", "_valid_processor_keys", "use_fast",
}  # fmt: skip


def read(path: Path, family: str, channels: int = 3) -> dict[str, Any]:
    """The keys of `data.image.Pixels`. Without such a file, or with unsupported options, only `lacks` with the reason:
    the model accepts pixels, but no image files."""
    options = read_options(path)
    if not options:
        return {"lacks": f"{FILES[0]} is missing, so the image preprocessing is unknown"}
    try:
        return tree(options, family, channels)
    except UserError as error:
        return {"lacks": str(error)}


def read_options(path: Path) -> dict[str, Any]:
    """Their options; processor_config.json holds those of several processors."""
    for name in FILES:
        if has_file(path, name):
            content = read_json(path, name)
            found = content.get("image_processor", content)
            if not isinstance(found, dict):
                raise UserError(f"{path / name}: image_processor: expected a JSON object")
            if name == FILES[0] or "image_mean" in found or "size" in found:
                return found
    return {}


def tree(options: Mapping[str, Any], family: str, channels: int = 3) -> dict[str, Any]:
    """`family`: vit, deit or clip, where the file does not name its kind."""
    kinds = {kind.lower(): kind for kind in DEFAULTS}
    named = str(options.get("image_processor_type") or options.get("feature_extractor_type") or "")
    kind = next((prefix for prefix in ("DeiT", "CLIP", "ViT") if named.startswith(prefix)), kinds.get(family))
    if kind is None:
        raise UserError(f"preprocessor_config.json: image preprocessing of {named or family} is not supported")
    full = DEFAULTS[kind] | {key: value for key, value in options.items() if value is not None}
    unknown = [key for key, value in options.items() if value and key not in KNOWN | IGNORED_KEYS]
    if unknown:
        raise UserError(f"preprocessor_config.json: {', '.join(unknown)}: not supported, and may change the image")
    found: dict[str, Any] = {"channels": channels}
    if full.get("do_resize", True):
        found |= {"size": _size(full["size"], kind), "filter": _filter(full["resample"])}
    if full.get("do_center_crop", False):
        found["crop"] = _sides(full["crop_size"])
    found["scale"] = full.get("rescale_factor", 1 / 255) if full.get("do_rescale", True) else None
    if full.get("do_normalize", True):
        found |= {name: _per_channel(full[f"image_{name}"], channels) for name in ("mean", "std")}
    return found


def _size(size: Any, kind: str) -> int | list[int]:
    """An integer is the shorter side in CLIP and a square in the others."""
    if isinstance(size, Mapping) and set(size) == {"shortest_edge"}:
        return int(size["shortest_edge"])
    if isinstance(size, int) and kind == "CLIP":
        return size
    return _sides(size)


def _sides(size: Any) -> list[int]:
    """[height, width]"""
    if isinstance(size, int):
        return [size, size]
    if isinstance(size, Mapping) and set(size) == {"height", "width"}:
        return [int(size["height"]), int(size["width"])]
    if isinstance(size, list | tuple) and len(size) == 2:
        return [int(side) for side in size]
    raise UserError(f"preprocessor_config.json: size {size!r} is not supported")


def _filter(number: Any) -> str:
    if isinstance(number, int) and 0 <= number < len(FILTERS):
        return FILTERS[number]
    raise UserError(
        f"preprocessor_config.json: resample: {number!r} is not supported (allowed: 0 to {len(FILTERS) - 1})"
    )


def _per_channel(value: Any, channels: int) -> list[float]:
    values = [float(value)] * channels if isinstance(value, int | float) else [float(each) for each in value]
    if len(values) != channels:
        raise UserError(f"preprocessor_config.json: {len(values)} means or deviations for {channels} channels")
    return values
