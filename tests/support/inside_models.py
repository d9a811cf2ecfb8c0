"""Tiny random predictors to look inside: the eight systems of the truth test, and one predictor of every task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

import allyouneed as ayn
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.config import parse, preset_names, preset_tree, tree_of
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from allyouneed.infer.predictors.registry import predictor
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from infer_fixtures import TEXT
from shrink import GRID, PATCH, batch_for, shrink

SENTENCE = "How are you today? 今天"
PIXELS = np.random.default_rng(0).integers(0, 256, (GRID * PATCH, GRID * PATCH, 3), dtype=np.uint8)
SOUND = torch.from_numpy(np.sin(np.arange(16_000) / 9).astype(np.float32) / 2)
SPEECH = {"kind": "transcription", "seconds": 1.0, "start": 341, "end": 340, "no_timestamps": 348}
# system -> (preset, task, input, other fields of the folder)
SYSTEMS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "post-norm encoder-decoder": ("transformer-tiny", {"kind": "translation"}, SENTENCE, {}),
    "gpt-2": ("gpt2", {"kind": "causal-lm"}, SENTENCE, {}),
    "retnet": ("retnet-1.3b", {"kind": "causal-lm"}, SENTENCE, {}),
    "rwkv": ("rwkv-4-169m", {"kind": "causal-lm"}, SENTENCE, {}),
    "moe": ("mixtral-8x7b", {"kind": "causal-lm"}, SENTENCE, {}),
    "t5": ("t5-small", {"kind": "seq2seq"}, SENTENCE, {}),
    "vit": (
        "vit-base-16",
        {"kind": "image-classification", "image": {"size": [GRID * PATCH, GRID * PATCH]}},
        PIXELS,
        {"labels": list("abcde")},
    ),
    "whisper": ("whisper-tiny", SPEECH, SOUND, {}),
}


@cache
def translator() -> Any:
    """The shipped one."""
    return ayn.load("translator")


@cache
def small(preset: str) -> tuple[Any, Batch]:
    """A shrunk preset with random weights, and six inputs of unequal lengths."""
    torch.manual_seed(0)
    model: Any = shrink(parse(Model, preset_tree(preset))).build().eval()  # type: ignore[type-abstract]
    return model, batch_for(model.config)


@cache
def shrunk_tree(preset: str) -> dict[str, Any]:
    return tree_of(shrink(parse(Model, preset_tree(preset))), full=True)  # type: ignore[type-abstract]


def unlike_presets(*keys: str) -> list[str]:
    """Presets that differ in more than size; with keys (`mixer`, `wiring`, …), in the kinds of these parts."""
    seen: dict[str, str] = {}
    for name in preset_names():
        tree = shrunk_tree(name)
        found = str(tree) if not keys else str((tree["kind"], sorted(set(_kinds(tree, keys)))))
        seen.setdefault(found, name)
    return list(seen.values())


def _kinds(tree: Any, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if key in keys and isinstance(value, dict):
            yield key, str(value.get("kind"))
        for entry in value if isinstance(value, list) else [value]:
            yield from _kinds(entry, keys)


def first_row(batch: Batch) -> Batch:
    """The first input alone, without padding."""

    def cut(given: Any) -> Any:
        one = given.each(lambda tensor: tensor[:1])
        if not isinstance(one, Rows) or one.lengths is None:
            return one
        length = int(one.lengths[0])
        return replace(one.each(lambda tensor: tensor[:, :length] if tensor.dim() == 2 else tensor), lengths=None)

    return Batch(cut(batch.target), None if batch.source is None else cut(batch.source))


@cache
def tiny_tokenizer() -> Tokenizer:
    return train(TokenizerConfig(vocab=400, specials=("<mask>", "<cut0>", "<cut1>")), TEXT * 3)


def make_predictor(preset: str, task: dict[str, Any], seed: int = 0, **changes: Any) -> Any:
    """A shrunk preset with random weights, decisive ones. `changes`: of the config; fields of the folder: `labels`."""
    labels = changes.pop("labels", [])
    config = shrink(parse(Model, preset_tree(preset)))  # type: ignore[type-abstract]
    tree, tokenizer = tree_of(config, full=True), tiny_tokenizer()
    if tree.get("vocab") is not None:
        tree["vocab"] = tokenizer.size
    if tree["kind"] == "two-towers":
        tree["text"]["vocab"] = tokenizer.size
    torch.manual_seed(seed)
    model: Any = parse(Model, tree | changes).build().eval()  # type: ignore[type-abstract]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    both = Vocabularies(tokenizer, tokenizer) if config.vocabs is not None else None
    return predictor(Folder(model, both, task, {"extra": 6, "method": "greedy"}, max_tokens=128, labels=labels))


@cache
def system(name: str) -> ViewModel:
    preset, task, _, more = SYSTEMS[name]
    return ViewModel(name, make_predictor(preset, task, **more))


def record_system(name: str) -> Any:
    """The run of its input."""
    return system(name).predictor.inside(SYSTEMS[name][2])
