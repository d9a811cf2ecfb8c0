"""Read a Hugging Face folder as one of ours: model, task, tokenizers and decoding options."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from allyouneed.config import tree_of
from allyouneed.data.languages import iso_code
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.files.reading import MAX_JSON_BYTES, file_in, read_json
from allyouneed.folder import Folder, as_dtype, check_finite, check_vocabularies, read_card
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.heads import POOLABLE, check_task, config_of, pooling_head, with_head
from allyouneed.interop.hf import preprocessor, sentence_transformers
from allyouneed.interop.hf.checkpoint import HfCheckpoint
from allyouneed.interop.hf.generation_config import read_decoding
from allyouneed.interop.hf.sentence_transformers import SentenceModules
from allyouneed.interop.hf.weight_table import Family
from allyouneed.interop.hf.whisper_tokens import speech_options
from allyouneed.interop.malformed import malformed
from allyouneed.interop.tokenizers import load as tokenizers
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import cast_weights

# the task of a class, by the end of its name; any other class has the task of its family
TASK_BY_CLASS = {
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ModelWithLMHead": "causal-lm",
}
TASK_BY_FAMILY = {
    "marian": "translation",
    "m2m_100": "translation",
    "mbart": "translation",
    "t5": "seq2seq",
    "mt5": "seq2seq",
    "switch_transformers": "seq2seq",
    "bart": "seq2seq",
    "pegasus": "seq2seq",
    "whisper": "transcription",
    "vit": "image-classification",
    "deit": "image-classification",
    "clip": "image-text",
    "xlm": "masked-lm",
    "xlnet": "permutation-lm",
    **dict.fromkeys(
        (
            "bitnet", "bloom", "deepseek_v2", "falcon", "gemma", "gemma2", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
            "gptj", "llama", "mamba", "mamba2", "mistral", "mixtral", "mpt", "opt", "phi", "qwen2", "qwen3", "reformer",
            "rwkv",
        ),
        "causal-lm",
    ),
}  # fmt: skip
LABELLED = ("classification", "tagging", "image-classification")
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
LARGEST_LENGTH = 1 << 24  # tokens; tokenizers without a limit write numbers of thirty digits
DEFAULT_LENGTH = 512  # tokens, where no file gives a length
GENERATION = "generation_config.json"
COPIED_FILES = (
    GENERATION, "preprocessor_config.json", "processor_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "chat_template.*",
    "normalizer.json", "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip


def open_checkpoint(path: Path) -> tuple[SentenceModules | None, HfCheckpoint]:
    modules = sentence_transformers.read(path)
    return modules, HfCheckpoint.open(path if modules is None else modules.model_path)


def load(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    task: str | None = None,
    as_stored: bool = False,
) -> Folder:
    """Read a folder. `task`: another task than that of its class; `as_stored`: see `Folder.load`."""
    path = Path(path)
    modules, checkpoint = open_checkpoint(path)
    model_path = checkpoint.path
    family, config = family_of(checkpoint), checkpoint.config
    with config_errors(checkpoint):
        model = family.convert(config, checkpoint.weights, as_dtype(dtype), device)
        check_finite(str(checkpoint.files[0]), model)
        if not as_stored:
            cast_weights(model, as_dtype(dtype))
        kind, head = task_and_head(path, config, config_of(model), modules, task)
        model = model if head is None else with_head(model, head)
    vocabs = read_vocabularies(checkpoint)
    if vocabs is not None:
        check_vocabularies(path, vocabs, config_of(model))
    generation = read_json(model_path, GENERATION, needed=False)
    decoding, notes = read_decoding(config, generation, kind, str(model_path / GENERATION))
    notes += [] if vocabs is None else vocabs.source.notes
    notes += [] if family.notes is None else family.notes(config_of(model))
    with config_errors(checkpoint):
        options = task_options(model_path, config, generation, kind, vocabs, notes)
    origin = {"family": family.name, "config": config} | ({"generation": generation} if generation else {})
    return Folder(
        model,
        vocabs,
        {"kind": kind} | options,
        decoding,
        max_tokens=_max_tokens(model_path, config, config_of(model), modules),
        directions=_directions(model_path, family),
        labels=labels_of(config, config_of(model)) if kind in LABELLED else [],
        card=read_card(path),
        path=path,
        origin=origin,
        notes=notes,
        unused=family.unused(config, checkpoint.weights) if as_stored else {},
        originals=read_originals(model_path) if as_stored else {},
    )


def about(path: Path | str) -> dict[str, Any]:
    """What our config.json would contain after an import, without loading the weights."""
    path = Path(path)
    modules, checkpoint = open_checkpoint(path)
    family, config = family_of(checkpoint), checkpoint.config
    with config_errors(checkpoint):
        model = family.read_config(config if family.prepare is None else family.prepare(config, checkpoint.weights)[0])
        kind, head = task_and_head(path, config, model, modules)
        labels = labels_of(config, model) if kind in LABELLED else []
    tree = tree_of(model) | ({} if head is None else {"head": head})
    origin = {"family": family.name, "config": config}
    found = {"model": tree, "task": {"kind": kind}, "labels": labels, "origin": origin}
    return found | {"directions": _directions(checkpoint.path, family)}


def task_and_head(
    path: Path, config: Mapping[str, Any], model: Model, modules: SentenceModules | None, task: str | None = None
) -> tuple[str, dict[str, Any] | None]:
    """The task, and the head it needs where that is not the model's own."""
    own = task_of(config) if modules is None else "similarity"
    if own == "masked-lm" and labels_of(config, model):
        own = "replaced-token"  # ELECTRA's discriminator: one score per token
    kind = own if task is None else check_task(path, model, own, task)
    headless = kind in ("classification", "tagging") and not labels_of(config, model)
    if headless or (kind == "similarity" and tree_of(model)["kind"] not in POOLABLE):
        raise UserError(f"{path}: {_architecture(config)} is not supported: the model has no head for {kind}")
    if kind != "similarity":
        return kind, None
    return kind, pooling_head(model) if modules is None else modules.head


def config_errors(checkpoint: HfCheckpoint) -> AbstractContextManager[None]:
    """Report any exception that a malformed config causes."""
    return malformed(f"{checkpoint.path / 'config.json'}: not a valid {checkpoint.config['model_type']} config")


def family_of(checkpoint: HfCheckpoint) -> Family:
    name = checkpoint.config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        allowed = ", ".join(sorted(FAMILIES))
        raise UserError(f"{checkpoint.path / 'config.json'}: unknown model_type {name!r} (allowed: {allowed})")
    _check_class(checkpoint)
    return FAMILIES[name]


def _check_class(checkpoint: HfCheckpoint) -> None:
    """Refuse a class of no family: it may compute something else with the same weights."""
    where, names = checkpoint.path / "config.json", checkpoint.config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: architectures: {names!r} is not a list of class names")
    known = tuple(name.replace("_", "") for name in FAMILIES)
    if names and names[0] and not names[0].casefold().startswith(known):
        raise UserError(f"{where}: architectures: {names[0]} is a class of no supported family ({', '.join(FAMILIES)})")


def task_of(config: Mapping[str, Any]) -> str:
    """The task, by class name and family."""
    name = _architecture(config)
    headless = name.endswith("Model") and not name.endswith("LMHeadModel")
    family = TASK_BY_FAMILY.get(config["model_type"])
    by_class = next((kind for end, kind in TASK_BY_CLASS.items() if name.endswith(end)), None)
    if name.endswith("EncoderModel"):
        return "similarity"
    if family in ("masked-lm", "permutation-lm", "transcription") and by_class in ("causal-lm", None):
        return "similarity" if headless and family != "transcription" else family
    if by_class is not None and not (family in ("translation", "seq2seq") and by_class == "causal-lm"):
        return by_class
    return "similarity" if headless and family in (None, "causal-lm") else family or "masked-lm"


def labels_of(config: Mapping[str, Any], model: Model) -> list[str]:
    """`id2label` in the order of the scores; missing names become LABEL_0, LABEL_1, …"""
    given = config.get("id2label")
    names = {str(number): str(label) for number, label in given.items()} if isinstance(given, dict) else {}
    count: int = getattr(tree_of(model)["head"], "get", lambda *_: 0)("labels", 0)
    return [names.get(str(number), f"LABEL_{number}") for number in range(count)]


def vocabularies(path: Path) -> Vocabularies | None:
    return read_vocabularies(open_checkpoint(path)[1])


def read_vocabularies(checkpoint: HfCheckpoint) -> Vocabularies | None:
    with malformed(f"{checkpoint.path}: the files of the tokenizer are malformed"):
        return tokenizers.read(checkpoint.path, checkpoint.config)


def task_options(
    path: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    kind: str,
    vocabs: Vocabularies | None,
    notes: list[str],
) -> dict[str, Any]:
    """Options of a speech or image task besides its kind; a note where they are missing."""
    if kind == "transcription":
        try:
            return speech_options(config, generation, None if vocabs is None else vocabs.target)
        except UserError as error:  # the model still runs on features and token ids
            notes.append(str(error))
    if kind in ("image-classification", "image-text"):
        channels = (config.get("vision_config") or config).get("num_channels", 3)
        return {"image": preprocessor.read(path, config["model_type"], channels)}
    return {}


def read_originals(path: Path) -> dict[str, bytes]:
    """The small files around the weights, unchanged, for an export back to the same format."""
    found = [file for pattern in COPIED_FILES for file in sorted(path.glob(pattern)) if file.is_file()]
    return {file.name: file_in(path, file.name).read_bytes() for file in found if file.stat().st_size <= MAX_JSON_BYTES}


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _directions(path: Path, family: Family) -> list[tuple[str | None, str]]:
    """The direction of a Marian model, if its tokenizer names two languages and has no token for one (`>>fra<<`)."""
    if family.name != "marian":
        return []
    names = read_json(path, "tokenizer_config.json", needed=False)
    here, there = (iso_code(str(names.get(f"{side}_lang"))) for side in ("source", "target"))
    if here is None or there is None or any(name.startswith(">>") for name in read_json(path, "vocab.json", False)):
        return []
    return [(here, there)]


def _max_tokens(path: Path, config: Mapping[str, Any], model: Model, modules: SentenceModules | None) -> int:
    """The longest input: the minimum of what the model, its config and its tokenizer allow."""
    lengths = [config.get(key) for key in LENGTH_KEYS]
    lengths += [read_json(path, "tokenizer_config.json", needed=False).get("model_max_length")]
    lengths += [model.limit, None if modules is None else modules.max_tokens]
    numbers = [int(length) for length in lengths if isinstance(length, int | float) and 0 < length < LARGEST_LENGTH]
    return min(numbers, default=DEFAULT_LENGTH)
