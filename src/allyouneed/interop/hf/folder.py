"""A Hugging Face folder as one of ours: which model, which task, which words, and how it is meant to be decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allyouneed.config import parse, tree_of
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import CARD, Folder, as_dtype, check_vocabularies
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.hf import preprocessor, sentence_transformers
from allyouneed.interop.hf import whisper_tokens as speech
from allyouneed.interop.hf.checkpoint import LONGEST, Checkpoint, inside, read_json
from allyouneed.interop.hf.generation_config import decoding_of
from allyouneed.interop.hf.weight_table import Family
from allyouneed.interop.tokenizers import load as tokenizers
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, cast_weights, meta_model, named_tensors

# what a class of theirs is for, by the end of its name; what is not here is for what the family is for
BY_CLASS = {
    "ForMaskedLM": "masked-lm",
    "ForPreTraining": "masked-lm",
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ModelWithLMHead": "causal-lm",
}
BY_FAMILY = {
    "marian": "translation",
    "m2m_100": "translation",
    "mbart": "translation",
    "t5": "seq2seq",
    "mt5": "seq2seq",
    "switch_transformers": "seq2seq",
    "bart": "seq2seq",
    "whisper": "transcription",
    "vit": "image-classification",
    "deit": "image-classification",
    "clip": "image-text",
    "xlnet": "permutation-lm",
    **dict.fromkeys(
        (
            "bitnet", "bloom", "deepseek_v2", "falcon", "gemma", "gemma2", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
            "gptj", "llama", "mistral", "mixtral", "mpt", "opt", "phi", "qwen2", "qwen3", "reformer", "rwkv",
        ),
        "causal-lm",
    ),
}  # fmt: skip
SAME_MODEL = ({"translation", "seq2seq"},)
LABELLED = ("classification", "tagging", "image-classification")
READS_TEXT = ("encoder", "decoder")  # kinds of models whose vectors can be gathered into one of a text
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
SENSIBLE = 1 << 24  # tokens; tokenizers that know no limit say numbers with thirty digits
UNKNOWN = 512  # tokens, where nobody says how many
GENERATION = "generation_config.json"
KEPT = (
    GENERATION, "preprocessor_config.json", "processor_config.json", "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "chat_template.*",
    "normalizer.json", "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip


def is_theirs(path: Path | str) -> bool:
    """Whether a folder was written for `transformers` or `sentence-transformers`."""
    path = Path(path)
    if (path / sentence_transformers.MODULES).is_file():
        return True
    file = path / "config.json"
    if not file.is_file() or file.stat().st_size > LONGEST:
        return False
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # what is wrong with it is said where it is read
    return isinstance(about, dict) and "format" not in about and bool({"model_type", "architectures"} & set(about))


def opened(path: Path) -> tuple[sentence_transformers.Recipe | None, Checkpoint]:
    recipe = sentence_transformers.read(path)
    return recipe, Checkpoint.open(path if recipe is None else recipe.home)


def load(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    task: str | None = None,
    as_stored: bool = False,
) -> Folder:
    """Read their folder. `task`: another use than that of its class; `as_stored`: see `Folder.load`."""
    path = Path(path)
    recipe, checkpoint = opened(path)
    home = checkpoint.path
    family, config = family_of(checkpoint), checkpoint.config
    with sensible(checkpoint):
        model = family.convert(config, checkpoint.weights, as_dtype(dtype), device)
    if not as_stored:
        cast_weights(model, as_dtype(dtype))
    kind, head = use_of(path, config, config_of(model), recipe, task)
    model = model if head is None else with_head(model, head)
    words = tokenizers.read(home, config)
    if words is not None:
        check_vocabularies(path, words, config_of(model))
    generation = read_json(home, GENERATION, needed=False)
    with sensible(checkpoint):
        decoding, notes = decoding_of(config, generation, kind)
        notes += [] if words is None else words.source.notes
        rules = rules_of(home, config, generation, kind, words, notes)
    origin = {"family": family.name, "config": config} | ({"generation": generation} if generation else {})
    return Folder(
        model,
        words,
        {"kind": kind} | rules,
        decoding,
        max_tokens=_longest(home, config, config_of(model), recipe),
        labels=labels_of(config, config_of(model)) if kind in LABELLED else [],
        card=_card(path),
        path=path,
        origin=origin,
        notes=notes,
        unused=family.unused(config, checkpoint.weights) if as_stored else {},
        originals=originals_of(home) if as_stored else {},
    )


def about(path: Path | str) -> dict[str, Any]:
    """What config.json of ours would say of it, without the weights."""
    path = Path(path)
    recipe, checkpoint = opened(path)
    family, config = family_of(checkpoint), checkpoint.config
    with sensible(checkpoint):
        model = family.config(config if family.before is None else family.before(config, checkpoint.weights)[0])
    kind, head = use_of(path, config, model, recipe)
    tree = tree_of(model) | ({} if head is None else {"head": head})
    labels = labels_of(config, model) if kind in LABELLED else []
    origin = {"family": family.name, "config": config}
    return {"model": tree, "task": {"kind": kind}, "labels": labels, "origin": origin}


def use_of(
    path: Path,
    config: Mapping[str, Any],
    model: Model,
    recipe: sentence_transformers.Recipe | None,
    task: str | None = None,
) -> tuple[str, dict[str, Any] | None]:
    """What it is used for, and the head that takes, where it is another than its own."""
    natural = task_of(config) if recipe is None else "similarity"
    if natural == "masked-lm" and labels_of(config, model):
        natural = "tagging"  # ELECTRA's discriminator, which tells for each token whether it was replaced
    kind = natural if task is None else other_task(path, model, natural, task)
    if kind in ("classification", "tagging") and not labels_of(config, model):
        raise UserError(f"{path}: {_class(config)} is not known here: such a model has no head for {kind}")
    if kind != "similarity":
        return kind, None
    return kind, pooled(model) if recipe is None else recipe.head


def used_for(folder: Folder, task: str) -> Folder:
    """The same folder for another task, if its weights allow it."""
    config = config_of(folder.model)
    kind = other_task(folder.path or Path("the model"), config, folder.task["kind"], task)
    model = with_head(folder.model, pooled(config)) if kind == "similarity" else folder.model
    return replace(folder, model=model, task={"kind": kind})


@contextmanager
def sensible(checkpoint: Checkpoint) -> Iterator[None]:
    """Numbers that are words, negative sizes, heads that do not part a width: whatever a config can have wrong that
    the family stumbles over."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        model_type = checkpoint.config["model_type"]
        raise UserError(
            f"{checkpoint.path / 'config.json'}: not a config of a {model_type} model: {type(error).__name__}: {error}"
        ) from error


def family_of(checkpoint: Checkpoint) -> Family:
    name = checkpoint.config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{checkpoint.path / 'config.json'}: model_type {name!r} is not known here; known are {known}")
    return FAMILIES[name]


def task_of(config: Mapping[str, Any]) -> str:
    """What it is for, by the name of its class and by its family."""
    name = _class(config)
    bare = name.endswith("Model") and not name.endswith("LMHeadModel")
    family = BY_FAMILY.get(config["model_type"])
    by_class = next((kind for end, kind in BY_CLASS.items() if name.endswith(end)), None)
    if name.endswith("EncoderModel"):
        return "similarity"
    if family in ("permutation-lm", "transcription") and by_class in ("causal-lm", None):
        return "similarity" if bare and family == "permutation-lm" else family
    if by_class is not None and not (family in ("translation", "seq2seq") and by_class == "causal-lm"):
        return by_class
    return "similarity" if bare and family in (None, "causal-lm") else family or "masked-lm"


def other_task(path: Path, model: Model, natural: str, wanted: str) -> str:
    """`wanted`, if the model has what it takes."""
    vectors = wanted == "similarity" and tree_of(model)["kind"] in READS_TEXT
    if wanted == natural or vectors or any({wanted, natural} <= same for same in SAME_MODEL):
        return wanted
    raise UserError(
        f"{path}: it is made for {natural} and has no weights for {wanted}; train it for that (start: {path})"
    )


def pooled(model: Model) -> dict[str, Any]:
    """The head that gathers a text into one vector; in a stack that sees only the past, the last token has seen all."""
    return {"kind": "pooled", "pool": "last" if tree_of(model)["kind"] == "decoder" else "mean"}


def with_head(model: nn.Module, head: Mapping[str, Any]) -> nn.Module:
    """The same body under another head that needs no weights."""
    config: Model = parse(Model, tree_of(config_of(model)) | {"head": dict(head)}, "head")  # type: ignore[type-abstract]
    made, before = meta_model(config), named_tensors(model)
    assign_weights(made, {name: before[name].detach() for name in named_tensors(made)})
    return made.eval()


def labels_of(config: Mapping[str, Any], model: Model) -> list[str]:
    """`id2label`, in the order of the scores; theirs where it has holes are called LABEL_0 and so on."""
    said = config.get("id2label")
    names = {str(number): str(label) for number, label in said.items()} if isinstance(said, dict) else {}
    count: int = getattr(tree_of(model)["head"], "get", lambda *_: 0)("labels", 0)
    return [names.get(str(number), f"LABEL_{number}") for number in range(count)]


def vocabularies(path: Path) -> Vocabularies | None:
    checkpoint = opened(path)[1]
    return tokenizers.read(checkpoint.path, checkpoint.config)


def rules_of(
    path: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    kind: str,
    words: Vocabularies | None,
    notes: list[str],
) -> dict[str, Any]:
    """What a task of sounds or images has to know besides its kind; a note where that is not to be found."""
    if kind == "transcription":
        try:
            return speech.rules(config, generation, None if words is None else words.target)
        except UserError as error:  # a model all the same, for whoever has features and token ids
            notes.append(str(error))
    if kind in ("image-classification", "image-text"):
        channels = (config.get("vision_config") or config).get("num_channels", 3)
        return {"image": preprocessor.read(path, config["model_type"], channels)}
    return {}


def originals_of(path: Path) -> dict[str, bytes]:
    """The small files around the weights, as they are: what a folder of theirs needs again on the way back."""
    found = [file for pattern in KEPT for file in sorted(path.glob(pattern)) if file.is_file()]
    return {file.name: inside(path, file.name).read_bytes() for file in found if file.stat().st_size <= LONGEST}


def _class(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def config_of(model: nn.Module) -> Model:
    config: Model = model.config  # type: ignore[assignment]
    return config


def _card(path: Path) -> str:
    file = path / CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _longest(path: Path, config: Mapping[str, Any], model: Model, recipe: sentence_transformers.Recipe | None) -> int:
    """The longest text it is meant to read: what the model can place, what its config and its tokenizer say."""
    said = [config.get(key) for key in LENGTHS]
    said += [read_json(path, "tokenizer_config.json", needed=False).get("model_max_length")]
    said += [model.limit, None if recipe is None else recipe.longest]
    numbers = [int(number) for number in said if isinstance(number, int | float) and 0 < number < SENSIBLE]
    return min(numbers, default=UNKNOWN)
