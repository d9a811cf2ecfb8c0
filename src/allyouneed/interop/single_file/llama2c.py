"""Llama in llama2.c's layout: seven integers, then float32 weights in a fixed order, stacked over the layers; the
vocabulary is a separate file (`tokenizer.bin`)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.bounds import check_pieces, check_tokenizer
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, named_file, read_bytes
from allyouneed.folder import Folder
from allyouneed.interop.families import FAMILIES

HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432  # first bytes of newer layouts
VOCABULARY = "tokenizer.bin"
UNKNOWN, BEGIN, END = 0, 1, 2
FIRST_BYTE = 3  # ids 3 to 258 are the 256 bytes
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def read(path: Path, tokenizer: Path | None = None) -> Folder:
    """`tokenizer`: the vocabulary file, by default tokenizer.bin beside the model."""
    config, weights = read_weights(path)
    file = tokenizer or path.with_name(VOCABULARY)
    if not has_file(file.parent, file.name):
        raise UserError(f"{path}: no vocabulary; put {VOCABULARY} beside it, or pass that file as tokenizer")
    inner = read_vocabulary(file if tokenizer is None else Path(*named_file(file)), config["vocab_size"])
    vocabulary = Tokenizer(inner, UNKNOWN, BEGIN, END, template=Template(before=(BEGIN,), opening=(BEGIN,)))
    model = FAMILIES["llama"].convert(config, weights)
    decoding = {"method": "greedy", "max_length": config["max_position_embeddings"]}
    both = Vocabularies(vocabulary, vocabulary)
    made = Folder(model, both, {"kind": "causal-lm"}, decoding, config["max_position_embeddings"])
    made.path, made.origin = path, {"family": "llama", "config": config}
    return made


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights in the format of Hugging Face's Llama."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(head) < HEADER.size or int.from_bytes(head[:4], "little") == MAGIC:
        raise UserError(f"{path}: not llama2.c's version 0 layout (float32); export the model again in that layout")
    *numbers, vocab, length = HEADER.unpack(head)
    config: dict[str, Any] = dict(zip(SIZES, numbers, strict=True))
    tied, vocab = vocab > 0, abs(vocab)  # negative: the head is not tied
    sane = all(0 < number < 1 << 20 for number in (*numbers, vocab, length))
    if not sane or config["hidden_size"] % (2 * config["num_attention_heads"]):
        raise UserError(f"{path}: not a llama2.c model: impossible sizes in the header")
    shapes = _shapes(config, vocab, length, tied)
    wanted = HEADER.size + 4 * sum(int(np.prod(shape)) for _, shape in shapes)
    if size != wanted:
        raise UserError(
            f"{path}: {size:,} bytes, but its header implies {wanted:,}; the file is damaged or has another format"
        )
    values = np.memmap(path, "<f4", "r", HEADER.size)
    weights: dict[str, Tensor] = {}
    offset = 0
    for name, shape in shapes:
        count = int(np.prod(shape))
        tensor = torch.from_numpy(np.array(values[offset : offset + count]).reshape(shape))
        offset += count
        if "{n}" in name:
            weights |= {name.replace("{n}", str(n)): layer for n, layer in enumerate(tensor)}
        else:
            weights[name] = tensor
    weights = {name: tensor for name, tensor in weights.items() if name != FREQUENCIES}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in weights:
        for end, count in heads.items():
            if name.endswith(f"{end}.weight"):
                weights[name] = _to_halves(weights[name], count)
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }
    return config, weights


FREQUENCIES = "rotary"  # tables of cosines and sines, which our model computes


def _shapes(config: dict[str, Any], vocab: int, length: int, tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    width, hidden, layers, heads, kv_heads = (config[name] for name in SIZES)
    head, layer = width // heads, "model.layers.{n}."
    kv = kv_heads * head
    found: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (vocab, width)),
        (f"{layer}input_layernorm.weight", (layers, width)),
        (f"{layer}self_attn.q_proj.weight", (layers, width, width)),
        (f"{layer}self_attn.k_proj.weight", (layers, kv, width)),
        (f"{layer}self_attn.v_proj.weight", (layers, kv, width)),
        (f"{layer}self_attn.o_proj.weight", (layers, width, width)),
        (f"{layer}post_attention_layernorm.weight", (layers, width)),
        (f"{layer}mlp.gate_proj.weight", (layers, hidden, width)),
        (f"{layer}mlp.down_proj.weight", (layers, width, hidden)),
        (f"{layer}mlp.up_proj.weight", (layers, hidden, width)),
        ("model.norm.weight", (width,)),
        (FREQUENCIES, (2, length, head // 2)),
    ]
    return found if tied else [*found, ("lm_head.weight", (vocab, width))]


def _to_halves(weight: Tensor, heads: int) -> Tensor:
    """llama2.c rotates adjacent features (0 and 1, 2 and 3, …), Hugging Face's Llama halves (0 and d/2, …)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()


def read_vocabulary(path: Path, size: int) -> Any:
    """A `tokenizers.Tokenizer`: merges by score, byte fallback, a space prepended to the text."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Inner

    pieces, scores = _pieces(path, size)
    check_pieces(pieces, str(path))
    ids = {piece: n for n, piece in reversed(list(enumerate(pieces)))}
    merges = []
    for n, piece in enumerate(pieces[FIRST_BYTE + 256 :], FIRST_BYTE + 256):
        for cut in range(1, len(piece)):
            if piece[:cut] in ids and piece[cut:] in ids:
                merges.append((-scores[n], n, ids[piece[:cut]], piece[:cut], piece[cut:]))
    merges.sort()
    pairs = [(left, right) for *_, left, right in merges]
    made = Inner(models.BPE(vocab=ids, merges=pairs, unk_token=pieces[UNKNOWN], fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(pieces[n], special=True, normalized=False) for n in (UNKNOWN, BEGIN, END)])
    check_tokenizer(made, str(path))
    return made


def _pieces(path: Path, size: int) -> tuple[list[str], list[float]]:
    """Each entry: score, length in bytes, bytes. Byte pieces are named `<0x0A>`."""
    content = read_bytes(path.parent, path.name)
    pieces: list[str] = []
    scores: list[float] = []
    offset = 4  # after the length of the longest piece
    while offset + 8 <= len(content) and len(pieces) < size:
        score, count = struct.unpack_from("<fi", content, offset)
        if not 0 <= count <= len(content) - offset - 8:
            break
        raw = content[offset + 8 : offset + 8 + count]
        pieces.append(_piece_text(raw, len(pieces)))
        scores.append(score)
        offset += 8 + count
    if len(pieces) != size or offset != len(content):
        raise UserError(f"{path}: not the vocabulary of this model: {len(pieces):,} pieces, expected {size:,}")
    return pieces, scores


def _piece_text(raw: bytes, number: int) -> str:
    """The file has a space for SentencePiece's `▁`, and line breaks around the begin and end tokens."""
    special = {UNKNOWN: "<unk>", BEGIN: "<s>", END: "</s>"}
    if number in special:
        return special[number]
    if FIRST_BYTE <= number < FIRST_BYTE + 256:
        return f"<0x{number - FIRST_BYTE:02X}>"
    return raw.decode("utf-8", errors="replace").replace(" ", "▁")
