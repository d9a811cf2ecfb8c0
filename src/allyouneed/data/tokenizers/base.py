"""Text ⇄ token ids without loss: subwords over bytes, trained by the `tokenizers` library.

Both kinds start from the 256 bytes, so there is no unknown token and `decode(encode(text)) == text` for any text.
Nothing is normalised. Text is pre-tokenized into pieces no token crosses: a word with the space before it, a run of
Chinese or Japanese, one digit, punctuation. A special token such as `<pad>` spans several such pieces, so no learned
token can spell one, and text that contains one is encoded as ordinary text.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from allyouneed.config import Config, parse
from allyouneed.data.languages import find as find_language
from allyouneed.data.tokenizers.bounds import MAX_BYTES, parse_tokenizer
from allyouneed.data.tokenizers.byte_level import BYTE_OF, BYTES, show_bytes
from allyouneed.data.tokenizers.errors import translate_error
from allyouneed.data.tokenizers.plain import plain, unknown_id
from allyouneed.data.tokenizers.special_tokens import Id, Template
from allyouneed.data.tokenizers.subwords import train_subwords
from allyouneed.errors import UserError, near
from allyouneed.files.reading import file_in, has_file, named_file, read_json, read_text

if TYPE_CHECKING:
    from allyouneed.data.files.filters import Filters
    from allyouneed.data.files.readers import Files, Report
    from allyouneed.data.tokenizers.bpe_dropout import BPEDropout

PAD, BOS, EOS, MASK = "<pad>", "<s>", "</s>", "<mask>"
LANGUAGE = re.compile(r"<2(.+)>")
MAX_VOCAB = 4_000_000  # tokens; the largest published vocabularies have a quarter of it
EAST_ASIAN_CHARACTER = re.compile(  # EAST_ASIAN of subwords.py, for Python's own `re`
    "[\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3041-\u309f\u30a1-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00016fe0-\U00018cff\U0001aff0-\U0001b16f\U0001f200\U00020000-\U0003ffff]"
)

Special = Annotated[str, StringConstraints(pattern=r"^<[^<>\s]*[A-Za-z0-9][^<>\s]*>$")]


def language_token(tag: str) -> str:
    """The token a multilingual source sentence begins with: the language to translate into."""
    return f"<2{tag}>"


def sentinel(number: int) -> str:
    """The token that replaces a span (span corruption)."""
    return f"<cut{number}>"


class TokenizerConfig(Config):
    """What to train. `vocab` counts everything: bytes, special tokens, learned pieces."""

    kind: Literal["bpe", "unigram"] = "bpe"
    """Byte-pair encoding or a unigram model, both over bytes."""
    vocab: Annotated[int, Field(gt=0, le=MAX_VOCAB)] = 8000
    """Size of the vocabulary: bytes, special tokens and learned pieces."""
    joint: bool = True
    """One vocabulary for source and target."""
    min_frequency: PositiveInt | None = None
    """Learn only pieces that occur at least this often (byte-pair encoding); default: 2."""
    specials: tuple[Special, ...] = ()
    """Special tokens of your own."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "unigram" and self.min_frequency is not None:
            raise ValueError("min_frequency requires kind 'bpe'; unigram ranks pieces by likelihood")
        return self


class Marks(Config):
    """tokenizer.marks.json: what a foreign tokenizer.json does not contain."""

    pad: Id = 0
    bos: Id = 1
    eos: Id = 2
    mask: Id | None = None
    known: Id | None = None
    languages: dict[str, Id] | None = None
    marks: Template


def _nine_digits(number: str) -> str:
    return f"{float(number):.9g}"


class Tokenizer:
    """A trained tokenizer. Wraps any `tokenizers.Tokenizer`; a foreign one brings its own specials and `template`.

    "</s>" in a text is four characters, not EOS. `specials=True` parses the special tokens of a foreign tokenizer in
    the text (a chat prompt, T5's `<extra_id_0>`) as the original does.
    """

    def __init__(
        self,
        inner: Any,
        pad: int = 0,
        bos: int = 1,
        eos: int = 2,
        languages: Mapping[str, int] | None = None,
        notes: Iterable[str] = (),
        template: Template | None = None,
        mask: int | None = None,
        known: int | None = None,
    ) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.pad, self.bos, self.eos = pad, bos, eos
        self.foreign = template is not None
        self.template = Template.default(bos, eos) if template is None else template
        self._mask, self._known = mask, known
        self._size = int(max(inner.get_vocab(with_added_tokens=True).values(), default=-1)) + 1  # ids may have gaps
        self._size = self._size if known is None else min(known, self._size)
        self.notes = list(notes)
        self._dropouts: dict[float, BPEDropout] = {}
        added = inner.get_added_tokens_decoder()
        self._added = {
            number: str(token.content) for number, token in added.items() if token.special or template is None
        }
        if languages is None:
            found = {number: LANGUAGE.fullmatch(content) for number, content in self._added.items()}
            languages = {match[1]: number for number, match in found.items() if match}
        self.languages = dict(languages)

    @property
    def size(self) -> int:
        """Number of embedding rows it needs."""
        return self._size

    @property
    def used_ids(self) -> set[int]:
        """Every id that it may give to a model besides those of text: special tokens, languages, banned tokens."""
        numbers = {self.pad, self.bos, self.eos, *self._added, *self.languages.values(), *self.template.used_ids}
        return numbers if self._mask is None else numbers | {self._mask}

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the content, independent of file formatting."""
        # the library drops the last digit of some scores when it reads and writes foreign files
        tree = json.loads(self._inner.to_str(), parse_float=_nine_digits if self.foreign else None)
        if self.foreign:
            tree["ours"] = self.about
        canonical = json.dumps(tree, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def with_types(self, count: int | None) -> Tokenizer:
        """This tokenizer for a model with this many token types (None: any): a second text has the last one where there
        is only one (RoBERTa: Liu et al. 2019, the authors' code). A foreign tokenizer keeps its own."""
        if self.foreign or count is None or max(self.template.used_types) < count:
            return self
        fitted = copy.copy(self)
        fitted.template = replace(self.template, types=(0, count - 1))
        return fitted

    def extended(self, tokens: Sequence[str]) -> Tokenizer:
        """This tokenizer, trained here, with further special tokens behind all others."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Inner

        inner = Inner.from_str(self.text)
        inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        return Tokenizer(inner, self.pad, self.bos, self.eos, notes=self.notes)

    def language(self, tag: str) -> int:
        """The id of a language's token. `tag`: its name in any usual form (data/languages.py): "German" is "de_DE"."""
        matches = find_language(tag, self.languages)
        if len(matches) != 1:
            known = ", ".join(sorted(matches or self.languages)) or "none"
            meant = "" if matches else near(tag, self.languages)
            raise UserError(f"the tokenizer has no language {tag!r}{meant} (languages: {known})")
        return self.languages[matches[0]]

    def special(self, token: str) -> int:
        """The id of a special token that a task needs."""
        number = self._inner.token_to_id(token)
        if number is None or number not in self._added:
            raise UserError(f"the tokenizer has no token {token}; use one trained for this task")
        return int(number)

    @property
    def specials(self) -> list[int]:
        """All ids that do not encode text."""
        return sorted({self.pad, self.bos, self.eos, *self._added})

    @property
    def added(self) -> dict[int, str]:
        """The special tokens, id to name."""
        return dict(self._added)

    @property
    def has_mask(self) -> bool:
        return self._mask is not None or MASK in self._added.values()

    @property
    def text(self) -> str:
        """The content of a `tokenizer.json`."""
        return str(self._inner.to_str())

    @property
    def opening(self) -> tuple[int, ...]:
        """The tokens a decoder starts with."""
        return self.template.opening

    @property
    def mask(self) -> int:
        """The id of the mask token."""
        return self.special(MASK) if self._mask is None else self._mask

    @property
    def beyond(self) -> bool:
        """Whether it can produce ids that the model has no embedding for."""
        return self._known is not None and self._known < self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def source_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens before and after a source text; tokenizers trained here add no BOS to it."""
        return (self.template.before, self.template.after) if self.foreign else ((), (self.eos,))

    def frame(self, ids: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """One text, or two read together, with special tokens; and the type of each token."""
        return self.template.frame(ids, second)

    framed = frame  # the documented name of 0.1

    def encode_masked(self, text: str) -> list[int]:
        """Encode text that contains `<mask>` or the tokenizer's own spelling of it. A foreign tokenizer parses it as
        the original does, other special tokens included, because some masks absorb the space before them."""
        spelling = self._added.get(self.mask, MASK)
        parts = text.replace(spelling, MASK).split(MASK)
        if self.foreign:
            return self.encode_batch([spelling.join(parts)], specials=True)[0]
        first, *rest = self.encode_batch(parts)
        return [*first, *(number for part in rest for number in [self.mask, *part])]

    def encode(self, text: str, specials: bool = False) -> list[int]:
        return self.encode_batch([text], specials)[0]

    def encode_batch(self, texts: Sequence[str], specials: bool = False) -> list[list[int]]:
        """`specials`: parse special tokens spelled out in the text."""
        inner = self._special_aware if specials else self._inner
        try:
            found = [e.ids for e in inner.encode_batch_fast(list(texts), add_special_tokens=False)]
        except BaseException as error:
            raise translate_error(error, texts) from None
        if self.foreign and not specials:
            for number, ids in enumerate(found):
                if self._contains_specials(ids, texts[number]):
                    found[number] = self._plain.encode(texts[number], add_special_tokens=False).ids
        if self._known is not None:  # pieces that the model has no embedding for
            found = [[self._unknown if i >= self._known and i not in self._added else i for i in ids] for ids in found]
        return found

    def bpe_dropout(self, rate: float) -> BPEDropout:
        """Random segmentations, each merge left out with the probability `rate`; the same object every time."""
        from allyouneed.data.tokenizers.bpe_dropout import BPEDropout

        if self.foreign:
            raise UserError("bpe_dropout: needs a tokenizer trained here (`tokenizer: {kind: bpe}`), not a foreign one")
        found = self._dropouts.get(rate)
        if found is None:
            found = self._dropouts[rate] = BPEDropout(self._inner, rate)
        return found

    def _encode_with_offsets(self, text: str) -> Any:
        """Encode with offsets."""
        try:
            encoding = self._inner.encode(text, add_special_tokens=False)
        except BaseException as error:
            raise translate_error(error, [text]) from None
        if self.foreign and self._contains_specials(encoding.ids, text):
            return self._plain.encode(text, add_special_tokens=False)
        return encoding

    def _contains_specials(self, ids: Sequence[int], text: str) -> bool:
        """Whether the ids contain special tokens other than unknown, or unknown because the text spells its name."""
        special = {number for number in ids if number in self._added}
        if not special or special - {self._unknown}:
            return bool(special)
        normalizer = self._inner.normalizer
        return self._added[self._unknown] in (text if normalizer is None else normalizer.normalize_str(text))

    @cached_property
    def _special_aware(self) -> Any:
        """A copy that parses special tokens spelled out in the text."""
        made = type(self._inner).from_str(self._inner.to_str())
        made.encode_special_tokens = False
        return made

    @cached_property
    def _plain(self) -> Any:
        return plain(self._inner)

    @cached_property
    def _unknown(self) -> Any:
        return unknown_id(self._inner)

    def decode(self, ids: Sequence[int], specials: bool = False) -> str:
        """The text, without special tokens unless `specials`. Incomplete UTF-8 sequences become U+FFFD."""
        try:
            return str(self._inner.decode(list(ids), skip_special_tokens=not specials))
        except BaseException as error:
            raise translate_error(error) from None

    def decode_masked(self, ids: Sequence[int]) -> str:
        """Inverse of `encode_masked`, with `<mask>` for the mask token."""
        if self.foreign:
            return self.decode(ids, specials=True).replace(self._added.get(self.mask, MASK), MASK)
        parts: list[list[int]] = [[]]
        for number in ids:
            if number == self.mask:
                parts.append([])
            else:
                parts[-1].append(number)
        return MASK.join(self.decode_batch(parts))

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        try:
            return list(self._inner.decode_batch([list(ids) for ids in batch], skip_special_tokens=True))
        except BaseException as error:
            raise translate_error(error) from None

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Readable pieces; a byte that is only part of a character is shown as `<E6>`."""
        return [self._show(number) for number in ids]

    def token_bytes(self, number: int) -> bytes:
        """The UTF-8 bytes a token stands for: part of a character, a character or more; of a special token, its
        name."""
        token = self._added.get(number) or self._inner.id_to_token(number)
        if token is not None and number not in self._added and self._over_bytes and all(c in BYTE_OF for c in token):
            return bytes(BYTE_OF[char] for char in token)
        return self.decode([number], specials=True).encode()

    def spans(self, text: str) -> list[tuple[int, int]]:
        """For each token of `text`, its character span (several tokens may share one character)."""
        return [(int(start), int(end)) for start, end in self._encode_with_offsets(text).offsets]

    def word_starts(self, text: str) -> list[bool]:
        """For each token of `text`, whether a word begins with it. A word is a piece that no token crosses; in a run of
        Chinese or Japanese, the shortest sequence of whole characters made of whole tokens."""
        encoding = self._encode_with_offsets(text)
        starts, before, end = [], None, 0
        for word, (left, right) in zip(encoding.word_ids, encoding.offsets, strict=True):
            starts.append(word != before or (left >= end and EAST_ASIAN_CHARACTER.match(text, left) is not None))
            before, end = word, right
        return starts

    def _show(self, number: int) -> str:
        if number in self._added:
            return self._added[number]
        token = self._inner.id_to_token(number)
        if token is None:
            return f"<no token {number}>"
        if not self._over_bytes or any(char not in BYTE_OF for char in token):
            return str(token)
        return show_bytes(bytes(BYTE_OF[char] for char in token))

    @cached_property
    def _over_bytes(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.to_str())["decoder"])

    @property
    def about(self) -> dict[str, Any]:
        """What a foreign tokenizer.json does not contain."""
        numbers = {"pad": self.pad, "bos": self.bos, "eos": self.eos, "mask": self._mask, "known": self._known}
        return numbers | {"languages": self.languages, "marks": self.template.to_tree()}

    def save(self, path: Path | str) -> None:
        """Write `tokenizer.json`, and for a foreign tokenizer `tokenizer.marks.json` beside it."""
        path = Path(path)
        path.write_text(self._inner.to_str(pretty=True), encoding="utf-8")
        beside = path.with_suffix(".marks.json")
        if self.foreign:
            beside.write_text(json.dumps(self.about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            beside.unlink(missing_ok=True)  # left by an earlier run

    @classmethod
    def load(cls, path: Path | str, pad: str | int = PAD, bos: str | int = BOS, eos: str | int = EOS) -> Tokenizer:
        """Read a `tokenizer.json`: ours, or a foreign one with special tokens given here or in `.marks.json`."""
        path = Path(path)
        inner = parse_tokenizer(read_text(*named_file(path), MAX_BYTES), str(path))
        beside = path.with_suffix(".marks.json")
        if has_file(path.parent, beside.name):
            found = parse(Marks, read_json(path.parent, beside.name), str(beside))
            rest = {key: getattr(found, key) for key in ("pad", "bos", "eos", "mask", "known", "languages")}
            return cls(inner, **rest, template=found.marks)
        ids = []
        for special in (pad, bos, eos):
            number = special if isinstance(special, int) else inner.token_to_id(special)
            if number is None:
                raise UserError(f"{path}: the tokenizer has no token {special!r}; pass the ids of pad, bos and eos")
            ids.append(number)
        return cls(inner, ids[0], ids[1], ids[2])


def train(config: TokenizerConfig, texts: Iterable[str], languages: Iterable[str] = ()) -> Tokenizer:
    """Learn a vocabulary from text. The same text gives the same tokenizer, bit for bit."""
    specials = list(dict.fromkeys([PAD, BOS, EOS, *map(language_token, languages), *config.specials]))
    if config.vocab < BYTES + len(specials):
        raise UserError(
            f"a vocabulary of {config.vocab} is too small: {BYTES} bytes and {len(specials)} special tokens "
            f"take {BYTES + len(specials)}; set vocab higher"
        )
    inner = train_subwords(config.kind, config.vocab, config.min_frequency, specials, texts)
    size = inner.get_vocab_size(with_added_tokens=True)
    notes = []
    if size < config.vocab:
        notes.append(f"the text yields only {size} distinct pieces; the vocabulary is {size}, not {config.vocab}")
    return Tokenizer(inner, notes=notes)


@dataclass(frozen=True)
class Vocabularies:
    """The tokenizers of source and target: the same object if they share a vocabulary."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        return self.source is self.target

    def with_types(self, count: int | None) -> Vocabularies:
        """See `Tokenizer.with_types`."""
        source = self.source.with_types(count)
        return Vocabularies(source, source if self.joint else self.target.with_types(count))

    @property
    def hash(self) -> str:
        if self.joint:
            return self.source.hash
        return hashlib.sha256(f"{self.source.hash} {self.target.hash}".encode()).hexdigest()

    @classmethod
    def train(
        cls,
        config: TokenizerConfig,
        files: Sequence[Files],
        filters: Filters | None = None,
        specials: Sequence[str] = (),
    ) -> Vocabularies:
        """Learn from the training texts. Language tokens join the source side.

        `specials`: tokens the task needs. `joint: false`: one vocabulary per side, for examples with two texts.
        """
        from allyouneed.data.files.readers import Report

        languages = sorted({entry.direction[1] for entry in files if entry.direction is not None})
        config = config.model_copy(update={"specials": tuple(dict.fromkeys([*specials, *config.specials]))})

        report = Report()  # for the error below; the store reads the same examples and reports them

        def texts(sides: slice, report: Report) -> Iterator[str]:
            examples = (example for entry in files for example in entry.read(report))
            for example in examples if filters is None else filters.apply(examples, report):
                if getattr(example, "segmentation", 0):
                    continue  # the same text again
                for _ in range(max(1, round(getattr(example, "weight", 1)))):  # about as often as an epoch reads it
                    yield from example.texts[sides]

        try:
            if config.joint:
                both = train(config, texts(slice(None), report), languages)
                return cls(both, both)
            reads = train(config, texts(slice(0, 1), report), languages)
            return cls(reads, train(config, texts(slice(1, 2), Report())))
        except UserError as error:
            raise UserError(f"{error}\n{report.text()}" if report.read and not report.kept else str(error)) from None

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.source.save(folder / "tokenizer.json")
        other = folder / "tokenizer.target.json"
        if self.joint:
            for left in (other, other.with_suffix(".marks.json")):
                left.unlink(missing_ok=True)  # left by an earlier run
        else:
            self.target.save(other)

    @classmethod
    def load(cls, folder: Path | str) -> Vocabularies:
        folder = Path(folder)
        names = ["tokenizer.json", *(["tokenizer.target.json"] if has_file(folder, "tokenizer.target.json") else [])]
        for name in names:
            file_in(folder, name)
        source, *other = (Tokenizer.load(folder / name) for name in names)
        return cls(source, other[0] if other else source)
