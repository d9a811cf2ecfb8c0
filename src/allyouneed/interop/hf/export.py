"""Write a model folder in Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.folder import CARD, Folder
from allyouneed.interop.families import FAMILIES, closest_refusal, matching_families
from allyouneed.interop.heads import config_of, with_head
from allyouneed.interop.hf import sentence_transformers
from allyouneed.interop.hf.checkpoint import SAFETENSORS
from allyouneed.interop.hf.folder import GENERATION, labels_of
from allyouneed.interop.hf.generation_config import GENERATES, write_generation
from allyouneed.interop.hf.weight_table import Family
from allyouneed.interop.tokenizers import load as tokenizers
from allyouneed.nn.models.weights import named_tensors

SHARD_BYTES = 5 * 10**9
# where several families can express a model, prefer the best known
PREFERRED = ("bert", "roberta", "gpt2", "llama", "mistral", "marian", "bart", "t5", "vit", "whisper", "clip")
TOKENIZER_FILES = ("tokenizer*.json", "vocab.*", "*.model", "*.spm", "*.tiktoken")


def write(folder: Folder, out: Path) -> list[str]:
    """Write a Hugging Face folder into `out`, which is empty. Returns notes."""
    model, head = split_pooling_head(folder.model)
    family = choose_family(folder, model)
    theirs = folder.origin.get("config")
    config, weights = family.write(model, theirs, folder.unused)
    if theirs is None:
        config = _special_token_ids(folder, config) | config
    if folder.labels and (theirs is None or labels_of(theirs, config_of(model)) != folder.labels):
        config["id2label"] = {str(number): label for number, label in enumerate(folder.labels)}
        config["label2id"] = {label: number for number, label in enumerate(folder.labels)}
    for key in ("dtype", "torch_dtype"):
        if key in config or (theirs is None and key == "dtype"):
            config[key] = str(_main_dtype(model)).removeprefix("torch.")
    _write_json(out / "config.json", config)
    save_sharded(weights, out)
    for name, content in folder.originals.items():
        (out / name).write_bytes(content)
    if not _keeps_tokenizer_files(folder) and folder.vocabularies is not None:
        tokenizers.write(folder.vocabularies, out, config_of(model))
    kind = folder.task["kind"]
    if kind in GENERATES and GENERATION not in folder.originals:
        _write_json(out / GENERATION, write_generation(folder.decoding, kind) | _token_ids(config))
    if head is not None:
        sentence_transformers.write(out, head, config_of(model).width, folder.max_tokens)
    if folder.card:
        (out / CARD).write_text(folder.card, encoding="utf-8")
    return []


def split_pooling_head(model: nn.Module) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model for transformers, and the pooling head, which only sentence-transformers has."""
    head = tree_of(config_of(model)).get("head")
    if not isinstance(head, dict) or head["kind"] != "pooled" or head["width"] is not None:
        return model, None
    return with_head(model, {"kind": "none"}), head


def choose_family(folder: Folder, model: nn.Module) -> Family:
    """The family it was imported from, or the best known one that can express it."""
    if folder.origin.get("family"):
        return FAMILIES[folder.origin["family"]]
    found = {family.name: family for family in matching_families(config_of(model))}
    lacking = {name: told for name, family in found.items() if (told := family.lacks(config_of(model)))}
    found = {name: family for name, family in found.items() if name not in lacking}
    if not found:
        closest = [str(closest_refusal(config_of(model))), *(f"{name}: {what}" for name, what in lacking.items())]
        raise UserError(
            f"{folder.path or 'the model'}: no family of transformers can express this model; the closest is\n"
            + "\n".join(closest)
        )
    return next((found[name] for name in PREFERRED if name in found), next(iter(found.values())))


def save_sharded(weights: Mapping[str, Tensor], out: Path, most: int = SHARD_BYTES) -> None:
    """Write one file, or shards of at most `most` bytes with an index."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(_unshared(shards[0]), out / SAFETENSORS, {"format": "pt"})
        return
    file_of: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(_unshared(part), out / file, {"format": "pt"})
        file_of |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    _write_json(
        out / f"{SAFETENSORS}.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))},
    )


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors without shared memory, which safetensors refuses to write."""
    seen, found = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        found[name] = tensor
    return found


def _special_token_ids(folder: Folder, config: Mapping[str, Any]) -> dict[str, Any]:
    """The special token ids of a model that was trained here."""
    if folder.vocabularies is None:
        return {}
    target = folder.vocabularies.target
    pad = config.get("pad_token_id", target.pad)
    if pad != target.pad:
        raise UserError(
            f"{folder.path or 'the model'}: in a {config['model_type']} model positions start after pad_token_id, "
            f"{pad}, but the tokenizer pads with {target.pad}"
        )
    found: dict[str, Any] = {"pad_token_id": target.pad, "bos_token_id": target.bos, "eos_token_id": target.eos}
    tree = tree_of(config_of(folder.model))
    if "encoder" in tree and "decoder" in tree:
        found |= {"decoder_start_token_id": target.bos, "is_encoder_decoder": True, "forced_eos_token_id": None}
    return found


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}


def _keeps_tokenizer_files(folder: Folder) -> bool:
    """Whether the original tokenizer files were kept."""
    return any(fnmatchcase(name, pattern) for name in folder.originals for pattern in TOKENIZER_FILES)


def _main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default=torch.float32)


def _write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
