"""Import the tokenizer of a Hugging Face folder, and export ours.

A `tokenizer.json` is read unchanged; without one, the files of the tokenizer class that the folder names (classes.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from allyouneed.config import tree_of
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.bounds import check_tokenizer, parse_tokenizer
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, read_json
from allyouneed.interop.tokenizers import templates, vocab_files
from allyouneed.interop.tokenizers.classes import CLASSES, DEFAULT_CLASS, T5_NAMES, TokenizerClass, TokenizerFiles
from allyouneed.interop.tokenizers.sentencepiece import SentencePieceModel, build
from allyouneed.nn.models.base import Model

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
    named = {**options, **read_json(path, NAMES, needed=False)}
    settings = [read_json(path, GENERATION, needed=False), config]
    folder = TokenizerFolder(path, config, options, named, kind, _special_names(named, kind), settings)
    if "source.spm" in files:
        made = folder.marian()
    else:
        inner = folder.inner(class_name, TOKENIZER in files)
        template = folder.find_template(inner, made=TOKENIZER not in files)
        two_sides = model in ENCODER_DECODERS or config.get("is_encoder_decoder")
        made = folder.two_sides(inner, template) if two_sides else folder.one_side(inner, template)
    if class_name == "RoFormerTokenizer":
        made.source.notes.append(
            "RoFormer's tokenizer splits Chinese into words with jieba first, which is not supported"
        )
    _check_vocab_size(path, made, config)
    return made


def _special_names(named: Mapping[str, Any], kind: TokenizerClass | None) -> dict[str, str]:
    """Special tokens by role."""
    found = dict(kind.names) if kind is not None else {}
    for role in ROLES:
        value = named.get(f"{role}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found


@dataclass(frozen=True)
class TokenizerFolder:
    """A folder with a tokenizer. `options`: of the tokenizer, `named`: with its special tokens, `config`: of the model;
    `names`: special tokens by role; `settings`: where token ids of the model are, the first counts."""

    path: Path
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    named: Mapping[str, Any]
    kind: TokenizerClass | None
    names: dict[str, str]
    settings: list[Mapping[str, Any]]

    def inner(self, class_name: str, is_stored: bool) -> Any:
        """The tokenizer of the library: `tokenizer.json`, or made of the files of its class."""
        if is_stored:
            found = _inner(self.path / TOKENIZER)
        elif (kind := self.kind) is None:
            what = f"of class {class_name}" if class_name else "without a class"
            raise UserError(
                f"{self.path}: no tokenizer.json, and a tokenizer {what} is not supported (allowed: "
                f"{', '.join(CLASSES)})"
            )
        else:
            files = TokenizerFiles(self.path, self.options, self.names)
            found = convert_errors(self.path, lambda: kind.read(files))
            self.add_tokens(found, kind)
            check_tokenizer(found, str(self.path))
        if self.options.get("clean_up_tokenization_spaces") is True and type(found.model).__name__ != "BPE":
            found.decoder = vocab_files.clean_up_spaces(found.decoder)
        return found

    def find_template(self, inner: Any, made: bool) -> Template:
        """`made`: from files that define no template."""
        names, kind = self.names, self.kind
        ids = inner.get_vocab(with_added_tokens=True)
        text = kind.template if kind is not None else None
        added = [self.options.get(f"add_{role}_token") for role in ("bos", "eos")]
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
        return convert_errors(self.path, lambda: templates.read_template(inner))

    def one_side(self, inner: Any, template: Template) -> Vocabularies:
        kinds = self.config.get("type_vocab_size")
        if (isinstance(kinds, int) and max(template.types) >= kinds) or not _has_token_types(self.options):
            template = replace(template, types=(0, 0), closing=None)
        tokenizer = self.tokenizer(inner, templates.with_generation_settings(template, self.settings))
        return Vocabularies(tokenizer, tokenizer)

    def two_sides(self, inner: Any, template: Template) -> Vocabularies:
        source, kind = self.tokenizer(inner, template), self.kind
        if kind is not None and kind.language is not None:
            codes = templates.language_tokens(source.added)
            if not codes:
                raise UserError(f"{self.path}: the special tokens of the tokenizer contain no language tokens")
            side = "after" if self.options.get("legacy_behaviour") else kind.language
            template = templates.without_language_tokens(template, codes.values(), side)
            template = replace(template, spoken=codes.get(str(self.options.get("src_lang"))))
            source = self.tokenizer(inner, template, codes)
        return Vocabularies(source, self.target(inner, source))

    def target(self, inner: Any, source: Tokenizer, **more: Any) -> Tokenizer:
        """The tokenizer of the target side: it starts with the model's own start token."""
        starts = [tree.get("decoder_start_token_id") for tree in self.settings] + [self.config.get("bos_token_id")]
        start = next((number for value in starts for number in templates.token_ids(value)), source.pad)
        after = (source.eos,)
        template = Template(between=after, after=after, opening=(start,), types=(0, 0))
        template = templates.with_generation_settings(template, self.settings)
        return self.tokenizer(inner, template, bos=start, **more)

    def marian(self) -> Vocabularies:
        """Two SentencePiece models split the texts; the ids come from one shared vocabulary, or one per side."""
        path, names = self.path, dict(T5_NAMES) | self.names
        folder = replace(self, names=names)
        separate = bool(self.options.get("separate_vocabs", False))
        vocabularies = ["vocab.json", "target_vocab.json" if separate else "vocab.json"]
        sides = []
        for model, vocabulary in zip(("source.spm", "target.spm"), vocabularies, strict=True):
            pieces, ids = SentencePieceModel.read(path / model), vocab_files.read_vocab(path / vocabulary)
            if names["unk"] not in ids or names["eos"] not in ids:
                raise UserError(
                    f"{path / vocabulary}: {names['unk']} or {names['eos']} is missing; the file is incomplete"
                )
            special = [*names.values(), *(text for text in ids if text.startswith(">>") and text.endswith("<<"))]
            make = partial(build, pieces, ids, special=special, unknown=names["unk"])
            inner = convert_errors(path / model, make)
            check_tokenizer(inner, str(path / model))
            sides.append((inner, len(ids)))
        (source_inner, known), (target_inner, known_target) = sides
        shared = vocab_files.read_vocab(path / "vocab.json")
        eos = shared[names["eos"]]
        languages = {
            text[2:-2]: number for text, number in shared.items() if text.startswith(">>") and text.endswith("<<")
        }
        template = Template(between=(), after=(eos,), types=(0, 0))
        source = folder.tokenizer(source_inner, template, languages, known=known)
        target = folder.target(target_inner, source, known=known_target)
        return Vocabularies(source, target)

    def tokenizer(
        self,
        inner: Any,
        template: Template,
        languages: Mapping[str, int] | None = None,
        bos: int | None = None,
        known: int | None = None,
    ) -> Tokenizer:
        def setting(role: str) -> int | None:
            return next((n for tree in self.settings for n in templates.token_ids(tree.get(f"{role}_token_id"))), None)

        def first(*choices: int | None) -> int | None:
            return next((number for number in choices if number is not None), None)

        eos = first(setting("eos"), self.number(inner, "eos", "sep"))
        if eos is None:
            raise UserError(f"{self.path}: neither the tokenizer nor the model defines eos_token")
        begin = first(bos, self.number(inner, "bos", "cls"), setting("bos"), eos)
        pad = first(self.number(inner, "pad"), setting("pad"), eos)
        assert begin is not None and pad is not None
        mask = self.number(inner, "mask")
        return Tokenizer(inner, pad, begin, eos, languages or {}, template=template, mask=mask, known=known)

    def number(self, inner: Any, *roles: str) -> int | None:
        found = [inner.token_to_id(self.names[role]) for role in roles if role in self.names]
        return next((number for number in found if number is not None), None)

    def add_tokens(self, inner: Any, kind: TokenizerClass) -> None:
        """Mark special tokens as such, and give tokens that were added later the ids in the files."""
        from tokenizers import AddedToken

        listed = [self.named.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
        extra = [value for values in listed if isinstance(values, list) for value in values]
        details: dict[str, dict[str, Any]] = {}
        for value in [*(self.named.get(f"{role}_token") for role in ROLES), *extra]:
            if isinstance(value, dict) and isinstance(value.get("content"), str):
                details[value["content"]] = value
        wanted = dict.fromkeys([*self.names.values(), *kind.extra, *(v for v in extra if isinstance(v, str)), *details])
        later = read_json(self.path, ADDED, needed=False)
        for number, value in (self.options.get("added_tokens_decoder") or {}).items():
            details[value["content"]] = value
            later[value["content"]] = int(number)
        known = inner.get_vocab_size(with_added_tokens=True)
        for text, number in sorted(later.items(), key=lambda both: both[1]):
            if type(number) is not int or number < 0 or number > known + len(later):
                raise UserError(f"{self.path}: added token {text!r}: id {number!r} does not follow the other ids")
            special = details.get(text, {}).get("special", True)
            _add_token(inner, AddedToken(text, **_token_flags(details.get(text, {})), special=special))
            if inner.token_to_id(text) != number:
                raise UserError(
                    f"{self.path}: added token {text!r} should have id {number}, but gets {inner.token_to_id(text)}"
                )
        for text in wanted:
            if inner.token_to_id(text) is not None:
                flags = _token_flags(details.get(text, {}))
                if text == self.names.get("mask") and text not in details:
                    flags["lstrip"] = kind.mask_lstrip
                _add_token(inner, AddedToken(text, **flags, special=True))


def _has_token_types(options: Mapping[str, Any]) -> bool:
    """Whether the tokenizer produces token types, by its `model_input_names` or its class."""
    inputs = options.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    return options.get("tokenizer_class") not in CLASSES_WITHOUT_TYPES


def _inner(path: Path) -> Any:
    inner = parse_tokenizer(vocab_files.read_text(path), str(path))
    if getattr(inner.model, "end_of_word_suffix", None) == "</w>":
        inner.decoder = vocab_files.clip_decoder()
    return inner


def _add_token(inner: Any, token: Any) -> None:
    (inner.add_special_tokens if token.special else inner.add_tokens)([token])


def _token_flags(details: Mapping[str, Any]) -> dict[str, bool]:
    return {key: bool(details.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")}


def convert_errors(path: Path, make: Callable[[], T]) -> T:
    """Turn any error of the tokenizers library into a `UserError`: it raises bare exceptions, and its panics are not
    subclasses of `Exception`."""
    try:
        return make()
    except (UserError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(f"{path}: cannot be read as a tokenizer: {str(error)[:200]}") from None


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


def write(vocabularies: Vocabularies, path: Path | str, config: Model | None = None) -> None:
    """Write files for `transformers`, with the special tokens that a model of this config is given; without a config,
    those of the tokenizer. A separate target vocabulary goes into the subfolder `target`."""
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


def _input_template(tokenizer: Tokenizer, config: Model | None) -> Template:
    """The special tokens around an input of this model."""
    if tokenizer.foreign or config is None:
        return tokenizer.template
    tree = tree_of(config)
    end = (tokenizer.eos,)
    if tree["kind"] == "encoder-decoder":
        return Template(between=end, after=end, types=(0, 0))
    if tree["kind"] == "decoder" and tree.get("head", {}).get("kind", "vocabulary") == "vocabulary":
        return Template(before=tokenizer.opening, between=end)
    return tokenizer.template


def _write_tokenizer(tokenizer: Tokenizer, template: Template, path: Path, config: Model | None) -> None:
    names = {role: name for role, name in _roles(tokenizer, template).items() if name is not None}
    special = {f"{role}_token": name for role, name in names.items()}
    tree = json.loads(tokenizer.text)
    tree["post_processor"] = _post_processor(tokenizer, template)
    tree["truncation"] = tree["padding"] = None
    # versions differ in whether token types are given by default, and some models add vectors for any they get
    types = ["token_type_ids"] if config is not None and config.reads_types else []
    inputs = {"model_input_names": ["input_ids", *types, "attention_mask"]}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **inputs, **special}
    if config is not None and config.limit is not None:
        options["model_max_length"] = config.limit
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
