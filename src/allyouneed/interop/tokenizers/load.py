"""The tokenizer of somebody else's model folder as ours, and ours as theirs.

A `tokenizer.json` is read as it is; without one, the files of the class that the folder names (classes.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.interop.tokenizers import templates as framing
from allyouneed.interop.tokenizers import vocab_files as plain_files
from allyouneed.interop.tokenizers.classes import KINDS, OF_MODEL, T5_NAMES, Files, Kind
from allyouneed.interop.tokenizers.sentencepiece import SentencePieces, build

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
TWO_SIDES = ("bart", "m2m_100", "marian", "mbart", "mt5", "switch_transformers", "t5", "whisper")
TOKENIZER, OPTIONS, NAMES, ADDED, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
LEGACY = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm")
T = TypeVar("T")
UNTYPED = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that make no types unless told to


def read(path: Path | str, config: Mapping[str, Any]) -> Vocabularies | None:
    """The tokenizers of a folder; None where it has none (images, numbers). `config`: the model's."""
    path = Path(path)
    options = plain_files.tree_of(path / OPTIONS)
    model = str(config.get("model_type", ""))
    kind_name = str(options.get("tokenizer_class") or config.get("tokenizer_class") or OF_MODEL.get(model, ""))
    kind_name = kind_name.removesuffix("Fast")
    files = [name for name in (TOKENIZER, *LEGACY) if (path / name).is_file()]
    if not files and not any(path.glob("*.tiktoken")) and kind_name != "ByT5Tokenizer":
        return None
    kind = KINDS.get(kind_name)
    names = _names(path, options, kind)
    writing = [plain_files.tree_of(path / GENERATION), config]
    if (path / "source.spm").is_file():
        return _marian(path, names, options, config, writing)
    if (path / TOKENIZER).is_file():
        inner = _guarded(path / TOKENIZER, lambda: _inner(path / TOKENIZER))
    elif kind is None:
        what = f"of class {kind_name}" if kind_name else "of an unknown class"
        raise UserError(f"{path}: a tokenizer {what} without tokenizer.json is not read; there are: {', '.join(KINDS)}")
    else:
        inner = _guarded(path, lambda: kind.read(Files(path, options, names)))
        _add(path, inner, options, names, kind)
    if options.get("clean_up_tokenization_spaces") is True and type(inner.model).__name__ != "BPE":
        inner.decoder = plain_files.tidied(inner.decoder)
    marks = _marks(path, inner, options, names, kind, made=not (path / TOKENIZER).is_file())
    found = _two_sides if model in TWO_SIDES or config.get("is_encoder_decoder") else _one_side
    made = found(path, inner, names, marks, kind, config, writing, options)
    if kind_name == "RoFormerTokenizer":
        made.source.notes.append(
            "RoFormer's tokenizer cuts Chinese into words with jieba first, which is not done here"
        )
    _fits(path, made, config)
    return made


def _inner(path: Path) -> Any:
    from tokenizers import Tokenizer as Inner

    inner = Inner.from_str(plain_files.text_of(path))
    if getattr(inner.model, "end_of_word_suffix", None) == "</w>":
        inner.decoder = plain_files.words_with_ends()
    return inner


def _guarded(path: Path, make: Callable[[], T]) -> T:
    """What a foreign file makes of the library: its errors are bare exceptions, and panics no `Exception` at all."""
    try:
        return make()
    except (UserError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(f"{path}: not a tokenizer that can be read: {str(error)[:200]}") from None


def _names(path: Path, options: Mapping[str, Any], kind: Kind | None) -> dict[str, str]:
    """What its special tokens are called, by role."""
    said = {**options, **plain_files.tree_of(path / NAMES)}
    found = dict(kind.names) if kind is not None else {}
    for role in ROLES:
        value = said.get(f"{role}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found


def _add(path: Path, inner: Any, options: Mapping[str, Any], names: Mapping[str, str], kind: Kind) -> None:
    """Special tokens are marked as such, and those that were added later get the ids that the files give them."""
    from tokenizers import AddedToken

    said = {**options, **plain_files.tree_of(path / NAMES)}
    listed = [said.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
    extra = [value for values in listed if isinstance(values, list) for value in values]
    details: dict[str, dict[str, Any]] = {}
    for value in [*(said.get(f"{role}_token") for role in ROLES), *extra]:
        if isinstance(value, dict) and isinstance(value.get("content"), str):
            details[value["content"]] = value
    wanted = dict.fromkeys([*names.values(), *kind.extra, *(v for v in extra if isinstance(v, str)), *details])
    later = plain_files.tree_of(path / ADDED)
    for number, value in (options.get("added_tokens_decoder") or {}).items():
        details[value["content"]] = value
        later[value["content"]] = int(number)
    known = inner.get_vocab_size(with_added_tokens=True)
    for text, number in sorted(later.items(), key=lambda both: both[1]):
        if type(number) is not int or number < 0 or number > known + len(later):
            raise UserError(f"{path}: the added token {text!r} has the id {number!r}, which does not follow the others")
        special = details.get(text, {}).get("special", True)
        _put(inner, AddedToken(text, **_manners(details.get(text, {})), special=special))
        if inner.token_to_id(text) != number:
            raise UserError(f"{path}: the added token {text!r} should have the id {number}, but gets another")
    for text in wanted:
        if inner.token_to_id(text) is not None:
            manners = _manners(details.get(text, {}))
            if text == names.get("mask") and text not in details:
                manners["lstrip"] = kind.eats_space
            _put(inner, AddedToken(text, **manners, special=True))


def _put(inner: Any, token: Any) -> None:
    (inner.add_special_tokens if token.special else inner.add_tokens)([token])


def _manners(details: Mapping[str, Any]) -> dict[str, bool]:
    return {key: bool(details.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")}


def _marks(
    path: Path, inner: Any, options: Mapping[str, Any], names: Mapping[str, str], kind: Kind | None, made: bool
) -> Template:
    """`made`: of files that do not say how a text is framed."""
    ids = inner.get_vocab(with_added_tokens=True)
    shape = kind.shape if kind is not None else None
    said = [options.get(f"add_{role}_token") for role in ("bos", "eos")]
    if made and shape is not None:
        inner.post_processor = framing.template(names, shape, ids)
    elif shape is None and (made or any(value is not None for value in said)):
        begins = kind.begins if kind is not None and made else False
        marks = [begins if said[0] is None else bool(said[0]), bool(said[1])]
        before, after = (
            role if mark and role in names else "" for role, mark in zip(("bos", "eos"), marks, strict=True)
        )
        one = f"{before} A {after}"
        inner.post_processor = framing.template(names, (one, f"{one} {before}:1 B:1 {after}:1".replace(" :1", "")), ids)
    return _guarded(path, lambda: framing.frame(inner))


def _one_side(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    marks: Template,
    kind: Kind | None,
    config: Mapping[str, Any],
    writing: list[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Vocabularies:
    kinds = config.get("type_vocab_size")
    if (isinstance(kinds, int) and max(marks.types) >= kinds) or not _tells_types(options):
        marks = replace(marks, types=(0, 0), closing=None)
    tokenizer = _tokenizer(path, inner, names, framing.writing(marks, writing), writing)
    return Vocabularies(tokenizer, tokenizer)


def _tells_types(options: Mapping[str, Any]) -> bool:
    """Whether their tokenizer tells kinds of text apart: it says which inputs it makes, or is of a class that does."""
    made = options.get("model_input_names")
    if isinstance(made, list):
        return "token_type_ids" in made
    return options.get("tokenizer_class") not in UNTYPED


def _two_sides(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    marks: Template,
    kind: Kind | None,
    config: Mapping[str, Any],
    writing: list[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Vocabularies:
    reads = _tokenizer(path, inner, names, marks, writing)
    if kind is not None and kind.language is not None:
        spoken = framing.spoken(reads.added)
        if not spoken:
            raise UserError(f"{path}: the tokenizer names no languages; its special tokens should have them")
        place = "after" if options.get("legacy_behaviour") else kind.language
        marks = framing.with_language(marks, spoken.values(), place)
        marks = replace(marks, spoken=spoken.get(str(options.get("src_lang"))))
        reads = _tokenizer(path, inner, names, marks, writing, spoken)
    return Vocabularies(reads, _target(path, inner, names, config, writing, reads))


def _target(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    config: Mapping[str, Any],
    writing: list[Mapping[str, Any]],
    reads: Tokenizer,
    **more: Any,
) -> Tokenizer:
    """What the same tokens are for the side that writes: it begins with the model's own start token."""
    starts = [tree.get("decoder_start_token_id") for tree in writing] + [config.get("bos_token_id")]
    start = next((number for value in starts for number in framing.numbers(value)), reads.pad)
    after = (reads.eos,)
    marks = framing.writing(Template(between=after, after=after, opening=(start,), types=(0, 0)), writing)
    return _tokenizer(path, inner, names, marks, writing, bos=start, **more)


def _marian(
    path: Path,
    names: dict[str, str],
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    writing: list[Mapping[str, Any]],
) -> Vocabularies:
    """Pieces by two SentencePiece models, ids by a vocabulary they share (or one for each)."""
    names = dict(T5_NAMES) | names
    separate = bool(options.get("separate_vocabs", False))
    vocabularies = ["vocab.json", "target_vocab.json" if separate else "vocab.json"]
    sides = []
    for model, vocabulary in zip(("source.spm", "target.spm"), vocabularies, strict=True):
        plain_files.bounded(path / model)
        pieces, numbers = SentencePieces.read(path / model), plain_files.numbers_of(path / vocabulary)
        if names["unk"] not in numbers or names["eos"] not in numbers:
            raise UserError(f"{path / vocabulary}: has no {names['unk']} or no {names['eos']}; it is not whole")
        special = [*names.values(), *(text for text in numbers if text.startswith(">>") and text.endswith("<<"))]
        make = partial(build, pieces, numbers, special=special, unknown=names["unk"])
        inner = _guarded(path / model, make)
        sides.append((inner, len(numbers)))
    (source, known), (target, known_target) = sides
    eos = plain_files.numbers_of(path / "vocab.json")[names["eos"]]
    spoken = {
        text[2:-2]: number
        for text, number in plain_files.numbers_of(path / "vocab.json").items()
        if text.startswith(">>") and text.endswith("<<")
    }
    marks = Template(between=(), after=(eos,), types=(0, 0))
    reads = _tokenizer(path, source, names, marks, writing, spoken, known=known)
    found = Vocabularies(reads, _target(path, target, names, config, writing, reads, known=known_target))
    _fits(path, found, config)
    return found


def _number(inner: Any, names: Mapping[str, str], *roles: str) -> int | None:
    found = [inner.token_to_id(names[role]) for role in roles if role in names]
    return next((number for number in found if number is not None), None)


def _tokenizer(
    path: Path,
    inner: Any,
    names: Mapping[str, str],
    marks: Template,
    writing: list[Mapping[str, Any]],
    languages: Mapping[str, int] | None = None,
    bos: int | None = None,
    known: int | None = None,
) -> Tokenizer:
    def said(role: str) -> int | None:
        return next((n for tree in writing for n in framing.numbers(tree.get(f"{role}_token_id"))), None)

    def first(*choices: int | None) -> int | None:
        return next((number for number in choices if number is not None), None)

    eos = first(said("eos"), _number(inner, names, "eos", "sep"))
    if eos is None:
        raise UserError(f"{path}: neither the tokenizer nor the model says which token ends a text (eos_token)")
    begin = first(bos, _number(inner, names, "bos", "cls"), said("bos"), eos)
    pad = first(_number(inner, names, "pad"), said("pad"), eos)
    assert begin is not None and pad is not None
    mask = _number(inner, names, "mask")
    return Tokenizer(inner, pad, begin, eos, languages or {}, template=marks, mask=mask, known=known)


def _fits(path: Path, found: Vocabularies, config: Mapping[str, Any]) -> None:
    """Every token needs a row of the model's embedding."""
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    sizes = [("source", found.source, size), ("target", found.target, config.get("decoder_vocab_size") or size)]
    for side, tokenizer, room in sizes:
        if not isinstance(room, int):
            continue
        marks = tokenizer.template
        used = {*marks.before, *marks.between, *marks.after, *marks.opening, *marks.forced, *marks.stops, *marks.never}
        strange = sorted(n for n in used | {tokenizer.pad, tokenizer.bos, tokenizer.eos} if not 0 <= n < room)
        if strange:
            raise UserError(
                f"{path}: special tokens have the ids {strange}, the model's embedding only {room} rows; config.json, "
                "generation_config.json or the tokenizer names them wrongly"
            )
        if tokenizer.size > room:
            raise UserError(
                f"{path}: the {side} tokenizer has {tokenizer.size} tokens, the model's embedding {room}; "
                "they do not belong together"
            )


def write(vocabularies: Vocabularies, path: Path | str, config: Mapping[str, Any]) -> None:
    """Files that `transformers` reads, with a text framed as the model of this `config` reads it. A target vocabulary
    of its own goes to a folder beside."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    source, target = vocabularies.source, vocabularies.target
    if source.beyond or target.beyond:
        raise UserError(
            "the tokenizer knows pieces that the model has no number for, which tokenizer.json cannot say; "
            "import the folder it came from and export that: its own files are kept"
        )
    marks = _read_as(source, config)
    _write_one(source, marks, path, config)
    if source.text != target.text:
        (path / "target").mkdir(exist_ok=True)
        _write_one(target, marks, path / "target", config)


def _read_as(tokenizer: Tokenizer, config: Mapping[str, Any]) -> Template:
    """What stands around a text that a model of this config is given."""
    if tokenizer.foreign:
        return tokenizer.template
    names = config.get("architectures") or [""]
    end = (tokenizer.eos,)
    if config.get("is_encoder_decoder") or config.get("model_type") in TWO_SIDES:
        return Template(between=end, after=end, types=(0, 0))
    if str(names[0]).endswith(("CausalLM", "LMHeadModel")):
        return Template(before=tokenizer.opening, between=end)
    return tokenizer.template


def _write_one(tokenizer: Tokenizer, marks: Template, path: Path, config: Mapping[str, Any]) -> None:
    names = {role: name for role, name in _roles(tokenizer, marks).items() if name is not None}
    special = {f"{role}_token": name for role, name in names.items()}
    tree = json.loads(tokenizer.text)
    tree["post_processor"] = _post_processor(tokenizer, marks)
    tree["truncation"] = tree["padding"] = None
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int):
        options["model_max_length"] = limit
    _dump(path / TOKENIZER, tree)
    _dump(path / OPTIONS, options)
    _dump(path / NAMES, special)


def _dump(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _roles(tokenizer: Tokenizer, marks: Template) -> dict[str, str | None]:
    """Which special token does what: the first mark also stands for the whole text, the last one parts two."""
    ids = {"pad": tokenizer.pad, "bos": tokenizer.bos, "eos": tokenizer.eos}
    return {role: tokenizer.added.get(number) for role, number in ids.items()} | {
        "mask": tokenizer.added.get(tokenizer.mask) if tokenizer.has_mask else None,
        "cls": tokenizer.added.get(marks.before[0]) if marks.before else None,
        "sep": tokenizer.added.get(marks.between[-1]) if marks.between else None,
    }


def _post_processor(tokenizer: Tokenizer, marks: Template) -> dict[str, Any]:
    first, second = marks.types
    last = second if marks.closing is None else marks.closing

    def mark(number: int, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokenizer.added[number], "type_id": kind}}

    def after(kind: int) -> list[dict[str, Any]]:
        kinds = [kind] * len(marks.after)
        if kinds and marks.closing is not None:
            kinds[-1] = last
        return [mark(number, k) for number, k in zip(marks.after, kinds, strict=True)]

    begin = [mark(number, first) for number in marks.before]
    one = {"Sequence": {"id": "A", "type_id": first}}
    other = {"Sequence": {"id": "B", "type_id": second}}
    between = [mark(number, first) for number in marks.between]
    used = {*marks.before, *marks.between, *marks.after}
    return {
        "type": "TemplateProcessing",
        "single": [*begin, one, *after(first)],
        "pair": [*begin, one, *between, other, *after(second)],
        "special_tokens": {
            tokenizer.added[n]: {"id": tokenizer.added[n], "ids": [n], "tokens": [tokenizer.added[n]]}
            for n in sorted(used)
        },
    }
