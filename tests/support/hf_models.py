"""Small models of theirs, each listed once: in the parity test of its family, as `CASES` and `theirs(name)`.

Every family is included automatically.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.quantizers import quantizer_bitnet

import parity
from allyouneed.interop.families import FAMILIES

CASES = [
    (family, name)
    for family in FAMILIES
    for name in importlib.import_module(f"test_{family}_against_transformers").CASES
]


def writes(family: str) -> bool:
    """Whether models of this family go on with a text: their table knows no encoder."""
    lines = FAMILIES[family].lines
    return "encoder.blocks" not in (lines if isinstance(lines, str) else lines({}))


def theirs(family: str, name: str, seed: int = 0) -> Any:
    """That model, every weight of it random."""
    model = importlib.import_module(f"test_{family}_against_transformers").theirs(name).eval()
    parity.randomise(model, seed)
    return model


def difference(one: Any, other: Any) -> float:
    """The largest in what two models of theirs, of one class, say of the same inputs."""
    dice, config = torch.Generator().manual_seed(3), one.config
    reads = inspect.signature(one.forward).parameters
    given: dict[str, Any] = {"use_cache": False} if "use_cache" in reads else {}
    if "input_ids" in reads:
        text = getattr(config, "text_config", config)
        longest = next(n for n in (getattr(text, "max_position_embeddings", 8), 8) if 0 < n <= 8)
        given["input_ids"] = torch.randint(3, text.vocab_size, (2, longest), generator=dice)
    if "decoder_input_ids" in reads:
        vocab = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        given["decoder_input_ids"] = torch.randint(3, vocab, (2, 5), generator=dice)
    if "pixel_values" in reads:
        image = getattr(config, "vision_config", config)
        sides = [image.image_size] * 2 if isinstance(image.image_size, int) else image.image_size
        given["pixel_values"] = torch.randn(2, image.num_channels, *sides, generator=dice)
    if "input_features" in reads:
        given["input_features"] = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=dice)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # BitNet compiles how it rounds
        found, expected = one(**given).to_tuple(), other(**given).to_tuple()
    return max(parity.difference(a, b) for a, b in zip(found, expected, strict=True) if isinstance(a, Tensor))


def load(kind: type[Any], folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """What transformers makes of files that we wrote: nothing may be missing or left over."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with patch.object(quantizer_bitnet, "is_accelerate_available", return_value=True):  # asked for, and not used
        model, report = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other one wants sizes that are multiples of 4
    return model.eval()


def with_token_ids(config: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """The numbers of padding and the like, which a tokenizer tells, from another config."""
    inside = {
        key: with_token_ids(value, like[key])
        for key, value in config.items()
        if isinstance(value, dict) and key in like
    }
    return {key: value for key, value in like.items() if key.endswith("_token_id")} | config | inside
