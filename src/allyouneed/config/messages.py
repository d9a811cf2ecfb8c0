"""Errors of pydantic as one short phrase each, and the names that other libraries give to our keys."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

SHOWN = 60  # characters of a wrong value

# our key -> its names elsewhere (torch, Hugging Face, fairseq, OpenNMT, nanoGPT), by the place of the key
FOREIGN_NAMES: dict[str, dict[str, str]] = {
    "": {  # a recipe
        "schedule.peak": "lr learning_rate max_lr peak_lr learningrate",
        "schedule.warmup": "warmup_steps warmup_updates num_warmup_steps warmup_iters warmup_ratio",
        "schedule.kind": "lr_scheduler lr_scheduler_type lr_schedule decay_method scheduler",
        "batch.rows": "batch_size per_device_train_batch_size train_batch_size max_sentences micro_batch_size",
        "batch.row": "block_size seq_length seq_len sequence_length context_length",
        "steps": "max_steps train_steps num_steps total_steps max_update max_updates max_iters iterations",
        "epochs": "num_epochs num_train_epochs max_epochs max_epoch n_epochs",
        "accumulate": "gradient_accumulation_steps accum_count update_freq grad_accum accumulate_grad_batches",
        "clip": "max_grad_norm grad_clip clip_norm gradient_clip_val gradient_clipping",
        "optimiser.weight_decay": "weight_decay wd",
        "optimiser.beta1": "adam_beta1 betas adam_betas",
        "optimiser.beta2": "adam_beta2",
        "optimiser.eps": "adam_epsilon adam_eps",
        "task.smoothing": "label_smoothing label_smoothing_factor",
        "data.train": "train_file train_data train_files dataset trainpref",
        "data.valid": "validation_file valid_data eval_file eval_dataset dev",
        "data.max_tokens": "max_length max_seq_length max_seq_len max_source_length max_target_length",
        "validate.every": "eval_steps valid_steps eval_interval validation_freq eval_every",
        "validate.patience": "early_stopping_patience early_stopping patience",
        "save.every": "save_steps save_interval save_checkpoint_steps checkpoint_every",
        "save.keep": "save_total_limit keep_checkpoint keep_last_epochs",
        "output": "output_dir save_dir out_dir save_model model_dir",
        "start": "model_name_or_path pretrained from_pretrained train_from init_from checkpoint finetune",
        "precision": "fp16 bf16 amp mixed_precision torch_dtype dtype",
        "checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    },
    " of the model": {
        "width": "hidden_size d_model n_embd embed_dim dim hidden_dim model_dim embedding_dim",
        "vocab": "vocab_size n_vocab num_embeddings",
        "dropout": "hidden_dropout_prob hidden_dropout resid_pdrop p_dropout dropout_rate",
        "norm.eps": "layer_norm_eps layer_norm_epsilon rms_norm_eps norm_eps",
        "embed.positions": "max_position_embeddings n_positions max_positions max_len n_ctx",
        "embed.tied": "tie_word_embeddings share_embeddings weight_tying",
    },
    " of a layer": {
        "repeat": "n_layer n_layers num_layers num_hidden_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers depth",
    },
    " of the token mixer": {
        "heads": "num_heads n_head n_heads nhead num_attention_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads",
        "kv_heads": "num_key_value_heads n_kv_heads num_kv_heads",
        "head_width": "head_dim d_kv d_k head_size dim_head",
        "dropout": "attention_dropout attn_dropout attn_pdrop attention_probs_dropout_prob",
        "pattern": "sliding_window attention_type window_size is_causal mask",
        "positions": "position_embedding_type rope rope_scaling rope_parameters rope_theta",
    },
    " of the channel mixer": {
        "hidden": "intermediate_size ffn_dim dim_feedforward d_ff n_inner transformer_ff ffn_hidden_size mlp_dim",
        "activation": "hidden_act activation_function act_fn hidden_activation",
        "experts": "num_experts num_local_experts n_routed_experts",
        "top": "num_experts_per_tok top_k_experts moe_top_k",
    },
}
_OURS = {
    theirs: (key, place)
    for place, keys in FOREIGN_NAMES.items()
    for key, names in keys.items()
    for theirs in names.split()
}


def unknown_key(key: Any, allowed: Iterable[str]) -> str:
    """The message for a key that a config does not have."""
    allowed = sorted(allowed)
    if (ours := _OURS.get(str(key).lower())) is None:
        return "unknown" + suggest(key, allowed)
    path, place = ours
    leaf = path.rpartition(".")[2]
    near = f"did you mean {leaf!r}?" if leaf in allowed else f"set `{path}`{place}"
    return f"unknown; {near} (allowed here: {', '.join(allowed)})"


def parenthesis_problem(text: str) -> str | None:
    """What is wrong with the parentheses of an expression, and where; None: they match."""
    opened: list[int] = []
    for place, letter in enumerate(text, 1):
        if letter == "(":
            opened.append(place)
        elif letter == ")" and not opened:
            return f"unexpected ')' at character {place}; no '(' is open"
        elif letter == ")":
            opened.pop()
    return f"missing ')': the '(' at character {opened[-1]} is not closed" if opened else None


def suggest(word: Any, allowed: Iterable[str]) -> str:
    allowed = sorted(allowed)
    close = difflib.get_close_matches(str(word), allowed, n=1, cutoff=0.6) if word is not None else []
    near = f"; did you mean {close[0]!r}?" if close else ""
    return f"{near} (allowed: {', '.join(allowed)})"


# --- types -----------------------------------------------------------------------------------------------------------

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
_MANY = {int: "integers", float: "numbers", bool: "booleans", str: "texts"}


def type_text(annotation: Any) -> str:
    """A field's type in words: `an integer`, `a norm`, `'a' or 'b'`, `a list of integers`, `a text or null`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        found = [type_text(one) for one in arguments if one is not type(None)]
        return join_or([*dict.fromkeys(found), *(["null"] if type(None) in arguments else [])])
    if origin is typing.Literal:
        return join_or([f"'{value}'" if isinstance(value, str) else show(value) for value in arguments])
    if origin in (tuple, list, frozenset, set):
        return _list_text(arguments)
    if origin in (dict, Mapping):
        return "a mapping"
    if annotation in _WORDS:
        return _WORDS[annotation]
    if slot := getattr(annotation, "slot", ""):
        return f"{'an' if slot[0] in 'aeiou' else 'a'} {slot}"
    return {"Path": "a path", "Any": "any value", "dict": "a mapping"}.get(
        getattr(annotation, "__name__", str(annotation)), "a mapping of keys"
    )


def _list_text(arguments: tuple[Any, ...]) -> str:
    plain = [typing.get_args(one)[0] if typing.get_origin(one) is typing.Annotated else one for one in arguments]
    if Ellipsis not in plain and len(plain) > 1:
        return f"a list of {len(plain)} {_MANY.get(plain[0], 'entries') if len(set(plain)) == 1 else 'entries'}"
    inner = plain[0] if plain else None
    if inner in _MANY:
        return f"a list of {_MANY[inner]}"
    return f"a list, each entry {type_text(inner)}" if inner is not None else "a list"


def join_or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def show(value: Any) -> str:
    """A value as in YAML, cut short."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


# --- errors of pydantic ----------------------------------------------------------------------------------------------


def _expected(what: str) -> Callable[[Any], str]:
    return lambda e: f"expected {what}, not {show(e['input'])}"


def _bound(words: str, key: str) -> Callable[[Any], str]:
    return lambda e: f"must be {words} {e['ctx'][key]:g}, not {show(e['input'])}"


def _entries(words: str, key: str) -> Callable[[Any], str]:
    return lambda e: f"needs {words} {e['ctx'][key]} entries, got {e['ctx']['actual_length']}"


_LIST, _MAPPING = _expected("a list"), _expected("a mapping of keys")
_MESSAGES: dict[str, Callable[[Any], str]] = {
    "missing": lambda e: "is required",
    "literal_error": lambda e: f"{show(e['input'])} is not allowed; expected {e['ctx']['expected']}",
    "value_error": lambda e: str(e["ctx"]["error"]),
    "assertion_error": lambda e: str(e["ctx"]["error"]),
    "slot": lambda e: f"{e['msg']}, not {show(e['input'])}",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), _expected("an integer")),
    **dict.fromkeys(("float_parsing", "float_type"), _expected("a number")),
    **dict.fromkeys(("bool_parsing", "bool_type"), _expected("true or false")),
    **dict.fromkeys(("string_type", "string_sub_type", "string_unicode"), _expected("a text")),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type", "iterable_type"), _LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), _MAPPING),
    "path_type": _expected("a path"),
    "none_required": _expected("null"),
    "finite_number": _expected("a finite number"),
    "greater_than": _bound("greater than", "gt"),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than": _bound("less than", "lt"),
    "less_than_equal": _bound("at most", "le"),
    "too_short": _entries("at least", "min_length"),
    "too_long": _entries("at most", "max_length"),
    "string_too_short": lambda e: f"must have at least {e['ctx']['min_length']} characters, not {show(e['input'])}",
    "string_too_long": lambda e: f"must have at most {e['ctx']['max_length']} characters, not {show(e['input'])}",
    "string_pattern_mismatch": lambda e: f"must match {e['ctx']['pattern']}, not {show(e['input'])}",
}


def describe(e: Any) -> str:
    """One error of pydantic (an entry of `ValidationError.errors()`) in one short phrase."""
    if e["type"] in _MESSAGES:
        return _MESSAGES[e["type"]](e)
    return str(e["msg"]) if e["type"] == "config" else f"{e['msg']}, not {show(e['input'])}"


def find_union(annotation: Any, steps: Sequence[str | int]) -> tuple[int, Any] | None:
    """The first union on the way of an error below a field of this type, and the number of steps to it: pydantic has
    tried its members in turn, reports an error for each, and names the member in the next step."""
    for number, step in enumerate(steps):
        annotation = _without_null(annotation)
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (typing.Union, types.UnionType):
            return number, annotation
        if origin in (tuple, list) and isinstance(step, int):
            annotation = arguments[0 if Ellipsis in arguments or origin is list else min(step, len(arguments) - 1)]
        else:
            return None
    return None


def _without_null(annotation: Any) -> Any:
    """`X | None` and annotated types as X."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _without_null(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [one for one in typing.get_args(annotation) if one is not type(None)]
        return _without_null(members[0]) if len(members) == 1 else annotation
    return annotation
