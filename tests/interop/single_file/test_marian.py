"""Marian's model files, imported: the numbers of its own formulas, the texts of CTranslate2's converter."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import sentencepiece
import torch
from torch import Tensor

import allyouneed as ayn
import translation_files as files
from allyouneed.cli import main
from allyouneed.errors import UserError
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.interop.load import load
from allyouneed.kernels.cpu.build import native_library
from allyouneed.nn.linear.int8 import Int8Linear
from allyouneed.runtime.cpu.executor import CpuExecutor

PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
CASES: dict[str, dict[str, Any]] = {
    "as OPUS-MT": {},
    "pre-norm, relu, normed embeddings": PRE
    | {"transformer-ffn-activation": "relu", "transformer-postprocess-emb": "nd"},
    "two vocabularies, gelu": {"tied-embeddings-all": False, "transformer-ffn-activation": "gelu"},
    "SSRU in the decoder": {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"},
    "one decoder layer twice": {"transformer-tied-layers": [1, 1]},
}
SOURCES, TARGETS = [[5, 9, 12, 7, 1], [6, 1]], [[8, 4, 10], [11, 7, 6]]


Times = Callable[[Tensor, str, Tensor], Tensor]


def oracle(
    arrays: dict[str, Any],
    settings: dict[str, Any],
    source: list[int],
    target: list[int],
    times: Times = lambda x, name, weight: x @ weight,
) -> Tensor:
    """src/models/transformer.h of marian-dev, written out for one sentence: (len(target) + 1, vocabulary). `times`
    multiplies with a matrix."""
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    pre, width, heads = "n" in settings["transformer-preprocess"], files.WIDTH, files.HEADS
    act = {"swish": lambda x: x * x.sigmoid(), "relu": torch.relu, "gelu": lambda x: x * (1.702 * x).sigmoid()}

    def linear(x: Tensor, name: str) -> Tensor:
        return times(x, name, weights[name])

    def norm(x: Tensor, name: str, suffix: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * weights[f"{name}_ln_scale{suffix}"] + weights[f"{name}_ln_bias{suffix}"]

    def embed(side: str, ids: list[int], start: bool) -> Tensor:
        table = weights.get("Wemb", weights.get(f"{side}_Wemb"))
        assert table is not None
        x = table[ids] * width**0.5
        x = torch.cat([torch.zeros(1, width), x]) if start else x  # the first input is a vector of zeros
        steps, scales = torch.arange(len(x)), width // 2
        angles = steps[:, None] * torch.exp(torch.arange(scales) * -np.log(10000.0) / (scales - 1))
        x = x + torch.cat([angles.sin(), angles.cos()], 1).float()
        return norm(x, f"{side}_emb", "_pre") if "n" in settings["transformer-postprocess-emb"] else x

    def sublayer(x: Tensor, name: str, fn: Any) -> Tensor:
        y = x + fn(norm(x, name, "_pre") if pre else x)
        return y if pre else norm(y, name, "")

    def attend(x: Tensor, at: str, memory: Tensor | None, causal: bool) -> Tensor:
        given = x if memory is None else memory
        q, k, v = (
            (linear(y, f"{at}_W{n}") + weights[f"{at}_b{n}"]).unflatten(-1, (heads, -1)).transpose(0, 1)
            for n, y in (("q", x), ("k", given), ("v", given))
        )
        scores = q @ k.transpose(1, 2) / (width // heads) ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -99999999.0)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return linear(mixed, f"{at}_Wo") + weights[f"{at}_bo"]

    def recur(x: Tensor, at: str) -> Tensor:
        forget, value = (linear(x, f"{at}_Wf") + weights[f"{at}_bf"]).sigmoid(), linear(x, f"{at}_W")
        cell, found = torch.zeros(width), []
        for f, v in zip(forget, value, strict=True):
            cell = f * cell + (1 - f) * v
            found.append(cell.relu())
        return torch.stack(found)

    def stack(x: Tensor, side: str, memory: Tensor | None) -> Tensor:
        for layer in settings.get("transformer-tied-layers", [1, 2]) if side == "decoder" else [1, 2]:
            at = f"{side}_l{layer}"
            if side == "decoder" and settings["transformer-decoder-autoreg"] == "rnn":
                x = sublayer(x, f"{at}_rnn_ffn", lambda y: recur(y, f"{at}_rnn"))  # noqa: B023
            else:
                x = sublayer(x, f"{at}_self_Wo", lambda y: attend(y, f"{at}_self", None, side == "decoder"))  # noqa: B023
            if memory is not None:
                x = sublayer(x, f"{at}_context_Wo", lambda y: attend(y, f"{at}_context", memory, False))  # noqa: B023
            f = act[settings["transformer-ffn-activation"]]
            up, down, biases = f"{at}_ffn_W1", f"{at}_ffn_W2", [weights[f"{at}_ffn_b{n}"] for n in (1, 2)]
            x = sublayer(x, f"{at}_ffn_ffn", lambda y: linear(f(linear(y, up) + biases[0]), down) + biases[1])  # noqa: B023
        return norm(x, f"{side}_top", "") if pre else x

    memory = stack(embed("encoder", source, False), "encoder", None)
    out = "decoder_ff_logit_out_Wt" if "decoder_ff_logit_out_Wt" in weights else "Wemb"
    hidden = stack(embed("decoder", target, True), "decoder", memory)
    return times(hidden, out, weights[out].T) + weights["decoder_ff_logit_out_b"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["npz", "bin"])
def test_the_numbers_of_marians_formulas(name: str, kind: str, tmp_path: Path) -> None:
    settings = files.ORDINARY | CASES[name]
    arrays = files.marian_arrays(20, settings)
    path = files.write_marian(tmp_path / "model", arrays, settings, kind)
    folder = load(path)
    start = folder.model.config.vocabs.target - 1
    for source, target in zip(SOURCES, TARGETS, strict=True):
        expected = oracle(arrays, settings, source, target)
        found = NamedForward(folder.model).logits({"tokens": [source], "targets": [[start, *target]]})[0]
        assert torch.allclose(found[:, :-1], expected, rtol=1e-5, atol=1e-5) and expected.std() > 0.3
        assert found[:, -1].max() < -1e3  # the start token is never generated
    assert "no vocabulary" in folder.notes[0]


RECURRENT = files.ORDINARY | CASES["SSRU in the decoder"] | {"transformer-ffn-activation": "relu"}
INPUTS: dict[str, float] = defaultdict(lambda: 25.0) | {"Wemb": 31.0}  # scales of what a matrix multiplies


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """A folder as Bergamot and Firefox release them."""
    pieces = files.train_pieces()
    names = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    arrays = files.quantize_as_intgemm(files.marian_arrays(names.get_piece_size(), RECURRENT, seed=6), INPUTS)
    folder = tmp_path / "student"
    files.write_marian(folder, arrays, RECURRENT, "bin").rename(folder / "model.deen.intgemm.alphas.bin")
    (folder / "vocab.deen.spm").write_bytes(pieces)
    lines = ["vocabs: [vocab.deen.spm, vocab.deen.spm]", "beam-size: 1", "normalize: 1.0", "relative-paths: true"]
    (folder / "config.intgemm8bitalpha.yml").write_text("\n".join(lines))
    return folder


def test_int8_students_compute_in_integers_as_marian_does(tmp_path: Path) -> None:
    """Codes, scales and rounding are those of the file; sums of integers are exact."""
    arrays = files.marian_arrays(40, RECURRENT)
    quantized = files.quantize_as_intgemm(arrays, INPUTS)
    nearest = 1.0  # distance to a number that could be rounded either way

    def times(x: Tensor, name: str, weight: Tensor) -> Tensor:
        nonlocal nearest
        codes, scale = torch.from_numpy(quantized[name][0]).double(), quantized[name][1]
        exact = x * INPUTS[name]
        nearest = min(nearest, float(((exact % 1) - 0.5).abs().min()))
        whole = exact.round().clamp(-127, 127).double()
        return (whole @ (codes.T if name == "Wemb" else codes) / (scale * INPUTS[name])).float()

    restored = {name: np.float32(array[0] / array[1]) if isinstance(array, tuple) else array
                for name, array in quantized.items()}  # fmt: skip
    folder = load(files.write_marian(tmp_path / "model", quantized, RECURRENT, "bin"))
    start = folder.model.config.vocabs.target - 1
    for source, target in zip(SOURCES, TARGETS, strict=True):
        expected = oracle(restored, RECURRENT, source, target, times)
        found = NamedForward(folder.model).logits({"tokens": [source], "targets": [[start, *target]]})[0]
        assert torch.allclose(found[:, :-1], expected, rtol=1e-5, atol=1e-5) and expected.std() > 0.3
    assert nearest > 1e-5  # so that no rounding depends on the last bits of a float
    linear = [part for part in folder.model.modules() if isinstance(part, Int8Linear)]
    assert all(part.input_scale is not None for part in linear)
    # saved and loaded, and run by the interpreter of CPUs
    folder.save(tmp_path / "ours")
    again = load(tmp_path / "ours")
    inputs = {"tokens": SOURCES[:1], "targets": [[start, *TARGETS[0]]]}
    assert torch.equal(*(NamedForward(one.model).logits(inputs)[0] for one in (folder, again)))


def test_a_students_folder_translates_as_its_config_says(student: Path, tmp_path: Path) -> None:
    model = ayn.load(student)
    assert model.folder.directions == [("de", "en")]
    assert model.folder.decoding == {"beam": 1, "penalty": "power", "length_penalty": 1.0}
    found = model.translate(files.TEXTS[:4], max_length=12)
    plain = CpuExecutor(model.model, native) if (native := native_library()) is not None else None
    assert plain is None or plain.encoder is not None  # no part of it is called in torch
    assert len(set(found)) > 1
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(student), str(tmp_path / "ours")])
    assert not stopped.value.code and ayn.load(tmp_path / "ours").translate(files.TEXTS[:4], max_length=12) == found


def test_a_student_may_have_a_vocabulary_for_each_side(student: Path) -> None:
    found = ayn.load(student).translate(files.TEXTS[:4], max_length=12)
    pieces = (student / "vocab.deen.spm").read_bytes()
    for name in ("vocab.deen.spm", "config.intgemm8bitalpha.yml"):
        (student / name).unlink()
    for name in ("srcvocab.deen.spm", "trgvocab.deen.spm"):
        (student / name).write_bytes(pieces)
    assert ayn.load(student).translate(files.TEXTS[:4], max_length=12, beam=1) == found


def test_merged_maps_with_several_input_scales_round_each_token_by_itself(tmp_path: Path) -> None:
    arrays = files.quantize_as_intgemm(files.marian_arrays(20, RECURRENT), INPUTS)
    arrays["encoder_l1_self_Wk_QuantMultA"] = np.full((1, 1), 19, np.float32)
    folder = load(files.write_marian(tmp_path / "model", arrays, RECURRENT, "bin"))
    without = [name for name, part in folder.model.named_modules() if getattr(part, "input_scale", 0) is None]
    assert without == ["encoder.blocks.0.sublayers.mixer.qkv"]
    assert any("encoder.blocks.0.sublayers.mixer.qkv" in note for note in folder.notes)


def test_a_matrix_of_floats_among_those_in_int8_keeps_its_values(tmp_path: Path) -> None:
    """Queries, keys and values are one map of ours."""
    arrays = files.marian_arrays(20, RECURRENT)
    quantized = files.quantize_as_intgemm(arrays, INPUTS)
    quantized["encoder_l1_self_Wk"] = arrays["encoder_l1_self_Wk"]
    folder = load(files.write_marian(tmp_path / "model", quantized, RECURRENT, "bin"))
    found = folder.model.get_submodule("encoder.blocks.0.sublayers.mixer.qkv").weight[files.WIDTH : 2 * files.WIDTH]
    wanted = torch.from_numpy(arrays["encoder_l1_self_Wk"]).T
    assert torch.allclose(found, wanted, rtol=0, atol=float(wanted.abs().max()) / 127)  # type: ignore[arg-type]


def test_scales_that_are_none_are_refused(tmp_path: Path) -> None:
    arrays = files.quantize_as_intgemm(files.marian_arrays(20, RECURRENT), INPUTS)
    for name, wrong in (("Wemb", 0.0), ("encoder_l1_ffn_W1", float("nan")), ("encoder_l1_ffn_W1", float("inf"))):
        path = files.write_marian(tmp_path / "m", arrays | {name: (arrays[name][0], wrong)}, RECURRENT, "bin")
        with pytest.raises(UserError, match=f"{name}: a scale of"):
            load(path)
    arrays["encoder_l1_ffn_W1_QuantMultA"] = np.full((1, 1), np.nan, np.float32)
    with pytest.raises(UserError, match="not a scale: encoder_l1_ffn_W1_QuantMultA: nan"):
        load(files.write_marian(tmp_path / "m", arrays, RECURRENT, "bin"))


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A folder as OPUS-MT releases them."""
    pieces = files.train_pieces()
    names = ["</s>", "<unk>", *files.tokens_of(pieces)]
    folder = tmp_path / "opus"
    files.write_marian(folder, files.marian_arrays(len(names), files.ORDINARY), files.ORDINARY)
    (folder / "model.npz").rename(folder / "opus.npz")
    files.write_vocabulary(folder, names)
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(pieces)
    (folder / "decoder.yml").write_text("models:\n  - opus.npz\nvocabs: [vocab.yml, vocab.yml]\nbeam-size: 6\n")
    return folder


def test_a_released_folder_translates_and_goes_to_ctranslate2_and_back(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ayn.load(released)
    options = {"beam": 2, "max_length": 12}
    expected = model.translate(files.TEXTS[:3], **options)
    assert len(set(expected)) > 1
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(released), str(tmp_path / "out"), "--to", "ctranslate2"])
    assert not stopped.value.code and "the same 5 of 5 times" in capsys.readouterr().out
    assert ayn.load(tmp_path / "out").translate(files.TEXTS[:3], **options) == expected
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(released), str(tmp_path / "ours")])
    assert not stopped.value.code and ayn.load(tmp_path / "ours").translate(files.TEXTS[:3], **options) == expected
    with pytest.raises(SystemExit) as stopped:
        main(["describe", str(released)])
    assert not stopped.value.code and "encoder-decoder" in capsys.readouterr().out


def test_a_folder_of_ctranslate2s_converter(released: Path, tmp_path: Path) -> None:
    """Another project's converter made it: the start is a zero vector, the tokenizer two SentencePiece models."""
    converter = ctranslate2.converters.MarianConverter(str(released / "opus.npz"), [str(released / "vocab.yml")] * 2)
    converter.convert(str(tmp_path / "out"))
    theirs = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["add_source_eos"]
    notes = load(tmp_path / "out").notes
    assert "no subword file" in notes[0]  # ids only, until they are there
    for side in ("source", "target"):
        (tmp_path / "out" / f"{side}.spm").write_bytes((released / "source.spm").read_bytes())
    model = ayn.load(tmp_path / "out")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(released / "source.spm"))
    ours = model.translate(files.TEXTS[:5], beam=3, penalty="power", length_penalty=1.0, early=True, max_length=12)
    found = theirs.translate_batch(pieces.encode(files.TEXTS[:5], out_type=str), beam_size=3, max_decoding_length=12)
    assert ours == [pieces.decode(result.hypotheses[0]) for result in found]
    assert len(set(ours)) > 1
    quantized = ctranslate2.converters.MarianConverter(str(released / "opus.npz"), [str(released / "vocab.yml")] * 2)
    quantized.convert(str(tmp_path / "int8"), quantization="int8")
    narrow, wide = load(tmp_path / "int8"), ctranslate2.Translator(str(tmp_path / "int8"), compute_type="float32")
    assert any("quantized" in note for note in narrow.notes)
    rows, start = [[5, 9, 12, 7, 0]], narrow.model.config.vocabs.target - 1
    names = load(released).tokenizers.target.tokens
    scores = wide.score_batch([names(rows[0][:-1])], [names([6, 7, 8])])[0].log_probs
    logits = NamedForward(narrow.model).logits({"tokens": rows, "targets": [[start, 6, 7, 8]]})[0].log_softmax(-1)
    assert torch.allclose(logits[range(4), [6, 7, 8, 0]], torch.tensor(scores), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"transformer-decoder-autoreg": "average-attention"},
            "transformer-decoder-autoreg: 'average-attention' is not",
        ),
        ({"transformer-decoder-autoreg": "rnn", "dec-cell": "gru"}, "dec-cell: 'gru' is not supported"),
        ({"type": "s2s"}, "type: 's2s' is not supported"),
        ({"transformer-postprocess": "dhn"}, "transformer-postprocess: 'dhn', transformer-postprocess-top"),
        ({"new-option": 3}, "new-option: 3 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    arrays = files.marian_arrays(20, files.ORDINARY)
    path = files.write_marian(tmp_path / "model", arrays, files.ORDINARY | change)
    with pytest.raises(UserError, match=told):
        load(path)


def test_arrays_of_the_other_byte_order_are_read_and_long_doubles_refused(tmp_path: Path) -> None:
    arrays = files.marian_arrays(20, files.ORDINARY)
    usual = load(files.write_marian(tmp_path / "usual", arrays, files.ORDINARY, "npz")).model
    turned = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    found = load(files.write_marian(tmp_path / "turned", turned, files.ORDINARY, "npz")).model
    assert all(tensor.equal(found.state_dict()[name]) for name, tensor in usual.state_dict().items())
    for dtype, told in ((np.longdouble, "float128"), (np.complex64, "complex64"), (np.bool_, "bool")):
        wrong = arrays | {"Wemb": arrays["Wemb"].astype(dtype)}
        path = files.write_marian(tmp_path / told, wrong, files.ORDINARY, "npz")
        with pytest.raises(UserError, match=rf"model\.npz: .*Wemb\.npy: an array of {told} is not supported"):
            load(path)


@pytest.mark.parametrize("kind", ["npz", "bin", "int8"])
def test_damaged_files_are_one_message(kind: str, tmp_path: Path) -> None:
    arrays, kind, int8 = files.marian_arrays(20, files.ORDINARY), kind.replace("int8", "bin"), kind == "int8"
    arrays = files.quantize_as_intgemm(arrays, INPUTS) if int8 else arrays
    path = files.write_marian(tmp_path / "model", arrays, files.ORDINARY, kind)
    whole = path.read_bytes()
    for keep in (9, 40, 400, 5000, len(whole) - 300):
        path.write_bytes(whole[:keep])
        with pytest.raises(UserError, match=r"model\.(npz|bin): "):
            load(path)
    if kind == "bin":
        path.write_bytes(whole[:8] + (1 << 60).to_bytes(8, "little") + whole[16:])
        with pytest.raises(UserError, match="arrays"):
            load(path)
