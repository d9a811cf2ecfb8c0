"""A model folder as others read it. `TARGETS` says for whom; each writes into an empty folder and gives back notes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.folder import CARD, Folder
from allyouneed.interop.families import FAMILIES, choose, nearest
from allyouneed.interop.hf import folder as hf
from allyouneed.interop.hf import sentence_transformers
from allyouneed.interop.hf.checkpoint import SAFE
from allyouneed.interop.hf.generation_config import GENERATES, generation_of
from allyouneed.interop.hf.weight_table import Family
from allyouneed.interop.tokenizers import load as tokenizers
from allyouneed.nn.models.weights import named_tensors

SHARD = 5 * 10**9  # bytes of weights in one file
# where several families can say a model of ours, the one most people know
KNOWN = ("bert", "roberta", "gpt2", "llama", "mistral", "marian", "bart", "t5", "vit", "whisper", "clip")
WORDS = ("tokenizer*.json", "vocab.*", "*.model", "*.spm", "*.tiktoken")  # files of tokenizers
TARGETS = {
    "hf": "hf.export",
    "ctranslate2": "ctranslate2.write",
}  # module of this package that has `write(folder, out)`


def writer(target: str) -> Callable[[Folder, Path], list[str]]:
    """What writes for this target."""
    if target not in TARGETS:
        raise UserError(f"--to {target}: nothing is written for that here; there are: {', '.join(TARGETS)}")
    found: Callable[[Folder, Path], list[str]] = import_module(f"allyouneed.interop.{TARGETS[target]}").write
    return found


def write(folder: Folder, out: Path) -> list[str]:
    """Write a folder of Hugging Face's into `out`, an empty one."""
    model, head = bodied(folder.model)
    family = family_for(folder, model)
    theirs = folder.origin.get("config")
    config, weights = family.write(model, theirs, folder.unused)
    if theirs is None:
        config = _ids(folder, config) | config
    if folder.labels and (theirs is None or hf.labels_of(theirs, hf.config_of(model)) != folder.labels):
        config["id2label"] = {str(number): label for number, label in enumerate(folder.labels)}
        config["label2id"] = {label: number for number, label in enumerate(folder.labels)}
    for key in ("dtype", "torch_dtype"):
        if key in config or (theirs is None and key == "dtype"):
            config[key] = str(_most(model)).removeprefix("torch.")
    _dump(out / "config.json", config)
    save_sharded(weights, out)
    for name, content in folder.originals.items():
        (out / name).write_bytes(content)
    if not _words_kept(folder) and folder.vocabularies is not None:
        tokenizers.write(folder.vocabularies, out, config)
    kind = folder.task["kind"]
    if kind in GENERATES and hf.GENERATION not in folder.originals:
        _dump(out / hf.GENERATION, generation_of(folder.decoding, kind) | _token_ids(config))
    if head is not None:
        sentence_transformers.write(out, head, hf.config_of(model).width, folder.max_tokens)
    if folder.card:
        (out / CARD).write_text(folder.card, encoding="utf-8")
    return []


def bodied(model: nn.Module) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model as transformers has it, and the head that only sentence-transformers knows."""
    head = tree_of(hf.config_of(model)).get("head")
    if not isinstance(head, dict) or head["kind"] != "pooled" or head["width"] is not None:
        return model, None
    return hf.with_head(model, {"kind": "none"}), head


def family_for(folder: Folder, model: nn.Module) -> Family:
    """That which it came from, or the best known of those that can say it."""
    if folder.origin:
        return FAMILIES[folder.origin["family"]]
    found = {family.name: family for family in choose(hf.config_of(model))}
    if not found:
        raise UserError(
            f"{folder.path or 'the model'}: no family of transformers has a model of these parts; the nearest is\n"
            f"{nearest(hf.config_of(model))}"
        )
    return next((found[name] for name in KNOWN if name in found), next(iter(found.values())))


def save_sharded(weights: Mapping[str, Tensor], out: Path, most: int = SHARD) -> None:
    """One file, or several with an index where it would be larger than `most` bytes."""
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
        save_file(_apart(shards[0]), out / SAFE, {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(_apart(part), out / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    _dump(out / f"{SAFE}.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, none of which shares memory with another: the library refuses to write those that do."""
    seen, found = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        found[name] = tensor
    return found


def _ids(folder: Folder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which tokens do what, of a model that was trained here."""
    if folder.vocabularies is None:
        return {}
    target = folder.vocabularies.target
    pad = config.get("pad_token_id", target.pad)
    if pad != target.pad:
        raise UserError(
            f"{folder.path or 'the model'}: as {config['model_type']} its places would begin behind the number of the "
            f"padding token, {pad}, but its tokenizer pads with {target.pad}"
        )
    found: dict[str, Any] = {"pad_token_id": target.pad, "bos_token_id": target.bos, "eos_token_id": target.eos}
    tree = tree_of(hf.config_of(folder.model))
    if "encoder" in tree and "decoder" in tree:
        found |= {"decoder_start_token_id": target.bos, "is_encoder_decoder": True, "forced_eos_token_id": None}
    return found


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}


def _words_kept(folder: Folder) -> bool:
    """Whether the original's own tokenizer files are among those that were kept."""
    return any(fnmatchcase(name, pattern) for name in folder.originals for pattern in WORDS)


def _most(model: nn.Module) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default=torch.float32)


def _dump(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
