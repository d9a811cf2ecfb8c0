"""Models of Marian (Junczys-Dowmunt et al. 2018) as it stores them: `model.npz` or `model.bin`, a vocabulary per side,
and SentencePiece models or merges beside them.

Positions are those of Marian itself, tensor2tensor's sinusoids from 0; its norms add 1e-6 (src/layers/generic.h). The
first decoder input is a vector of zeros, here a token whose vector is zero.

Models of Bergamot and Firefox are small ones of this kind (Kim et al. 2019): decoders with SSRU instead of attention,
int8 matrices, and a scale for what each of them multiplies (`…_QuantMultA`). They stay in int8, code for code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from allyouneed.data.tokenizers.bounds import MAX_BYTES, most_ids
from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, has_file, parse_yaml, read_text
from allyouneed.folder import Folder
from allyouneed.interop.heads import config_of
from allyouneed.interop.hf.checkpoint import plain_tensors
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.weight_table import Family
from allyouneed.interop.malformed import malformed
from allyouneed.interop.single_file import marian_shortlist
from allyouneed.interop.single_file.marian_archive import FLOATS, Int8Array, model_settings, read_arrays
from allyouneed.interop.tokenizers import subword_files, vocab_files
from allyouneed.interop.tokenizers.sentencepiece import SentencePieceModel
from allyouneed.interop.tokenizers.subword_files import NEVER, Roles
from allyouneed.nn.linear.int8 import Int8Linear, Int8Weight
from allyouneed.nn.models.precision import to_int8

EPS = 1e-6
BERGAMOT_EPS = 1e-9  # of the fork that runs int8 files (browsermt/marian-dev, expression_operators.h)
MAX_LAYERS, MAX_BEAM = 1000, 64
ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "quick-gelu"}
START, EOS, UNK = "<start>", "</s>", "<unk>"
SCALE, UNNAMED = "_QuantMultA", "none"  # UNNAMED: written by mistake, a copy of the scale of the output
OUTPUTS = ("decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W", "decoder_Wemb", "Wemb")
# of other model types, of training, or repeated in the names of the arrays
IGNORED_KEYS = (
    "bert-*", "char-*", "comet-*", "dec-cell-*", "dim-rnn", "dropout-*", "embedding-*", "enc-cell*", "enc-type",
    "factors-*", "hidden-bias-decay", "layer-normalization", "dec-cell", "output-approx-knn", "skip",
    "tied-embeddings*",
    "transformer-aan-*", "transformer-depth-scaling", "transformer-dim-aan", "transformer-dropout*",
    "transformer-flat*", "transformer-guided-alignment-layer", "transformer-rnn-projection", "transformer-train-*",
    "ulr-*", "unlikelihood-*", "version", "vocabs", "separator-symbol", "max-length",
)  # fmt: skip
AUTOREGRESSIONS = {"self-attention": "attention", "rnn": "ssru"}
WIRINGS = {
    ("", "an", ""): ("post-norm", None),
    ("n", "a", "n"): ("pre-norm", True),
    ("n", "a", ""): ("pre-norm", False),
}


def read(path: Path, tokenizer: Path | None = None) -> Folder:
    """`path`: the model file. `tokenizer`: a subword file, by default the one beside it."""
    arrays = read_arrays(path)
    settings = model_settings(arrays, path)
    arrays = {name: array for name, array in arrays.items() if not name.startswith("special:")}
    try:
        with malformed("not a valid Marian model"):
            arrays, scales = split_scales(arrays)
            weights = {name: _tensor(array) for name, array in arrays.items()}
            is_int8 = any(isinstance(array, Int8Array) for array in arrays.values())
            settings |= {"eps": BERGAMOT_EPS if is_int8 else EPS}
            config, renamed = prepare(settings, weights)
            model = FAMILY.convert(config, plain_tensors(renamed, path))
            unlike = to_int8_as_stored(model, settings, arrays, scales) if is_int8 else []
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    sizes: Any = config_of(model).vocabs
    start = sizes.target - 1
    sides = read_vocabularies(path, settings)
    vocabs, notes = None, [f"{path}: no vocabulary beside it, so it takes token ids, not texts"]
    if sides is not None:
        source = {name: number for name, number in sides[0].items() if number < sizes.source}
        target = {name: number for name, number in sides[1].items() if number < start}
        missing = [name for name in (EOS, UNK) if name not in source or name not in target]
        if missing:
            raise UserError(f"{path}: the vocabulary has no token {missing[0]}")
        roles = Roles(UNK, target[EOS], start, start, after=(source[EOS],), never=(start, target[UNK]))
        vocabs, notes = subword_files.read(path.parent, (source, target | {START: start}), roles, tokenizer)
    folder = Folder(model, vocabs, {"kind": "translation"}, decoding_options(path), max_tokens=512)
    if pair := re.fullmatch(r"model\.([a-z]{2})([a-z]{2})\..*bin", path.name):  # Bergamot's names: model.ende.…
        folder.directions = [(pair[1], pair[2])]
    if unlike:
        notes.append(f"{path}: several scales for one product, so it finds its own: {', '.join(unlike)}")
    if (listed := shortlist_file(path)) is not None:
        rows = sizes.source if "encoder_Wemb" in weights else start
        shared = sides is not None and sides[0] is sides[1]
        folder.shortlist = marian_shortlist.read(listed, (rows, start), shared)
    elif decoder_config(path).get("shortlist"):
        notes.append(f"{path}: every token may be chosen: its shortlist is not a binary one (lex.….bin) beside it")
    folder.path, folder.notes = path, notes
    folder.origin = {"format": "marian", "settings": {key: value for key, value in settings.items() if value}}
    return folder


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Int8Array):
        return torch.from_numpy(array.codes.astype(np.float32)) * (1 / array.scale)
    return torch.from_numpy(array.astype(np.float32) if array.dtype.str in FLOATS[1:] else array)


# --- weights ----------------------------------------------------------------------------------------------------------


def prepare(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
    """One name for each array whatever the options, layers counted from 0, and the start token."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        name = re.sub(r"_l(\d+)_", lambda match: f"_l{int(match[1]) - 1}_", name).removesuffix("_pre")
        name = name.replace("_rnn_ffn_ln", "_self_Wo_ln")  # the norm of an SSRU stands where that of attention does
        found[name] = (
            tensor.squeeze(0) if tensor.dim() == 2 and len(tensor) == 1 and not name.endswith("_Wt") else tensor
        )
    for number, theirs in enumerate(_tied_layers(settings)):  # decoder layers may share weights
        prefix = f"decoder_l{theirs - 1}_"
        copies = {
            f"decoder_l{number}_{name.removeprefix(prefix)}": t for name, t in found.items() if name.startswith(prefix)
        }
        found |= copies
    shared = found.pop("Wemb", None)
    source, target = found.pop("encoder_Wemb", shared), found.pop("decoder_Wemb", shared)
    if source is None or target is None:
        raise UserError("no embeddings (Wemb, or encoder_Wemb and decoder_Wemb)")
    output = found.pop("decoder_ff_logit_out_Wt", None)
    if output is None and "decoder_ff_logit_out_W" in found:
        output = found.pop("decoder_ff_logit_out_W").t()
    bias = found.pop("decoder_ff_logit_out_b", target.new_zeros(len(target)))
    zero = target.new_zeros(1, target.shape[1])
    found |= {"target": torch.cat([target, zero]), "bias": torch.cat([bias, bias.new_full((1,), NEVER)])}
    if source is not target:
        found["source"] = source
    if output is not None:
        found["output"] = torch.cat([output, zero])
    positions = found.get("Wpos")
    names = {
        "tied": output is None,
        "rows": [len(source) + (source is target), len(target) + 1],
        "separate": source is not target,
        "positions": None if positions is None else len(positions),
        "hidden": {side: found[f"{side}_l0_ffn_b1"].numel() for side in ("encoder", "decoder")},
    }
    return {**settings, "arrays": names, "model_type": "marian"}, found


def split_scales(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The weights, and the scale of what each int8 matrix multiplies. Those of `Wemb` may be stored in int8, too."""
    weights = {name: array for name, array in arrays.items() if not name.endswith(SCALE)}
    scales = {
        name.removesuffix(SCALE): float(_tensor(array).flatten()[0])
        for name, array in arrays.items()
        if name.endswith(SCALE) and name != UNNAMED + SCALE
    }
    wrong = [f"{name}{SCALE}: {scale}" for name, scale in scales.items() if not 1e-30 < scale < 1e30]
    if wrong:
        raise UserError(f"not a scale: {', '.join(wrong)}")
    return weights, scales


def to_int8_as_stored(
    model: nn.Module, settings: Mapping[str, Any], arrays: Mapping[str, Any], scales: Mapping[str, float]
) -> list[str]:
    """Quantize the model with the codes and scales of the file. Which of ours they are follows from the table of
    weights: it is read again with a step, or a scale, in the place of each weight. Names of merged maps whose inputs
    have several scales: they quantize each token by its own range."""
    shapes = {name: _tensor(array) for name, array in arrays.items()}

    def spread(numbers: Mapping[str, float]) -> dict[str, Tensor]:
        filled = {name: torch.full_like(tensor, numbers.get(name, 0.0)) for name, tensor in shapes.items()}
        found = dict(FAMILY.convert(*prepare(settings, filled)).named_parameters(remove_duplicate=False))
        return {name: tensor.detach() for name, tensor in found.items() if tensor.dim() == 2}

    quantized = {name: array for name, array in arrays.items() if isinstance(array, Int8Array)}
    steps = spread({name: 1 / array.scale for name, array in quantized.items()})
    known: dict[int, Int8Weight] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name not in steps:
            continue
        step = steps[name][:, 0].clone()
        # without a step: a row of zeros, which is not in the file, or one of floats, merged with those in int8
        if bool(step.any()) and not bool(weight[step == 0].any()):
            codes = (weight.detach() / step.where(step > 0, 1.0)[:, None]).round_().to(torch.int8)
            known[id(weight)] = Int8Weight(codes, step)
    held = list(model.parameters())  # keeps ids unique
    to_int8(model, known=known)
    del held
    output = next((scales[name] for name in OUTPUTS if name in scales), 0.0)
    fixed = {name: tensor[:, 0] for name, tensor in spread(scales).items()}
    fixed["head.product.weight"] = torch.tensor([output])
    unlike = []
    for name, module in model.named_modules():
        found = fixed.get(f"{name}.weight", torch.zeros(1)).unique()
        if isinstance(module, Int8Linear) and len(found) > 1:
            unlike.append(name)
        elif isinstance(module, Int8Linear) and found > 0:
            module.input_scale = found[0]
    return unlike


def _tied_layers(settings: Mapping[str, Any]) -> list[int]:
    tied = settings.get("transformer-tied-layers") or []
    if not isinstance(tied, list) or len(tied) > MAX_LAYERS or not all(type(n) is int and n > 0 for n in tied):
        raise UserError(f"transformer-tied-layers: {tied!r} is not a list of layers")
    return tied


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    arrays = config["arrays"]
    config.require("type", "transformer")
    if config.map_value("transformer-decoder-autoreg", AUTOREGRESSIONS, "self-attention") == "ssru":
        config.require("dec-cell", "ssru")
        config.require("layer-normalization", False)
        config.require("transformer-rnn-projection", False)
    config.require("transformer-attention-mask", "default")
    config.require("transformer-ffn-depth", 2)
    config.require("transformer-decoder-ffn-depth", 2, 0)
    if set(config.get("input-types") or []) > {"sequence"}:
        config.problems.append(f"input-types: {config['input-types']} is not supported (only sequences)")
    config.refuse_set(*OFF)
    for key in ("dim-vocabs", "transformer-dim-ffn", "transformer-decoder-dim-ffn", "transformer-tied-layers"):
        config.get(key)
    width, position_rows = config["dim-emb"], arrays["positions"]
    off = config.get("transformer-disable-position-embeddings", False)
    positions: Tree = {"kind": "sinusoidal", "order": "halves", "closed": True}
    if position_rows is not None:
        positions = {"kind": "learned", "length": position_rows}
    wiring, norm = _wiring(config)
    embed = {
        "positions": {"kind": "none"} if off else positions,
        "scale": "none" if off or position_rows is not None else "sqrt-width",
        "tied": arrays["tied"],
        "norm": norm if set(config.get("transformer-postprocess-emb", "d")) & {"n", "r"} else None,
    }
    source, target = arrays["rows"]
    own = position_rows is not None or embed["norm"] is not None
    return {
        "kind": "encoder-decoder",
        "vocab": {"source": source, "target": target} if arrays["separate"] else target,
        "width": width,
        "norm": norm,
        "embed": embed,
        **({"source_embed": embed} if own else {}),
        **{side: [_layer(config, side, wiring)] for side in ("encoder", "decoder")},
        "head": {"bias": True},
    }


OFF = (
    "transformer-no-projection", "transformer-no-bias", "transformer-no-affine", "transformer-pool", "alibi",
    "transformer-alibi-shift", "transformer-alibi-trainable", "ulr", "right-left", "lemma-dim-emb", "lemma-dependency",
    "input-join-fields", "input-reorder",
)  # fmt: skip


def _wiring(config: ConfigReader) -> tuple[Tree, Tree]:
    """The wiring, and its norm: `n` is a layer norm, `r` an RMS norm, `a` the residual, `d` dropout."""
    keys = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    values = [str(config.get(key, default) or "") for key, default in zip(keys, ("", "dan", ""), strict=True)]
    kind = "rms" if "r" in "".join(values) else "layer"
    before, after, top = (value.replace("d", "").replace("r", "n") for value in values)
    plain = (before, after, top)
    if plain not in WIRINGS or ("n" in "".join(values) and kind == "rms"):
        given = ", ".join(f"{key}: {value!r}" for key, value in zip(keys, values, strict=True))
        config.problems.append(f"{given} is not supported (only post-norm, '' and 'dan', and pre-norm, 'n' and 'da')")
    name, final = WIRINGS.get(plain, ("post-norm", None))
    return {"kind": name} | ({} if final is None else {"final": final}), {"kind": kind, "eps": config["eps"]}


def _layer(config: ConfigReader, side: str, wiring: Tree) -> Tree:
    attention = {"kind": "attention", "heads": config["transformer-heads"]}
    layer = {
        "repeat": config["enc-depth" if side == "encoder" else "dec-depth"],
        "wiring": wiring,
        "mixer": attention,
        "channel": {
            "kind": "ffn",
            "hidden": config["arrays"]["hidden"][side],
            "activation": config.map_value("transformer-ffn-activation", ACTIVATIONS, "swish"),
        },
    }
    if side == "encoder":
        return layer
    kind = config.map_value("transformer-decoder-autoreg", AUTOREGRESSIONS, "self-attention")
    mixer = {"kind": "ssru"} if kind == "ssru" else attention | {"pattern": "causal"}
    return layer | {"mixer": mixer, "cross": attention}


def _lines() -> str:
    lines = [
        "embed.tokens.weight = target", "source_embed.tokens.weight = source", "head.weight = output",
        "head.bias = bias", "embed.positions.weight = Wpos", "source_embed.positions.weight = Wpos",
    ]  # fmt: skip
    for side in ("encoder", "decoder"):
        ours, theirs = f"{side}.blocks.{{n}}", f"{side}_l{{n}}"
        embed = "source_embed" if side == "encoder" else "embed"
        norms = [f"{embed}.norm = {side}_emb_ln", f"{side}.end = {side}_top_ln"]
        attentions = [("mixer", "self")] + ([("cross", "context")] if side == "decoder" else [])
        for number, (part, name) in enumerate(attentions):
            at, inner = f"{theirs}_{name}", f"{ours}.sublayers.{part}"
            for kind, letter, turn in (("weight", "W", " |T"), ("bias", "b", "")):
                q, k, v, out = (f"{at}_{letter}{one}{turn}" for one in "qkvo")
                lines += [f"{inner}.qkv.{kind} = {q} + {k} + {v}", f"{inner}.q.{kind} = {q}"]
                lines += [f"{inner}.kv.{kind} = {k} + {v}", f"{inner}.out.{kind} = {out}"]
            norms.append(f"{ours}.wiring.norms.{number} = {at}_Wo_ln")
        if side == "decoder":
            lines += [f"{ours}.sublayers.mixer.value.weight = {theirs}_rnn_W |T"]
            lines += [f"{ours}.sublayers.mixer.forget.weight = {theirs}_rnn_Wf |T"]
            lines += [f"{ours}.sublayers.mixer.forget.bias = {theirs}_rnn_bf"]
        norms.append(f"{ours}.wiring.norms.{len(attentions)} = {theirs}_ffn_ffn_ln")
        for name, digit in (("up", 1), ("down", 2)):
            lines.append(f"{ours}.sublayers.channel.{name}.weight = {theirs}_ffn_W{digit} |T")
            lines.append(f"{ours}.sublayers.channel.{name}.bias = {theirs}_ffn_b{digit}")
        for norm in norms:
            one, _, other = norm.partition(" = ")
            lines += [f"{one}.weight = {other}_scale", f"{one}.bias = {other}_bias"]
    return "\n".join(lines)


FAMILY = Family("marian", tree, _lines())


# --- vocabularies -----------------------------------------------------------------------------------------------------


def read_vocabularies(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Token -> id of source and target, from the files that decoder.yml names, or that lie beside the model."""
    folder = path.parent
    named = decoder_config(path).get("vocabs") or settings.get("vocabs") or []
    names = [Path(str(name)).name for name in named] if isinstance(named, list) else []
    found = [name for name in names if has_file(folder, name)]
    if not found:
        patterns = ("vocab.*", "*.vocab.yml", "*.vocab.yaml", "*.vocab", "srcvocab.*", "trgvocab.*")
        found = sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
        found = _by_side(found)
    if not found:
        return None
    source = read_vocabulary(file_in(folder, found[0]))
    return source, source if found[-1] == found[0] else read_vocabulary(file_in(folder, found[-1]))


def decoder_config(path: Path) -> Mapping[str, Any]:
    """How the model is meant to be run: decoder.yml, or Bergamot's config.….yml; empty if there is none."""
    folder = path.parent
    others = sorted(file.name for file in folder.glob("config.*.yml") if file.is_file())
    for name in (f"{path.name}.decoder.yml", "decoder.yml", f"{path.name}.yml", "config.yml", *others[:1]):
        if has_file(folder, name):
            try:
                found = parse_yaml(read_text(folder, name))
            except ValueError as error:
                raise UserError(f"{folder / name}: {error}") from None
            if isinstance(found, dict):
                return found
    return {}


def decoding_options(path: Path) -> dict[str, Any]:
    """`beam-size`, and `normalize`: the power of the length that scores are divided by."""
    config = decoder_config(path)
    beam, power = config.get("beam-size"), config.get("normalize", 0)
    found: dict[str, Any] = {}
    if type(beam) is int and 1 <= beam <= MAX_BEAM:
        found["beam"] = beam
        if isinstance(power, int | float) and 0 <= power <= 10:
            found |= {"penalty": "power", "length_penalty": float(power)}
    return found


def shortlist_file(path: Path) -> Path | None:
    """The binary shortlist that the config names, or, without a config, the one beside the model."""
    folder, config = path.parent, decoder_config(path)
    named = config.get("shortlist")
    name = named[0] if isinstance(named, list) and named else named
    if name is None and not config:
        name = next(iter(sorted(file.name for file in folder.glob("lex.*.bin") if file.is_file())), None)
    if not isinstance(name, str):
        return None
    name = Path(name).name
    return file_in(folder, name) if has_file(folder, name) and name.endswith(".bin") else None


def _by_side(names: list[str]) -> list[str]:
    """Source before target; a third file, which belongs to neither, makes it ambiguous."""
    for words in (("source", "target"), ("src", "trg"), ("src", "tgt")):
        pair = [next((name for name in names if word in name), None) for word in words]
        if all(pair):
            return [name for name in pair if name]
    if len(names) > 1:
        raise UserError(f"several vocabularies ({', '.join(names)}); name source and target in decoder.yml (vocabs)")
    return names


def read_vocabulary(file: Path) -> dict[str, int]:
    if file.suffix == ".json":
        return vocab_files.read_vocab(file)
    if file.suffix == ".spm":
        return {piece.text: number for number, piece in enumerate(SentencePieceModel.read(file).pieces)}
    lines = read_text(file.parent, file.name, MAX_BYTES).splitlines()
    if file.suffix not in (".yml", ".yaml"):
        return {line: number for number, line in enumerate(lines)}
    found: dict[str, int] = {}
    key: str | None = None
    for number, line in enumerate(lines, 1):
        if line.startswith("? "):  # a key on a line of its own
            key = line[2:]
            continue
        token, _, value = (key, "", line[1:]) if key is not None and line.startswith(":") else line.rpartition(":")
        key = None
        if not line.strip() or (line.startswith(("#", "---")) and not value.strip().isdigit()):
            continue
        if not value.strip().isdigit():
            raise UserError(f"{file}:{number}: expected a token and its id")
        found[_unquoted(str(token))] = int(value)
    if not found or len(set(found.values())) < len(found) or max(found.values()) >= most_ids(len(found)):
        raise UserError(f"{file}: not a vocabulary (a unique id for each token)")
    return found


def _unquoted(token: str) -> str:
    if len(token) < 2 or token[0] != token[-1] or token[0] not in "'\"":
        return token
    if token[0] == "'":
        return token[1:-1].replace("''", "'")
    try:
        return str(json.loads(token))
    except ValueError:
        try:
            return str(yaml.safe_load(token))
        except yaml.YAMLError:
            return token[1:-1]
