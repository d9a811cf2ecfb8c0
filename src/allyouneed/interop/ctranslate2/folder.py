"""Read a CTranslate2 folder as one of ours: model.bin, config.json, vocabularies, and the tokenizer beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import parse, tree_of
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, has_file, read_json
from allyouneed.folder import REWRITING, Folder, as_dtype, check_finite, check_fit, check_vocabularies, read_card
from allyouneed.interop.ctranslate2.binary import Variables
from allyouneed.interop.ctranslate2.tree import WHISPER, TreeReader
from allyouneed.interop.hf.whisper_tokens import speech_options
from allyouneed.interop.malformed import malformed
from allyouneed.interop.tokenizers import load as tokenizers
from allyouneed.interop.tokenizers import subword_files
from allyouneed.interop.tokenizers.subword_files import NEVER, Roles, read_token_list
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, cast_weights, meta_model, named_tensors

MODEL = "model.bin"
PAD = "<pad>"
DEFAULT_LENGTH = 512  # tokens, where positions are computed
TASKS = {"encoder-decoder": ("translation", *REWRITING), "decoder": ("causal-lm",), "encoder": ("similarity",)}
OURS = "allyouneed"  # key of config.json in folders that we wrote: what CTranslate2 does not need


def load(
    path: Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    as_stored: bool = False,
    tokenizer: Path | None = None,
) -> Folder:
    """`tokenizer`: a subword file, where it does not lie in the folder."""
    about, reader, tree = read_tree(path)
    with malformed(f"{path / MODEL}: not a valid CTranslate2 model"):
        model = build(path, reader, tree)
    check_finite(str(path / MODEL), model)
    if not as_stored or dtype is not None:
        cast_weights(model, as_dtype(dtype))
    model.to(device)
    config: Model = model.config  # type: ignore[assignment]
    vocabs, notes = read_vocabularies(path, about, reader, config, tokenizer)
    if vocabs is not None:
        check_vocabularies(path, vocabs, config)
    if reader.variables.quantized:
        notes.append("quantized weights were widened to float32; CTranslate2 also rounds activations, ours does not")
    if has_file(path, "vmap.txt"):
        notes.append("vmap.txt, a list of candidate translations per word, is not used")
    ours, task = _ours(about), task_of(about, config)
    if reader.variables.spec == WHISPER and "start" not in task:
        task |= speech_task(about, reader, vocabs)
    limit = config.limit
    return Folder(
        model,
        vocabs,
        task,
        max_tokens=ours.get("max_tokens") or limit or DEFAULT_LENGTH,
        directions=ours.get("directions", []),
        card=read_card(path),
        path=path,
        origin={"format": "ctranslate2", "settings": about},
        notes=notes,
    )


def about(path: Path) -> dict[str, Any]:
    """What our config.json would contain after an import."""
    settings, _, tree = read_tree(path)
    config: Model = parse(Model, tree, str(path / MODEL))  # type: ignore[type-abstract]
    return {
        "model": tree_of(config),
        "task": task_of(settings, config),
        "labels": [],
        "origin": {"format": "ctranslate2", "settings": settings},
        "directions": _ours(settings).get("directions", []),
    }


def vocabularies(path: Path) -> Vocabularies | None:
    settings, reader, tree = read_tree(path)
    return read_vocabularies(path, settings, reader, parse(Model, tree, str(path / MODEL)))[0]  # type: ignore[type-abstract]


def weight_files(path: Path) -> list[Path]:
    return [path / MODEL]


def read_tree(path: Path) -> tuple[dict[str, Any], TreeReader, dict[str, Any]]:
    """Their settings, the reader of the weights, and our tree."""
    settings = read_json(path, "config.json", needed=False)
    variables = Variables(file_in(path, MODEL))
    with malformed(f"{path / MODEL}: not a valid CTranslate2 model"):
        reader = TreeReader(variables, settings)
        tree = reader.read()
    if reader.starts_at_zero:  # a token whose vector is zero takes the place of the zero vector
        sizes = tree["vocab"]
        tree["vocab"] = {**sizes, "target": sizes["target"] + 1} if isinstance(sizes, dict) else sizes + 1
        tree["head"]["bias"] = True
    return settings, reader, tree


def build(path: Path, reader: TreeReader, tree: dict[str, Any]) -> nn.Module:
    config: Model = parse(Model, tree, str(path / MODEL))  # type: ignore[type-abstract]
    stored = sum(entry.start > 0 for entry in reader.variables.entries.values())
    layers = sum(layer.repeat for name in config.stacks for layer in getattr(config, name, ()))
    if layers > stored or config.cost(1).parameters > reader.variables.size:
        raise UserError(f"{path / MODEL}: fewer weights than its options describe")
    model = meta_model(config)
    found = reader.weights(model)
    if reader.starts_at_zero:
        found = add_start_token(found)
    check_fit(path / MODEL, found, named_tensors(model))
    assign_weights(model, {name: tensor.contiguous() for name, tensor in found.items()})
    return model.eval()


def add_start_token(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One more target token, whose vector is zero and which is never generated, for models whose first decoder input
    is a vector of zeros (Marian)."""
    found = dict(weights)
    for name in ("embed.tokens.weight", "head.weight"):
        if name in found:
            found[name] = torch.cat([found[name], torch.zeros_like(found[name][:1])])
    tokens = found["embed.tokens.weight"]
    bias = found.get("head.bias", tokens.new_zeros(len(tokens) - 1)).to(tokens.dtype)
    return found | {"head.bias": torch.cat([bias, bias.new_full((1,), NEVER)])}


def task_of(settings: Mapping[str, Any], config: Model) -> dict[str, Any]:
    """The task; our own export keeps its options."""
    tree = tree_of(config)
    speech = (tree.get("source_embed") or {}).get("kind") == "frames"
    allowed = ("transcription",) if speech else TASKS[tree["kind"]]
    wanted = _ours(settings).get("task")
    return dict(wanted) if isinstance(wanted, dict) and wanted.get("kind") in allowed else {"kind": allowed[0]}


def speech_task(settings: Mapping[str, Any], reader: TreeReader, vocabs: Vocabularies | None) -> dict[str, Any]:
    """Whisper's control tokens."""
    banned = {
        key: settings.get(f"suppress_ids{end}")
        for key, end in (("suppress_tokens", ""), ("begin_suppress_tokens", "_begin"))
    }
    config = {"max_source_positions": reader.rows("encoder/position_encodings/encodings")}
    eos = None if vocabs is None else vocabs.target.eos
    several = {"is_multilingual": bool(settings.get("lang_ids")), "eos_token_id": eos}
    return speech_options(config, banned | several, None if vocabs is None else vocabs.target)


def _ours(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What our own export wrote into config.json, if it is of the right types."""
    found = settings.get(OURS)
    if not isinstance(found, dict):
        return {}
    pairs, length = found.get("directions"), found.get("max_tokens")
    good = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str) and isinstance(pair[0], str | None)
        for pair in pairs
    )
    kept: dict[str, Any] = {
        "task": found.get("task"),
        "directions": [tuple(pair) for pair in pairs or []] if good else [],
        "tokenizer": found.get("tokenizer"),
    }
    return kept | ({"max_tokens": length} if type(length) is int and 0 < length < 1 << 31 else {})


# --- vocabularies -----------------------------------------------------------------------------------------------------


def _vocabulary_files(path: Path) -> list[str]:
    names = [f"{side}vocabulary{end}" for side in ("shared_", "source_", "target_", "") for end in (".json", ".txt")]
    return [name for name in names if has_file(path, name)]


def token_ids(path: Path, rows: tuple[int, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Token -> id of both sides. `rows`: of the model; a longer list does not belong to it."""
    files, sides = _vocabulary_files(path), []
    for side, count in zip(("source_", "target_"), rows, strict=True):
        own = next(
            (name for prefix in ("shared_", side, "") for name in files if name.startswith(f"{prefix}voc")), None
        )
        if own is None:
            raise UserError(f"{path}: no {side}vocabulary; the folder is incomplete")
        tokens = read_token_list(path, own)
        if len(tokens) > count:
            raise UserError(f"{path / own}: {len(tokens):,} tokens, but the model has {count:,}")
        sides.append({token: number for number, token in reversed(list(enumerate(tokens)))})
    return sides[0], sides[1]


def read_vocabularies(
    path: Path, settings: Mapping[str, Any], reader: TreeReader, config: Model, given: Path | None = None
) -> tuple[Vocabularies | None, list[str]]:
    """The tokenizers: ours, those of Hugging Face, or the subword files of the model."""
    if given is None and _ours(settings).get("tokenizer") == OURS and has_file(path, "tokenizer.json"):
        return Vocabularies.load(path), []
    sizes = config.vocabs
    assert sizes is not None
    source, target = token_ids(path, (sizes.source, sizes.target))
    if reader.variables.spec == WHISPER:
        numbers = {role: target.get(f"<|{name}|>") for role, name in WHISPER_NAMES.items()}
        theirs: dict[str, Any] = {f"{role}_token_id": number for role, number in numbers.items()}
        return tokenizers.read(path, theirs | {"model_type": "whisper", "vocab_size": sizes.target}), []
    roles = find_roles(path, settings, reader, source, target)
    if reader.starts_at_zero:
        target = {**target, PAD if PAD not in target else "<start>": roles.start}
    if given is None and _has_hf_tokenizer(path):
        ids = {"eos": roles.eos, "bos": roles.start, "pad": roles.pad, "decoder_start": roles.start}
        theirs = {f"{role}_token_id": number for role, number in ids.items()}
        two = tree_of(config)["kind"] == "encoder-decoder"
        found = tokenizers.read(path, theirs | {"is_encoder_decoder": two, "vocab_size": sizes.target})
        return found, [] if found is None else found.source.notes
    return subword_files.read(path, (source, target), roles, given)


def _has_hf_tokenizer(path: Path) -> bool:
    legacy = has_file(path, "vocab.json") or has_file(path, "tokenizer_config.json")
    return has_file(path, "tokenizer.json") or (legacy and any(has_file(path, name) for name in tokenizers.LEGACY))


def find_roles(
    path: Path, settings: Mapping[str, Any], reader: TreeReader, source: Mapping[str, int], target: Mapping[str, int]
) -> Roles:
    """Special tokens, from config.json; older files have flags beside the weights."""
    names = {role: str(settings.get(f"{role}_token") or default) for role, default in DEFAULT_NAMES.items()}
    missing = [name for role, name in names.items() if role != "bos" and name not in target]
    if missing:
        raise UserError(f"{path}: the vocabulary has no token {missing[0]}, which config.json names")
    old = settings.get("decoder_start_token", "") == ""
    bos = target.get(names["bos"], target[names["eos"]])
    if reader.starts_at_zero:
        start = max(target.values()) + 1
    elif old:
        start = bos if reader.number("with_target_bos", 1) else target[names["eos"]]
    else:
        start = target.get(str(settings["decoder_start_token"]), bos)
    flags = [
        bool(settings.get(f"add_source_{role}", reader.number(f"with_source_{role}", 0))) for role in ("bos", "eos")
    ]
    around = [
        tuple([source[names[role]]] if flag and names[role] in source else [])
        for role, flag in zip(("bos", "eos"), flags, strict=True)
    ]
    blank = next((target[name] for name in ("<blank>", PAD) if name in target), start)
    return Roles(
        names["unk"],
        target[names["eos"]],
        start,
        start if reader.starts_at_zero else blank,
        around[0],
        around[1],
        never=(start,) if reader.starts_at_zero else (),
    )


WHISPER_NAMES = {"eos": "endoftext", "bos": "endoftext", "pad": "endoftext", "decoder_start": "startoftranscript"}
DEFAULT_NAMES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
