"""Hugging Face folders made by hand, of a few kilobytes: nobody else's code had a part in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    width, hidden, vocab, narrow = 16, 24, 300, 8
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for n in range(2):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
            f"{layer}.self_attn.q_proj.weight": (width, width),
            f"{layer}.self_attn.k_proj.weight": (narrow, width),
            f"{layer}.self_attn.v_proj.weight": (narrow, width),
            f"{layer}.self_attn.o_proj.weight": (width, width),
            f"{layer}.mlp.gate_proj.weight": (hidden, width),
            f"{layer}.mlp.up_proj.weight": (hidden, width),
            f"{layer}.mlp.down_proj.weight": (width, hidden),
        }
    dice = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=dice).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A whole folder; `changes` are those of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def shard(folder: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Part the weights of a folder into two files with an index; the index."""
    tensors = weights()
    names = sorted(tensors)
    (folder / "model.safetensors").unlink(missing_ok=True)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    places = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"{stem}-0000{number}-of-00002{suffix}"
        content = {name: tensors[name] for name in part}
        save_file(content, folder / file) if suffix == ".safetensors" else torch.save(content, folder / file)
        places |= dict.fromkeys(part, file)
    write_index(folder, places, f"{stem}{suffix}.index.json")
    return places


def write_index(folder: Path, places: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
