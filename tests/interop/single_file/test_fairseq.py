"""fairseq checkpoints, imported: the numbers of transformers' FSMT (its port of fairseq's Transformer) and M2M-100, old
names, and files that would run code."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers

import allyouneed as ayn
import parity
import translation_files as files
from allyouneed.errors import UserError
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.interop.load import load
from bounded import load_within_bounds

ROWS = 20
SOURCE, TARGET = [[5, 9, 12, 7, 4, 2]], [[2, 8, 4, 10]]
SIZES = dict(
    d_model=files.WIDTH,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=files.HIDDEN,
    decoder_ffn_dim=files.HIDDEN,
    encoder_attention_heads=files.HEADS,
    decoder_attention_heads=files.HEADS,
    max_position_embeddings=32,
)


def write(
    folder: Path, options: argparse.Namespace | dict[str, Any], weights: dict[str, Any], name: str = "args"
) -> Path:
    folder.mkdir(exist_ok=True)
    state = {name: options, "model": weights, "optimizer_history": [{"num_updates": 7}], "extra_state": {"epoch": 1}}
    torch.save(state, folder / "checkpoint_best.pt")
    return folder / "checkpoint_best.pt"


def fsmt(weights: dict[str, torch.Tensor]) -> Any:
    config = transformers.FSMTConfig(
        langs=["de", "en"],
        src_vocab_size=ROWS,
        tgt_vocab_size=ROWS,
        activation_function="relu",
        scale_embedding=True,
        tie_word_embeddings=False,
        **SIZES,
    )
    theirs = transformers.FSMTForConditionalGeneration(config).eval()
    theirs.model.decoder.output_projection = torch.nn.Linear(files.WIDTH, ROWS, bias=False)  # which it would tie
    named = {f"model.{name}": tensor for name, tensor in weights.items() if "version" not in name}
    missing, extra = theirs.load_state_dict(named, strict=False)
    assert all("embed_positions" in name for name in (*missing, *extra)), (missing, extra)
    return theirs(input_ids=torch.tensor(SOURCE), decoder_input_ids=torch.tensor(TARGET), use_cache=False).logits


def m2m(weights: dict[str, torch.Tensor]) -> Any:
    config = transformers.M2M100Config(vocab_size=ROWS, scale_embedding=True, activation_function="gelu", **SIZES)
    theirs = transformers.M2M100ForConditionalGeneration(config).eval()
    named = {f"model.{name}": tensor for name, tensor in weights.items() if "version" not in name}
    named |= {
        "model.shared.weight": weights["encoder.embed_tokens.weight"],
        "lm_head.weight": weights["encoder.embed_tokens.weight"],
    }
    missing, extra = theirs.load_state_dict(named, strict=False)
    assert all("embed_positions" in name or "output_projection" in name for name in (*missing, *extra)), (
        missing,
        extra,
    )
    return theirs(input_ids=torch.tensor(SOURCE), decoder_input_ids=torch.tensor(TARGET), use_cache=False).logits


def bart(weights: dict[str, torch.Tensor]) -> Any:
    config = transformers.BartConfig(vocab_size=ROWS, scale_embedding=False, activation_function="gelu", **SIZES)
    theirs = transformers.BartForConditionalGeneration(config).eval()
    named = {f"model.{name}": tensor for name, tensor in weights.items() if "version" not in name}
    named |= {
        "model.shared.weight": weights["encoder.embed_tokens.weight"],
        "lm_head.weight": weights["encoder.embed_tokens.weight"],
    }
    missing, extra = theirs.load_state_dict(named, strict=False)
    assert all(name in ("final_logits_bias", "model.decoder.output_projection.weight") for name in (*missing, *extra))
    return theirs(input_ids=torch.tensor(SOURCE), decoder_input_ids=torch.tensor(TARGET), use_cache=False).logits


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "post-norm, nothing shared": (fsmt, {}),
    "pre-norm, shared, gelu": (
        m2m,
        dict(
            encoder_normalize_before=True,
            decoder_normalize_before=True,
            share_all_embeddings=True,
            activation_fn="gelu",
        ),
    ),
    "BART": (
        bart,
        dict(
            encoder_learned_pos=True,
            decoder_learned_pos=True,
            layernorm_embedding=True,
            share_all_embeddings=True,
            no_scale_embedding=True,
            activation_fn="gelu",
            max_source_positions=32,
            max_target_positions=32,
        ),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, more = CASES[name]
    options = files.fairseq_options(**more)
    weights = files.fairseq_weights(ROWS, options)
    expected = reference(weights)
    nested = {"model": vars(options) | {"_name": options.arch}, "task": {"_name": "translation", "source_lang": "de"}}
    for number, (kind, given) in enumerate((("args", options), ("cfg", nested))):  # old and new versions
        folder = load(write(tmp_path / str(number), given, weights, kind))
        found = NamedForward(folder.model).logits({"tokens": SOURCE, "targets": TARGET})
        assert parity.difference(found, expected) < parity.TOLERANCE and expected.std() > 0.3


def test_names_of_old_versions_are_understood(tmp_path: Path) -> None:
    options = files.fairseq_options()
    weights = files.fairseq_weights(ROWS, options)
    new = load(write(tmp_path / "new", options, weights))
    old: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        side = name.split(".")[0]
        norms = {"self_attn_layer_norm": 0, "encoder_attn_layer_norm": 1, "final_layer_norm": 1 + (side == "decoder")}
        for norm, number in norms.items():
            name = name.replace(f".{norm}.", f".layer_norms.{number}.")
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            old[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            old[name.replace("decoder.output_projection.weight", "decoder.embed_out")] = tensor
    path = tmp_path / "old" / "model.pt"
    path.parent.mkdir()
    torch.save({"args": options, "model": old}, path, _use_new_zipfile_serialization=False)
    again = load(path)
    for (name, one), (_, other) in zip(new.model.state_dict().items(), again.model.state_dict().items(), strict=True):
        assert one.equal(other), name


def test_texts_with_sentencepiece_and_with_merges(tmp_path: Path) -> None:
    pieces = files.train_pieces()
    words = files.tokens_of(pieces)
    options = files.fairseq_options()
    folder = write(tmp_path / "spm", options, files.fairseq_weights(len(words) + 4, options)).parent
    for language in ("de", "en"):
        (folder / f"dict.{language}.txt").write_text("".join(f"{word} 9\n" for word in words), encoding="utf-8")
    (folder / "sentencepiece.bpe.model").write_bytes(pieces)
    model = ayn.load(folder)
    loaded = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    expected = [words.index(piece) + 4 for piece in loaded.encode("the cat sat", out_type=str)]
    vocabs = load(folder).tokenizers
    assert vocabs.source.encode("the cat sat") == expected and vocabs.source.source_affixes == ((), (2,))
    assert isinstance(model.translate("the cat sat", max_length=8), str)
    (folder / "sentencepiece.bpe.model").unlink()
    names = ["th@@", "e", "c@@", "at", "s@@", "t@@", "h@@", "a@@"]
    for language in ("de", "en"):
        (folder / f"dict.{language}.txt").write_text("".join(f"{word} 9\n" for word in names))
    (folder / "bpecodes").write_text("#version: 0.2\nt h\na t</w>\n")
    vocabs = load(folder).tokenizers
    ids = vocabs.source.encode("the cat sat xx")
    assert vocabs.source.tokens(ids[:6]) == ["th", "e</w>", "c", "at</w>", "s", "at</w>"]
    assert ids == [4, 5, 6, 7, 8, 7, 3, 3] and vocabs.target.decode(ids[:6]) == "the cat sat"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arch": "transformer_lm_gpt"}, "arch: 'transformer_lm_gpt' is not supported"),
        ({"task": "translation_multi_simple_epoch"}, "task: 'translation_multi_simple_epoch'"),
        ({"adaptive_softmax_cutoff": "100,200"}, "adaptive_softmax_cutoff: '100,200' is not supported"),
        ({"decoder_embed_dim": 12}, "decoder_embed_dim: 12 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    options = files.fairseq_options()
    weights = files.fairseq_weights(ROWS, options)
    with pytest.raises(UserError, match=told):
        load(write(tmp_path / "model", argparse.Namespace(**vars(options) | change), weights))


LARGER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row, 15 million times": lambda one: one[:1].expand(15_000_000, -1),
    "one number, a billion times": lambda one: one[:1, :1].expand(1_000_000_000, files.WIDTH),
    "rows that overlap": lambda one: torch.zeros(100_000).as_strided((99_000, 1000), (1, 1)),
}


@pytest.mark.parametrize("how", LARGER)
@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "encoder.version"])
def test_a_tensor_larger_than_what_is_stored_is_refused(how: str, name: str, tmp_path: Path) -> None:
    options = files.fairseq_options()
    weights = files.fairseq_weights(ROWS, options)
    weights[name] = LARGER[how](weights["encoder.embed_tokens.weight"])
    path = write(tmp_path / "model", options, weights)
    assert path.stat().st_size < 1_000_000
    assert load_within_bounds(path) == f"{path}: {name} declares more bytes than are stored"


def test_weights_of_which_little_is_stored_are_refused(tmp_path: Path) -> None:
    options, stored = files.fairseq_options(), torch.zeros(10_000)
    weights = files.fairseq_weights(ROWS, options) | {f"encoder.layers.{n}.x.weight": stored for n in range(1000)}
    assert "bytes of weights are made of" in load_within_bounds(write(tmp_path / "model", options, weights))


class Runs:
    def __reduce__(self) -> Any:
        return print, ("a pickle that runs",)


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, bad in enumerate(({"args": Runs(), "model": {}}, {"args": argparse.Namespace(a=Runs()), "model": {}})):
        path = tmp_path / f"{number}.pt"
        torch.save(bad, path)
        with pytest.raises(UserError, match="cannot be read as weights"):
            load(path)
        torch.save(bad, path, _use_new_zipfile_serialization=False)
        with pytest.raises(UserError, match="cannot be read as weights"):
            load(path)
    assert "runs" not in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "2.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"0" * 10_000)
    with pytest.raises(UserError, match="compressed"):
        load(tmp_path / "2.pt")
