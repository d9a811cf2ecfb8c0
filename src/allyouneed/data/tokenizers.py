"""Text ⇄ token ids without loss: subwords over bytes, trained by the `tokenizers` library.

Both kinds start from the 256 bytes, so there is no unknown token and `decode(encode(text)) == text` for any text.
Nothing is normalised. Text is first cut into pieces no token may cross: a word with the space before it, a run of
Chinese or Japanese, one digit, punctuation. Because a special such as `<pad>` is a mixture of these, no token learnt
from text can spell one, and text that happens to contain one is encoded as the ordinary text it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import PositiveInt, StringConstraints, model_validator

from allyouneed.config import Config
from allyouneed.data.filters import Filters
from allyouneed.data.pairs import PairFiles
from allyouneed.data.readers import Files, Report
from allyouneed.errors import UserError

PAD, BOS, EOS, MASK = "<pad>", "<s>", "</s>", "<mask>"
BYTES = 256
MIN_FREQUENCY = 2
# A digit stands alone, and so does the space before it: the same digit is the same token wherever it stands, which is
# what copying a number needs.
EAST_ASIAN = r"\p{Han}\p{Hiragana}\p{Katakana}ー"
PIECES = "|".join(
    [
        rf"[{EAST_ASIAN}]+",
        rf" ?[\p{{L}}\p{{M}}&&[^{EAST_ASIAN}]]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+",
        r"\s+",
    ]
)
LANGUAGE = re.compile(r"<2(.+)>")
EAST_ASIAN_CHARACTER = re.compile(  # the scripts of EAST_ASIAN, for Python's own `re`
    "[\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3041-\u309f\u30a1-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00016fe0-\U00018cff\U0001aff0-\U0001b16f\U0001f200\U00020000-\U0003ffff]"
)

Special = Annotated[str, StringConstraints(pattern=r"^<[^<>\s]*[A-Za-z0-9][^<>\s]*>$")]


def language_token(tag: str) -> str:
    """The token a source sentence begins with when the model must be told what to translate into."""
    return f"<2{tag}>"


def sentinel(number: int) -> str:
    """The token that stands for a piece cut out of a text."""
    return f"<cut{number}>"


class TokenizerConfig(Config):
    """What to train. `vocab` counts everything: bytes, specials, learnt pieces."""

    kind: Literal["bpe", "unigram"] = "bpe"
    vocab: PositiveInt = 8000
    joint: bool = True
    min_frequency: PositiveInt | None = None
    specials: tuple[Special, ...] = ()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "unigram" and self.min_frequency is not None:
            raise ValueError("min_frequency belongs to kind 'bpe'; unigram weighs pieces by likelihood instead")
        return self


class Tokenizer:
    """A trained tokenizer. Wraps any `tokenizers.Tokenizer`; a foreign one brings the ids of its own specials."""

    def __init__(
        self,
        inner: Any,
        pad: int = 0,
        bos: int = 1,
        eos: int = 2,
        languages: Mapping[str, int] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        inner.encode_special_tokens = True  # "<pad>" in a sentence is five characters, not a command
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.pad, self.bos, self.eos = pad, bos, eos
        self.notes = list(notes)
        self._added = {number: str(token.content) for number, token in inner.get_added_tokens_decoder().items()}
        if languages is None:
            found = {number: LANGUAGE.fullmatch(content) for number, content in self._added.items()}
            languages = {match[1]: number for number, match in found.items() if match}
        self.languages = dict(languages)

    @property
    def size(self) -> int:
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the content, whatever the file's layout."""
        tree = json.loads(self._inner.to_str())
        canonical = json.dumps(tree, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def language(self, tag: str) -> int:
        if tag not in self.languages:
            known = ", ".join(sorted(self.languages)) or "none"
            raise UserError(f"the tokenizer knows no language {tag!r}; it knows: {known}")
        return self.languages[tag]

    def special(self, token: str) -> int:
        """The id of a special token that a task needs."""
        number = self._inner.token_to_id(token)
        if number is None or number not in self._added:
            raise UserError(f"the tokenizer has no token {token}; train with one that was made for this task")
        return int(number)

    @property
    def specials(self) -> list[int]:
        """Every id that stands for no text."""
        return sorted({self.pad, self.bos, self.eos, *self._added})

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise UserError(_not_unicode(texts)) from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without specials. Bytes that are no whole character become U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return list(self._inner.decode_batch([list(ids) for ids in batch], skip_special_tokens=True))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The pieces for human eyes; a byte that is only part of a character shows as `<E6>`."""
        return [self._show(number) for number in ids]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """For each token of `text`, the characters it stands for (several tokens may share one character)."""
        try:
            encoding = self._inner.encode(text, add_special_tokens=False)
        except TypeError:
            raise UserError(_not_unicode([text])) from None
        return [(int(start), int(end)) for start, end in encoding.offsets]

    def word_starts(self, text: str) -> list[bool]:
        """For each token of `text`, whether a word begins with it. A word is one of the pieces that no token crosses;
        in a run of Chinese or Japanese, the fewest characters that are whole tokens."""
        encoding = self._inner.encode(text, add_special_tokens=False)
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
        if not self._over_bytes or any(char not in _BYTE_OF for char in token):
            return str(token)
        return _show_bytes(bytes(_BYTE_OF[char] for char in token))

    @cached_property
    def _over_bytes(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._inner.to_str())["decoder"])

    def save(self, path: Path | str) -> None:
        Path(path).write_text(self._inner.to_str(pretty=True), encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str, pad: str | int = PAD, bos: str | int = BOS, eos: str | int = EOS) -> Tokenizer:
        """Read a `tokenizer.json`, ours or a foreign one whose specials are named or numbered here."""
        from tokenizers import Tokenizer as Inner

        try:
            inner = Inner.from_str(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: the tokenizer cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exception for anything it does not understand
            raise UserError(f"{path}: not a tokenizer.json: {error}; train the tokenizer again") from None
        ids = []
        for special in (pad, bos, eos):
            number = special if isinstance(special, int) else inner.token_to_id(special)
            if number is None:
                raise UserError(f"{path}: the tokenizer has no token {special!r}; say which ids pad, bos and eos have")
            ids.append(number)
        return cls(inner, ids[0], ids[1], ids[2])


def train(config: TokenizerConfig, texts: Iterable[str], languages: Iterable[str] = ()) -> Tokenizer:
    """Learn a vocabulary from text. The same text gives the same tokenizer, to the last bit."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Inner

    specials = list(dict.fromkeys([PAD, BOS, EOS, *map(language_token, languages), *config.specials]))
    if config.vocab < BYTES + len(specials):
        raise UserError(
            f"a vocabulary of {config.vocab} is too small: {BYTES} bytes and {len(specials)} special tokens "
            f"already make {BYTES + len(specials)}; set vocab higher"
        )
    inner = Inner(models.BPE() if config.kind == "bpe" else models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    common: dict[str, Any] = {
        "vocab_size": config.vocab,
        "special_tokens": specials,
        "initial_alphabet": sorted(_BYTE_OF),
        "show_progress": False,
    }
    trainer: Any
    if config.kind == "bpe":
        trainer = trainers.BpeTrainer(min_frequency=config.min_frequency or MIN_FREQUENCY, **common)
    else:
        trainer = trainers.UnigramTrainer(**common)
    seen = _Counted(texts)
    inner.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise UserError("there is no text to learn a vocabulary from; check the data files")
    if config.kind == "unigram":
        inner = Inner.from_str(_settle_scores(inner.to_str(), len(specials)))
    size = inner.get_vocab_size(with_added_tokens=True)
    notes = []
    if size < config.vocab:
        notes.append(
            f"the text holds only {size} tokens' worth of pieces; the vocabulary is {size}, not {config.vocab}"
        )
    return Tokenizer(inner, notes=notes)


def _settle_scores(text: str, specials: int) -> str:
    """Take out of a unigram model what depends on the order in which the library walked its hash tables.

    Sums of floats differ in their last digits, and bytes the text never used get scores a hair apart in random order
    at the bottom of the scale; rounding and one common score for the latter make training repeatable.
    """
    tree = json.loads(text)
    pieces = [(piece, round(score, 6)) for piece, score in tree["model"]["vocab"][specials:]]
    bottom = min(score for _, score in pieces)
    unused = bottom + 1e-4 * (BYTES + 1)  # the library spaces them by 1e-4
    settled = [(p, bottom if len(p) == 1 and score <= unused else score) for p, score in pieces]
    settled.sort(key=lambda item: (-item[1], item[0]))
    tree["model"]["vocab"][specials:] = [list(item) for item in settled]
    return json.dumps(tree, ensure_ascii=False)


class _Counted:
    """An iterator that knows afterwards whether anything came through."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = iter(texts)
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            yield text


@dataclass(frozen=True)
class Vocabularies:
    """The tokenizers of the two sides: one and the same object when they share a vocabulary."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        return self.source is self.target

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
        """Learn from the texts that will be trained on. Language tokens join the side that reads them.

        `specials`: tokens the task needs. `joint: false` is for examples of two texts: the second side is the target's.
        """
        languages = sorted({entry.to for entry in files if isinstance(entry, PairFiles) and entry.to is not None})
        config = config.model_copy(update={"specials": tuple(dict.fromkeys([*specials, *config.specials]))})

        report = Report()  # of the first reading; the store reads the same examples and tells, if there are any

        def texts(sides: slice, report: Report) -> Iterator[str]:
            examples = (example for entry in files for example in entry.read(report))
            for example in examples if filters is None else filters.apply(examples, report):
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
            other.unlink(missing_ok=True)  # one left by an earlier run would be taken for ours
        else:
            self.target.save(other)

    @classmethod
    def load(cls, folder: Path | str) -> Vocabularies:
        source = Tokenizer.load(Path(folder) / "tokenizer.json")
        other = Path(folder) / "tokenizer.target.json"
        return cls(source, Tokenizer.load(other) if other.exists() else source)


# --- bytes and the printable characters the library writes them with ------------------------------------------------


def _byte_characters() -> dict[str, int]:
    """ByteLevel's alphabet: a visible Latin-1 byte is its own character, the others follow from U+0100 in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(BYTES) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(BYTES + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_characters()


def _show_bytes(raw: bytes) -> str:
    shown = ""
    while raw:
        try:
            return shown + raw.decode("utf-8")
        except UnicodeDecodeError as error:
            broken = "".join(f"<{byte:02X}>" for byte in raw[error.start : error.end])
            shown, raw = shown + raw[: error.start].decode("utf-8") + broken, raw[error.end :]
    return shown


def _not_unicode(texts: Sequence[str]) -> str:
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            return f"{text[:60]!r} holds half a surrogate pair, which is no character; mend the text"
    return "a text to encode must be a string"
