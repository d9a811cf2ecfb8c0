"""Import the tokenizer of a Hugging Face folder, and export ours.

A `tokenizer.json` is read unchanged; without one, the files of the tokenizer class that the folder names (classes.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.bounds import check_tokenizer, parse_tokenizer
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, read_json
from allyouneed.interop.tokenizers import templates, vocab_files
from allyouneed.interop.tokenizers.classes import CLASSES, DEFAULT_CLASS, T5_NAMES, TokenizerClass, TokenizerFiles
from allyouneed.interop.tokenizers.sentencepiece import SentencePieceModel, build

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
ENCODER_DECODERS = ("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "switch_transformers", "t5", "whisper")
TOKENIZER, OPTIONS, NAMES, ADDED, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
LEGACY = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm")
T = TypeVar("T")
CLASSES_WITHOUT_TYPES = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
)  # classes that produce no token types by default


def read(path: Path | str, config: Mapping[str, Any]) -> Vocabularies | None:
    """The tokenizers of a folder; None where it has none (image models). `config`: the model's."""
    path = Path(path)
    options = read_json(path, OPTIONS, needed=False)
    model = str(config.get("model_type", ""))
    class_name = str(options.get("tokenizer_class") or config.get("tokenizer_class") or DEFAULT_CLASS.get(model, ""))
    class_name = class_name.removesuffix("Fast")
    files = [name for name in (TOKENIZER, *LEGACY) if has_file(path, name)]
    if not files and not any(path.glob("*.tiktoken")) and class_name != "ByT5Tokenizer":
        return None
    kind = CLASSES.get(class_name)
    names = _special_names(path, options, kind)
    settings = [read_json(path, GENERATION, needed=False), config]
    if "source.spm" in files:
        return _marian(path, names, options, config, settings)
    if TOKENIZER in files:
        inner = _inner(path / TOKENIZER)
    elif kind is None:
        what = f"of class {class_name}" if class_name else "without a class"
        raise UserError(
            f"{path}: no tokenizer.json, and a tokenizer {what} is not supported (allowed: {', '.join(CLASSES)})"
        )
    else:
        inner = convert_errors(path, lambda: kind.read(TokenizerFiles(path, options, names)))
        _add_tokens(path, inner, options, names, kind)
        check_tokenizer(inner, str(path))
    if options.get("clean_up_tokenization_spaces") is True and type(inner.model).__name__ != "BPE":
        inner.decoder = vocab_files.clean_up_spaces(inner.decoder)
    template = _find_template(path, inner, options, names, kind, made=TOKENIZER not in files)
    build_vocabs = _two_sides if model in ENCODER_DECODERS or config.get("is_encoder_decoder") else _one_side
    made = build_vocabs(path, inner, names, template, kind, config, settings, options)
    if class_name == "RoFormerTokenizer":
        made.source.notes.append(
            "RoFormer's tokenizer splits Chinese into words with jieba first, which is not supported"
        )
    _check_vocab_size(path, made, config)
    return made


def _inner(path: Path) -> Any:
    inner = parse_tokenizer(vocab_files.read_text(path), str(path))
    if getattr(inner.model, "end_of_word_suffix", None) == "</w>":
        inner.decoder = vocab_files.clip_decoder()
    return inner


def convert_errors(path: Path, make: Callable[[], T]) -> T:
    """Turn any error of the tokenizers library into a `UserError`: it raises bare exceptions, and its panics are not
    subclasses of `Exception`."""
    try:
        return make()
    except (UserError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(f"{path}: cannot be read as a tokenizer: {str(error)[:200]}") from None


def _special_names(path: Path, options: Mapping[str, Any], kind: TokenizerClass | None) -> dict[str, str]:
    """Special tokens by role."""
    settings = {**options, **read_json(path, NAMES, needed=False)}
    found = dict(kind.names) if kind is not None else {}
    for role in ROLES:
        value = settings.get(f"{role}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found


def _add_tokens(
    path: Path, inner: Any, options: Mapping[str, Any], names: Mapping[str, str], kind: TokenizerClass
) -> None:
    """Mark special tokens as such, and give tokens that were added later the ids in the files."""
    from tokenizers import AddedToken

    settings = {**options, **read_json(path, NAMES, needed=False)}
    listed = [settings.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
    extra = [value for values in listed if isinstance(values, list) for value in values]
    details: dict[str, dict[str, Any]] = {}
    for value in [*(settings.get(f"{role}_token") for role in ROLES), *extra]:
        if isinstance(value, dict) and isinstance(value.get("content"), str):
            details[value["content"]] = value
    wanted = dict.fromkeys([*names.values(), *kind.extra, *(v for v in extra if isinstance(v, str)), *details])
    later = read_json(path, ADDED, needed=False)
    for number, value in (options.get("added_tokens_decoder") or {}).items():
        details[value["content"]] = value
        later[value["content"]] = int(number)
    known = inner.get_vocab_size(with_added_tokens=True)
    for text, number in sorted(later.items(), key=lambda both: both[1]):
        if type(number) is not int or number < 0 or number > known + len(later):
            raise UserError(f"{path}: added token {text!r}: id {number!r} does not follow the other ids")
        special = details.get(text, {}).get("special", True)
        _add_token(inner, AddedToken(text, **_token_flags(details.get(text, {})), special=special))
        if inner.token_to_id(text) != number:
            raise UserError(f"{path}: added token {text!r} should have id {number}, but gets {inner.token_to_id(text)}")
    for text in wanted:
        if inner.token_to_id(text) is not None:
            flags = _token_flags(details.get(text, {}))
            if text == names.get("mask") and text not in details:
                flags["lstrip"] = kind.mask_lstrip
            _add_token(inner, AddedToken(text, **flags, special=True))


def _add_token(inner: Any, token: Any) -> None:
    (inner.add_special_tokens if token.special else inner.add_tokens)([token])


def _token_flags(details: Mapping[str, Any]) -> dict[str, bool]:
    return {key: bool(details.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")}


def _find_template(
    path: Path,
    inner: Any,
    options: Mapping[str, Any],
    names: Mapping[str, str],
    kind: TokenizerClass | None,
    made: bool,
) -> Template:
    """`made`: from files that define no template."""
    ids = inner.get_vocab(with_added_tokens=True)
    text = kind.template if kind is not None else None
    added = [options.get(f"add_{role}_token") for role in ("bos", "eos")]
    if made and text is not None:
        inner.post_processor = templates.build_template(names, text, ids)
    elif text is None and (made or any(value is not None for value in added)):
        adds_bos = kind.adds_bos if kind is not None and made else False
        flags = [adds_bos if added[0] is None else bool(added[0]), bool(added[1])]
        before, after = (
            role if flag and role in names else "" for role, flag in zip(("bos", "eos"), flags, strict=True)
        )
        one = f"{before} A {after}"
        pair = f"{one} {before}:1 B:1 {after}:1".replace(" :1", "")
        inner.post_processor = templates.build_template(names, (one, pair), ids)
    return convert_errors(path, lambda: templates.read_template(inner))


def _one_side(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    template: Template,
    kind: TokenizerClass | None,
    config: Mapping[str, Any],
    settings: list[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Vocabularies:
    kinds = config.get("type_vocab_size")
    if (isinstance(kinds, int) and max(template.types) >= kinds) or not _has_token_types(options):
        template = replace(template, types=(0, 0), closing=None)
    tokenizer = _tokenizer(path, inner, names, templates.with_generation_settings(template, settings), settings)
    return Vocabularies(tokenizer, tokenizer)


def _has_token_types(options: Mapping[str, Any]) -> bool:
    """Whether the tokenizer produces token types, by its `model_input_names` or its class."""
    inputs = options.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    return options.get("tokenizer_class") not in CLASSES_WITHOUT_TYPES


def _two_sides(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    template: Template,
    kind: TokenizerClass | None,
    config: Mapping[str, Any],
    settings: list[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Vocabularies:
    source = _tokenizer(path, inner, names, template, settings)
    if kind is not None and kind.language is not None:
        codes = templates.language_tokens(source.added)
        if not codes:
            raise UserError(f"{path}: the special tokens of the tokenizer contain no language tokens")
        side = "after" if options.get("legacy_behaviour") else kind.language
        template = templates.without_language_tokens(template, codes.values(), side)
        template = replace(template, spoken=codes.get(str(options.get("src_lang"))))
        source = _tokenizer(path, inner, names, template, settings, codes)
    return Vocabularies(source, _target(path, inner, names, config, settings, source))


def _target(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    config: Mapping[str, Any],
    settings: list[Mapping[str, Any]],
    source: Tokenizer,
    **more: Any,
) -> Tokenizer:
    """The tokenizer of the target side: it starts with the model's own start token."""
    starts = [tree.get("decoder_start_token_id") for tree in settings] + [config.get("bos_token_id")]
    start = next((number for value in starts for number in templates.token_ids(value)), source.pad)
    after = (source.eos,)
    template = Template(between=after, after=after, opening=(start,), types=(0, 0))
    template = templates.with_generation_settings(template, settings)
    return _tokenizer(path, inner, names, template, settings, bos=start, **more)


def _marian(
    path: Path,
    names: dict[str, str],
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    settings: list[Mapping[str, Any]],
) -> Vocabularies:
    """Two SentencePiece models split the texts; the ids come from one shared vocabulary, or one per side."""
    names = dict(T5_NAMES) | names
    separate = bool(options.get("separate_vocabs", False))
    vocabularies = ["vocab.json", "target_vocab.json" if separate else "vocab.json"]
    sides = []
    for model, vocabulary in zip(("source.spm", "target.spm"), vocabularies, strict=True):
        pieces, ids = SentencePieceModel.read(path / model), vocab_files.read_vocab(path / vocabulary)
        if names["unk"] not in ids or names["eos"] not in ids:
            raise UserError(f"{path / vocabulary}: {names['unk']} or {names['eos']} is missing; the file is incomplete")
        special = [*names.values(), *(text for text in ids if text.startswith(">>") and text.endswith("<<"))]
        make = partial(build, pieces, ids, special=special, unknown=names["unk"])
        inner = convert_errors(path / model, make)
        check_tokenizer(inner, str(path / model))
        sides.append((inner, len(ids)))
    (source_inner, known), (target_inner, known_target) = sides
    shared = vocab_files.read_vocab(path / "vocab.json")
    eos = shared[names["eos"]]
    languages = {text[2:-2]: number for text, number in shared.items() if text.startswith(">>") and text.endswith("<<")}
    template = Template(between=(), after=(eos,), types=(0, 0))
    source = _tokenizer(path, source_inner, names, template, settings, languages, known=known)
    target = _target(path, target_inner, names, config, settings, source, known=known_target)
    found = Vocabularies(source, target)
    _check_vocab_size(path, found, config)
    return found


def _number(inner: Any, names: Mapping[str, str], *roles: str) -> int | None:
    found = [inner.token_to_id(names[role]) for role in roles if role in names]
    return next((number for number in found if number is not None), None)


def _tokenizer(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    template: Template,
    settings: list[Mapping[str, Any]],
    languages: Mapping[str, int] | None = None,
    bos: int | None = None,
    known: int | None = None,
) -> Tokenizer:
    def setting(role: str) -> int | None:
        return next((n for tree in settings for n in templates.token_ids(tree.get(f"{role}_token_id"))), None)

    def first(*choices: int | None) -> int | None:
        return next((number for number in choices if number is not None), None)

    eos = first(setting("eos"), _number(inner, names, "eos", "sep"))
    if eos is None:
        raise UserError(f"{path}: neither the tokenizer nor the model defines eos_token")
    begin = first(bos, _number(inner, names, "bos", "cls"), setting("bos"), eos)
    pad = first(_number(inner, names, "pad"), setting("pad"), eos)
    assert begin is not None and pad is not None
    mask = _number(inner, names, "mask")
    return Tokenizer(inner, pad, begin, eos, languages or {}, template=template, mask=mask, known=known)


def _check_vocab_size(path: Path, found: Vocabularies, config: Mapping[str, Any]) -> None:
    """Every token needs a row of the model's embedding."""
    text_config = config.get("text_config")
    size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    sizes = [("source", found.source, size), ("target", found.target, config.get("decoder_vocab_size") or size)]
    for side, tokenizer, rows in sizes:
        if not isinstance(rows, int):
            continue
        template = tokenizer.template
        used = {
            *template.before,
            *template.between,
            *template.after,
            *template.opening,
            *template.forced,
            *template.stops,
            *template.never,
        }
        wrong = sorted(n for n in used | {tokenizer.pad, tokenizer.bos, tokenizer.eos} if not 0 <= n < rows)
        if wrong:
            raise UserError(
                f"{path}: special token ids {wrong} are outside the {rows} rows of the embedding; fix them in "
                "config.json, generation_config.json or the tokenizer"
            )
        if tokenizer.size > rows:
            raise UserError(
                f"{path}: the {side} tokenizer has {tokenizer.size} tokens, the model's embedding {rows} rows; they do "
                "not belong together"
            )


def write(vocabularies: Vocabularies, path: Path | str, config: Mapping[str, Any]) -> None:
    """Write files for `transformers`, with the template that a model of this `config` expects. A separate target
    vocabulary goes into the subfolder `target`."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    source, target = vocabularies.source, vocabularies.target
    if source.beyond or target.beyond:
        raise UserError(
            "the tokenizer has pieces without an id in the model, which tokenizer.json cannot express; import the "
            "original folder and export that: its own files are kept"
        )
    template = _input_template(source, config)
    _write_tokenizer(source, template, path, config)
    if source.text != target.text:
        (path / "target").mkdir(exist_ok=True)
        _write_tokenizer(target, template, path / "target", config)


def _input_template(tokenizer: Tokenizer, config: Mapping[str, Any]) -> Template:
    """The special tokens around an input of a model with this config."""
    if tokenizer.foreign:
        return tokenizer.template
    names = config.get("architectures") or [""]
    end = (tokenizer.eos,)
    if config.get("is_encoder_decoder") or config.get("model_type") in ENCODER_DECODERS:
        return Template(between=end, after=end, types=(0, 0))
    if str(names[0]).endswith(("CausalLM", "LMHeadModel")):
        return Template(before=tokenizer.opening, between=end)
    return tokenizer.template


def _write_tokenizer(tokenizer: Tokenizer, template: Template, path: Path, config: Mapping[str, Any]) -> None:
    names = {role: name for role, name in _roles(tokenizer, template).items() if name is not None}
    special = {f"{role}_token": name for role, name in names.items()}
    tree = json.loads(tokenizer.text)
    tree["post_processor"] = _post_processor(tokenizer, template)
    tree["truncation"] = tree["padding"] = None
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int):
        options["model_max_length"] = limit
    _write_json(path / TOKENIZER, tree)
    _write_json(path / OPTIONS, options)
    _write_json(path / NAMES, special)


def _write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _roles(tokenizer: Tokenizer, template: Template) -> dict[str, str | None]:
    """Special tokens by role: the first one is also cls, the last one between two texts is sep."""
    ids = {"pad": tokenizer.pad, "bos": tokenizer.bos, "eos": tokenizer.eos}
    return {role: tokenizer.added.get(number) for role, number in ids.items()} | {
        "mask": tokenizer.added.get(tokenizer.mask) if tokenizer.has_mask else None,
        "cls": tokenizer.added.get(template.before[0]) if template.before else None,
        "sep": tokenizer.added.get(template.between[-1]) if template.between else None,
    }


def _post_processor(tokenizer: Tokenizer, template: Template) -> dict[str, Any]:
    first, second = template.types
    last = second if template.closing is None else template.closing

    def token(number: int, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokenizer.added[number], "type_id": kind}}

    def after(kind: int) -> list[dict[str, Any]]:
        kinds = [kind] * len(template.after)
        if kinds and template.closing is not None:
            kinds[-1] = last
        return [token(number, k) for number, k in zip(template.after, kinds, strict=True)]

    begin = [token(number, first) for number in template.before]
    one = {"Sequence": {"id": "A", "type_id": first}}
    other = {"Sequence": {"id": "B", "type_id": second}}
    between = [token(number, first) for number in template.between]
    used = {*template.before, *template.between, *template.after}
    return {
        "type": "TemplateProcessing",
        "single": [*begin, one, *after(first)],
        "pair": [*begin, one, *between, other, *after(second)],
        "special_tokens": {
            tokenizer.added[n]: {"id": tokenizer.added[n], "ids": [n], "tokens": [tokenizer.added[n]]}
            for n in sorted(used)
        },
    }
