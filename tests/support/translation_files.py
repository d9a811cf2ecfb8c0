"""Small random translation models as Marian and fairseq store them, with vocabularies and subword files."""

from __future__ import annotations

import argparse
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import yaml

TEXTS = ["the cat sat on the mat", "a dog and a cat", "the dog sat", "on a mat the cat sat and sat", "and the mat"] * 4
WIDTH, HEADS, HIDDEN = 16, 2, 24
ORDINARY = {
    "type": "transformer",
    "dim-emb": WIDTH,
    "enc-depth": 2,
    "dec-depth": 2,
    "transformer-heads": HEADS,
    "transformer-dim-ffn": HIDDEN,
    "transformer-ffn-depth": 2,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-guided-alignment-layer": "last",
    "tied-embeddings-all": True,
    "skip": False,
    "bert-mask-symbol": "[MASK]",
    "version": "v1.10.0",
}


def train_pieces(vocab: int = 40) -> bytes:
    """A SentencePiece model, as a file."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=made, vocab_size=vocab, hard_vocab_limit=False, minloglevel=2
    )
    return made.getvalue()


def tokens_of(pieces: bytes) -> list[str]:
    loaded = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    return [loaded.id_to_piece(number) for number in range(3, loaded.get_piece_size())]


def noise(generator: np.random.Generator, *shape: int) -> Any:
    return (generator.standard_normal(shape) * shape[0] ** -0.5 * 1.5).astype(np.float32)


def marian_arrays(vocab: int, settings: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Random weights by Marian's names; norms and biases are random too."""
    dice, pre = np.random.default_rng(seed), "n" in settings["transformer-preprocess"]
    found: dict[str, Any] = {}
    if settings.get("tied-embeddings-all"):
        found["Wemb"] = noise(dice, vocab, WIDTH) * 2
    else:
        found |= {"encoder_Wemb": noise(dice, vocab, WIDTH) * 3, "decoder_Wemb": noise(dice, vocab + 2, WIDTH) * 3}
        found["decoder_ff_logit_out_Wt"] = noise(dice, vocab + 2, WIDTH) * 3
    rows = vocab if "Wemb" in found else vocab + 2
    found["decoder_ff_logit_out_b"] = 0.1 * noise(dice, 1, rows)

    def norm(name: str, suffix: str) -> None:
        found[f"{name}_ln_scale{suffix}"] = 1 + 0.3 * noise(dice, 1, WIDTH)
        found[f"{name}_ln_bias{suffix}"] = 0.3 * noise(dice, 1, WIDTH)

    for side in ("encoder", "decoder"):
        for layer in range(1, 3):
            recurrent = side == "decoder" and settings["transformer-decoder-autoreg"] == "rnn"
            if recurrent:
                at = f"{side}_l{layer}_rnn"
                found |= {f"{at}_W": noise(dice, WIDTH, WIDTH) * 2, f"{at}_Wf": noise(dice, WIDTH, WIDTH)}
                found[f"{at}_bf"] = 0.5 * noise(dice, 1, WIDTH)
                norm(f"{at}_ffn", "_pre" if pre else "")
            for part in ("self", "context")[recurrent : 1 + (side == "decoder")]:
                at = f"{side}_l{layer}_{part}"
                for letter in "qkvo":
                    found[f"{at}_W{letter}"] = noise(dice, WIDTH, WIDTH) * (8 if part + letter == "contexto" else 2)
                    found[f"{at}_b{letter}"] = 0.2 * noise(dice, 1, WIDTH)
                norm(f"{at}_Wo", "_pre" if pre else "")
            at = f"{side}_l{layer}_ffn"
            for number, shape in ((1, (WIDTH, HIDDEN)), (2, (HIDDEN, WIDTH))):
                found[f"{at}_W{number}"], found[f"{at}_b{number}"] = noise(dice, *shape), noise(dice, 1, shape[1])
            norm(f"{at}_ffn", "_pre" if pre else "")
        if pre:
            norm(f"{side}_top", "")
        if "n" in settings["transformer-postprocess-emb"]:
            norm(f"{side}_emb", "_pre")
    return found


def quantize_as_intgemm(arrays: dict[str, Any], inputs: dict[str, float]) -> dict[str, Any]:
    """Matrices as pairs of int8 codes and scale, and the scale of what each multiplies, by the name of its matrix."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        scale = 127 / np.abs(array).max()
        matrix = len(array) > 1
        found[name] = (np.rint(array * scale).astype(np.int8), float(scale)) if matrix else array
        if matrix:
            found[f"{name}_QuantMultA"] = np.full((1, 1), inputs[name], np.float32)
    return found


def write_marian(folder: Path, arrays: dict[str, Any], settings: dict[str, Any], kind: str = "npz") -> Path:
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump(settings).encode() + b"\0"
    full = {**arrays, "special:model.yml": np.frombuffer(text, np.int8)}
    path = folder / f"model.{kind}"
    if kind == "npz":
        np.savez(path, **full)
        return path
    codes = {"float32": 0x404, "int8": 0x101}
    names = [name.encode() + b"\0" for name in full]
    values = list[tuple[int, tuple[int, ...], bytes]]()  # type, shape, content
    for name, array in full.items():
        if isinstance(array, tuple):  # for intgemm: transposed, unless of embeddings, with the scale behind
            matrix = array[0] if "Wemb" in name else array[0].T
            content = np.ascontiguousarray(matrix).tobytes() + struct.pack("<f", array[1])
            values.append((0x4101, array[0].shape, content))
        else:
            values.append((codes[array.dtype.name], array.shape, np.ascontiguousarray(array).tobytes()))
    sizes = [-(-len(content) // 256) * 256 for *_, content in values]
    head = struct.pack("<2Q", 1, len(full))
    for name, (code, shape, _), size in zip(names, values, sizes, strict=True):
        head += struct.pack("<4Q", len(name), code, len(shape), size)
    head += b"".join(names) + b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, shape, _ in values)
    padding = -(len(head) + 8) % 256
    body = b"".join(content.ljust(size, b"\0") for (*_, content), size in zip(values, sizes, strict=True))
    path.write_bytes(head + struct.pack("<Q", padding) + bytes(padding) + body)
    return path


def write_shortlist(path: Path, lists: list[list[int]], first: int) -> Path:
    """Marian's binary shortlist: `first` tokens that are always allowed, and a list for each source token."""
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8").tobytes()
    ids = np.array([token for some in lists for token in some], "<u4").tobytes()
    body = struct.pack("<4Q", first, max(map(len, lists)), len(lists) + 1, sum(map(len, lists))) + offsets + ids
    found = 0  # words of 64 bits, combined as Boost does
    for word in struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]):
        found ^= (word + 0x9E3779B9 + (found << 6) + (found >> 2)) % 2**64
    path.write_bytes(struct.pack("<2Q", 0xF11A48D5013417F5, found) + body)
    return path


def write_vocabulary(folder: Path, names: list[str]) -> None:
    """Marian's YAML: a token that YAML would read as something else is quoted."""
    quoted = [f'"{name}"' if name in ('"', ",", "#", "-", "a") else name for name in names]
    lines = [f"{token}: {number}" for number, token in enumerate(quoted)]
    (folder / "vocab.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def fairseq_options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        arch="transformer_iwslt_de_en",
        task="translation",
        source_lang="de",
        target_lang="en",
        encoder_embed_dim=WIDTH,
        encoder_ffn_embed_dim=HIDDEN,
        encoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_embed_dim=WIDTH,
        decoder_ffn_embed_dim=HIDDEN,
        decoder_layers=2,
        decoder_attention_heads=HEADS,
        lr=[0.0005],
        **more,
    )


def fairseq_weights(rows: int, options: argparse.Namespace, seed: int = 0) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    before, learned = (
        getattr(options, "encoder_normalize_before", False),
        getattr(options, "encoder_learned_pos", False),
    )

    def draw(*shape: int, scale: float = 1.5) -> torch.Tensor:
        return torch.randn(shape, generator=dice) * shape[-1] ** -0.5 * scale

    found: dict[str, torch.Tensor] = {}
    norms = ["layernorm_embedding"] if getattr(options, "layernorm_embedding", False) else []
    norms += ["layer_norm"] if before else []
    for side in ("encoder", "decoder"):
        found[f"{side}.embed_tokens.weight"] = draw(rows, WIDTH, scale=3)
        if learned:
            found[f"{side}.embed_positions.weight"] = draw(34, WIDTH)
        else:
            found[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        found[f"{side}.version"] = torch.tensor([3.0])
        names = list(norms)
        for layer in range(2):
            at = f"{side}.layers.{layer}"
            for part in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                for letter in ("q", "k", "v", "out"):
                    found[f"{at}.{part}.{letter}_proj.weight"] = draw(WIDTH, WIDTH, scale=2)
                    found[f"{at}.{part}.{letter}_proj.bias"] = draw(WIDTH)
                names.append(f"layers.{layer}.{part}_layer_norm")
            names.append(f"layers.{layer}.final_layer_norm")
            for name, shape in (("fc1", (HIDDEN, WIDTH)), ("fc2", (WIDTH, HIDDEN))):
                found[f"{at}.{name}.weight"], found[f"{at}.{name}.bias"] = draw(*shape), draw(shape[0])
        for name in names:
            found[f"{side}.{name}.weight"], found[f"{side}.{name}.bias"] = 1 + draw(WIDTH), draw(WIDTH)
    if getattr(options, "share_all_embeddings", False):
        found["decoder.embed_tokens.weight"] = found["encoder.embed_tokens.weight"]
        found["decoder.output_projection.weight"] = found["encoder.embed_tokens.weight"]
    else:
        found["decoder.output_projection.weight"] = draw(rows, WIDTH, scale=3)
    return found
