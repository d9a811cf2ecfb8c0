"""Llama in llama2.c's layout: seven numbers, then the weights of each kind for all layers, 32-bit and in a fixed order;
the vocabulary is a file of its own (`tokenizer.bin`)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.families import FAMILIES

HEAD = struct.Struct("<7i")
MAGIC = 0x616B3432  # newer layouts begin with it
VOCABULARY = "tokenizer.bin"
UNKNOWN, BEGIN, END = 0, 1, 2
FIRST_BYTE = 3  # pieces 3 to 258 are the 256 bytes
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def read(path: Path, tokenizer: Path | None = None) -> Folder:
    """`tokenizer`: where the vocabulary is, if not beside the model as tokenizer.bin."""
    config, weights = read_weights(path)
    file = tokenizer or path.with_name(VOCABULARY)
    if not file.is_file():
        raise UserError(
            f"{path}: it comes without its vocabulary; put {VOCABULARY} beside it, or name that file as tokenizer"
        )
    inner = read_vocabulary(file, config["vocab_size"])
    vocabulary = Tokenizer(inner, UNKNOWN, BEGIN, END, template=Template(before=(BEGIN,), opening=(BEGIN,)))
    model = FAMILIES["llama"].convert(config, weights)
    decoding = {"method": "greedy", "max_length": config["max_position_embeddings"]}
    both = Vocabularies(vocabulary, vocabulary)
    made = Folder(model, both, {"kind": "causal-lm"}, decoding, config["max_position_embeddings"])
    made.path, made.origin = path, {"family": "llama", "config": config}
    return made


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As Hugging Face's Llama would have them."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD.size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(head) < HEAD.size or int.from_bytes(head[:4], "little") == MAGIC:
        raise UserError(f"{path}: not a model of llama2.c's first layout (version 0, 32-bit); export it again as that")
    *numbers, vocab, length = HEAD.unpack(head)
    config: dict[str, Any] = dict(zip(SIZES, numbers, strict=True))
    tied, vocab = vocab > 0, abs(vocab)  # a negative number says that the head has a matrix of its own
    sane = all(0 < number < 1 << 20 for number in (*numbers, vocab, length))
    if not sane or config["hidden_size"] % (2 * config["num_attention_heads"]):
        raise UserError(f"{path}: not a model of llama2.c: it begins with sizes that cannot be")
    shapes = _shapes(config, vocab, length, tied)
    wanted = HEAD.size + 4 * sum(int(np.prod(shape)) for _, shape in shapes)
    if size != wanted:
        raise UserError(f"{path}: {size:,} bytes, its sizes ask for {wanted:,}; the file is damaged or another kind")
    numbers_of = np.memmap(path, "<f4", "r", HEAD.size)
    weights: dict[str, Tensor] = {}
    at = 0
    for name, shape in shapes:
        count = int(np.prod(shape))
        tensor = torch.from_numpy(np.array(numbers_of[at : at + count]).reshape(shape))
        at += count
        if "{n}" in name:
            weights |= {name.replace("{n}", str(n)): layer for n, layer in enumerate(tensor)}
        else:
            weights[name] = tensor
    weights = {name: tensor for name, tensor in weights.items() if name != FREQUENCIES}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in weights:
        for end, count in heads.items():
            if name.endswith(f"{end}.weight"):
                weights[name] = _halves(weights[name], count)
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


FREQUENCIES = "rotary"  # tables of cosines and sines, which ours computes


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


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Theirs turns neighbours (0 and 1, 2 and 3, …), Hugging Face's Llama the halves of a head (0 and d/2, …)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()


def read_vocabulary(path: Path, size: int) -> Any:
    """A `tokenizers.Tokenizer`: pairs joined by score, unknown characters as bytes, a space in front of the text."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Inner

    pieces, scores = _pieces(path, size)
    number = {piece: n for n, piece in reversed(list(enumerate(pieces)))}
    merges = []
    for n, piece in enumerate(pieces[FIRST_BYTE + 256 :], FIRST_BYTE + 256):
        for cut in range(1, len(piece)):
            if piece[:cut] in number and piece[cut:] in number:
                merges.append((-scores[n], n, number[piece[:cut]], piece[:cut], piece[cut:]))
    merges.sort()
    joined = [(left, right) for *_, left, right in merges]
    made = Inner(models.BPE(vocab=number, merges=joined, unk_token=pieces[UNKNOWN], fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(pieces[n], special=True, normalized=False) for n in (UNKNOWN, BEGIN, END)])
    return made


def _pieces(path: Path, size: int) -> tuple[list[str], list[float]]:
    """Each: its score, how many bytes it has, the bytes. Bytes as pieces are written `<0x0A>`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    pieces: list[str] = []
    scores: list[float] = []
    at = 4  # after the length of the longest piece
    while at + 8 <= len(content) and len(pieces) < size:
        score, count = struct.unpack_from("<fi", content, at)
        if not 0 <= count <= len(content) - at - 8:
            break
        raw = content[at + 8 : at + 8 + count]
        pieces.append(_spelled(raw, len(pieces)))
        scores.append(score)
        at += 8 + count
    if len(pieces) != size or at != len(content):
        raise UserError(
            f"{path}: not the vocabulary of this model: {len(pieces):,} pieces where {size:,} were expected"
        )
    return pieces, scores


def _spelled(raw: bytes, number: int) -> str:
    """Their file has a space where SentencePiece has its mark, and line breaks around the begin and end mark."""
    special = {UNKNOWN: "<unk>", BEGIN: "<s>", END: "</s>"}
    if number in special:
        return special[number]
    if FIRST_BYTE <= number < FIRST_BYTE + 256:
        return f"<0x{number - FIRST_BYTE:02X}>"
    return raw.decode("utf-8", errors="replace").replace(" ", "▁")
