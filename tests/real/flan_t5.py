"""flan-t5-small out of 8-bit ONNX files: weights are (q − zero) · scale, and the nodes that use them keep the names of
the modules they were. Written as Hugging Face would have saved it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_heads": 6,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.1,
    "tie_word_embeddings": False,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SIDES = {"encoder": ("encoder.onnx", "enc", "encoder"), "decoder": ("decoder.onnx", "m", "")}


def weights_of(file: Path, root: str, under: str) -> dict[str, Tensor]:
    """By the names of Hugging Face's T5; `root` is their name for the module that was written, `under` where it is."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(file)).graph
    stored = {entry.name: numpy_helper.to_array(entry) for entry in graph.initializer}

    def numbers(name: str) -> np.ndarray:
        base = name.removesuffix("_quantized")
        if base == name:
            return stored[name].astype(np.float32)
        zero, scale = stored[f"{base}_zero_point"].astype(np.float32), stored[f"{base}_scale"].astype(np.float32)
        return (stored[name].astype(np.float32) - zero) * scale

    found: dict[str, np.ndarray] = {}
    for name in stored:
        if name.startswith(f"{root}.") and name.removesuffix("_quantized").endswith(".weight"):
            found[name.removesuffix("_quantized").removeprefix(f"{root}.")] = numbers(name)
    for node in graph.node:
        if node.op_type == "MatMulInteger":  # x W, where theirs is x Wᵀ
            module = ".".join(node.name.strip("/").split("/")[1:-1])
            found[f"{module}.weight"] = numbers(node.input[1]).T
    prefix = f"{under}." if under else ""
    return {f"{prefix}{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


def written(source: Path, folder: Path) -> Path:
    if not (folder / "config.json").exists():
        weights: dict[str, Tensor] = {}
        for file, root, under in SIDES.values():
            weights |= weights_of(source / file, root, under)
        own = weights.pop("encoder.embed_tokens.weight")
        assert torch.equal(own, weights["shared.weight"]), "both sides read the same words"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        shutil.copy(source / "tokenizer.json", folder)
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    return folder
