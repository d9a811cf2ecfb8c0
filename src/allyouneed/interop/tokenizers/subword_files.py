"""Tokenizers of translation models whose vocabulary is a list of tokens, from the subword files beside it.

CTranslate2, Marian and fairseq keep the ids of tokens in one file and how to split a text in another: a SentencePiece
model, or the merges of subword-nmt or fastBPE, where `@@` marks a token that does not end its word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.data.tokenizers.bounds import MAX_BYTES, check_tokenizer
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, has_file, read_bytes, read_json_value, read_text
from allyouneed.interop.tokenizers.load import convert_errors
from allyouneed.interop.tokenizers.sentencepiece import SentencePieceModel, build

Ids = Mapping[str, int]
SENTENCEPIECE = ("sentencepiece.model", "sentencepiece.bpe.model", "spm.model", "spiece.model", "tokenizer.model")
MERGES = ("bpecodes", "bpe.codes", "codes", "code")
NEVER = -1e4  # logit of a token that is never generated; fits into float16
CONTINUES, ENDS = "@@", "</w>"
LOOKED_FOR = "source.spm and target.spm, sentencepiece.model, bpecodes, or one *.spm or *.model"
# Moses: characters that its tokenizer escapes, and marks that its detokenizer joins to the word before or after
ESCAPES = {
    "&": "&amp;",
    "|": "&#124;",
    "<": "&lt;",
    ">": "&gt;",
    "'": "&apos;",
    '"': "&quot;",
    "[": "&#91;",
    "]": "&#93;",
}
MARKS = r"(?<=\p{L})&apos;\p{L}+|&(?:amp|apos|quot|lt|gt|#\d+);|[,.](?![\p{L}\p{N}])|@-@|[^\p{L}\p{N}\p{M}\s.,&;#@-]"


@dataclass(frozen=True)
class Roles:
    """Special tokens by role, as token ids. `before` and `after`: around a source text; `start`: the first decoder
    input; `pad`: any token that is never generated; `never`: others of that kind."""

    unk: str
    eos: int
    start: int
    pad: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    never: tuple[int, ...] = ()


def read(
    folder: Path,
    sides: tuple[Ids, Ids],
    roles: Roles,
    given: Path | None = None,
    languages: Sequence[str | None] = (None, None),
    moses: bool = False,
) -> tuple[Vocabularies | None, list[str]]:
    """The tokenizers, and notes. `sides`: ids of source and target tokens. `given`: a file to use instead of those
    found. `moses`: the text was split into words by Moses' tokenizer before."""
    notes: list[str] = []
    files = [given or find(folder, side, name) for side, name in zip(("source", "target"), languages, strict=True)]
    if files[0] is None or files[1] is None:
        return None, [f"{folder}: no subword file (looked for {LOOKED_FOR}), so it takes token ids, not texts"]
    made = []
    for file, ids in zip(files, sides, strict=True):
        assert file is not None
        inner = build_tokenizer(file, ids, roles, moses)
        if type(inner.model).__name__ == "BPE" and not is_sentencepiece(file):
            notes.append(MOSES_NOTE if moses else PLAIN_NOTE)
        made.append(inner)
    tags = {name[2:-2]: number for name, number in sides[0].items() if name.startswith(">>") and name.endswith("<<")}
    template = Template(before=roles.before, after=roles.after, types=(0, 0))
    own = set(sides[0].values())
    pad, eos = (number if number in own else 0 for number in (roles.pad, roles.after[-1] if roles.after else roles.eos))
    source = Tokenizer(made[0], pad, eos, eos, tags, template=template, known=_known(sides[0]))
    template = Template(
        between=(roles.eos,), after=(roles.eos,), opening=(roles.start,), types=(0, 0), never=roles.never
    )
    target = Tokenizer(made[1], roles.pad, roles.start, roles.eos, {}, template=template, known=_known(sides[1]))
    return Vocabularies(source, target), list(dict.fromkeys(notes))


MOSES_NOTE = "texts are split into words as Moses does, approximately; its lists of abbreviations are not included"
PLAIN_NOTE = (
    "texts are split into words at spaces only; if the model was trained on tokenized text, tokenize them first"
)


def _known(ids: Ids) -> int:
    return max(ids.values(), default=-1) + 1


def find(folder: Path, side: str, language: str | None = None) -> Path | None:
    """The subword file of one side."""
    own = [] if language is None else [f"spm.{language}.model", f"{language}.spm", f"bpecodes.{language}"]
    for name in (f"{side}.spm", *own, *SENTENCEPIECE, f"{side}.bpe", *MERGES):
        if has_file(folder, name):
            return file_in(folder, name).parent / file_in(folder, name).name
    bergamot = sorted(path.name for path in folder.glob(f"{'src' if side == 'source' else 'trg'}vocab.*.spm"))
    if len(bergamot) == 1:
        return file_in(folder, bergamot[0])
    others = sorted(path.name for pattern in ("*.spm", "*.model") for path in folder.glob(pattern) if path.is_file())
    return file_in(folder, others[0]) if len(others) == 1 else None


def is_sentencepiece(file: Path) -> bool:
    """A protobuf file; merges are text with a space in every line."""
    with file.open("rb") as opened:
        first = opened.read(1 << 10)
    return b"\0" in first or b" " not in first.split(b"\n")[0]


def build_tokenizer(file: Path, ids: Ids, roles: Roles, moses: bool = False) -> Any:
    """A `tokenizers.Tokenizer` that gives these ids."""
    if roles.unk not in ids:
        raise UserError(f"{file.parent}: {roles.unk} is missing in the vocabulary")
    special = [name for name, number in ids.items() if _is_special(name, number, roles)]
    if is_sentencepiece(file):
        model = SentencePieceModel.read(file)
        inner = convert_errors(file, lambda: build(model, ids, special=special, unknown=roles.unk))
    else:
        inner = convert_errors(file, lambda: _merges(file, ids, special, roles.unk, moses))
    check_tokenizer(inner, str(file))
    return inner


def _is_special(name: str, number: int, roles: Roles) -> bool:
    if name == roles.unk or number in {roles.eos, roles.start, roles.pad, *roles.before, *roles.after, *roles.never}:
        return True
    return (name.startswith(">>") and name.endswith("<<")) or name in ("<s>", "</s>", "<pad>", "<blank>")


def _merges(file: Path, ids: Ids, special: Sequence[str], unknown: str, moses: bool) -> Any:
    """subword-nmt (Sennrich et al. 2016) and fastBPE: the last character of a word is marked, pairs are merged in the
    order of the file. Pieces that the vocabulary does not have get ids beyond it, which become unknown."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {_piece(name, special): number for name, number in ids.items()}
    if len(vocabulary) < len(ids):
        raise UserError(f"{file.parent}: the vocabulary has two tokens for the same piece")
    pairs = read_merges(file)
    extra = max(vocabulary.values(), default=-1) + 1
    for left, right in pairs:
        for piece in (left, right, left + right):
            if piece not in vocabulary:
                vocabulary[piece] = extra
                extra += 1
    inner = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, end_of_word_suffix=ENDS))
    join: list[Any] = [decoders.BPEDecoder(suffix=ENDS)]
    if moses:
        inner.normalizer = normalizers.Sequence(
            [
                *(normalizers.Replace(char, text) for char, text in ESCAPES.items()),
                normalizers.Replace(Regex(r"(?<=[\p{L}\p{N}])-(?=[\p{L}\p{N}])"), " @-@ "),
            ]
        )
        cut = pre_tokenizers.Split(Regex(MARKS), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), cut])
        joined = [(" @-@ ", "-"), *((f" {mark}", mark) for mark in ("&apos;", ",", ".", "!", "?", ":", ";", ")", "%"))]
        joined += [("( ", "("), *((text, char) for char, text in reversed(ESCAPES.items()))]
        join += [decoders.Fuse(), *(decoders.Replace(old, new) for old, new in joined)]
    else:
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Sequence(join)
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return inner


def _piece(name: str, special: Sequence[str]) -> str:
    if name in special:
        return name
    return name.removesuffix(CONTINUES) if name.endswith(CONTINUES) and name != CONTINUES else name + ENDS


def read_merges(file: Path) -> list[tuple[str, str]]:
    """Pairs in order. subword-nmt writes `#version: 0.2` and two columns, fastBPE a third with counts."""
    lines = read_text(file.parent, file.name, MAX_BYTES).split("\n")
    versioned = lines[0].startswith("#version")
    if versioned and "0.2" not in lines[0]:
        raise UserError(f"{file}: {lines[0].strip()} of subword-nmt is not supported (allowed: 0.2)")
    found = []
    for number, line in enumerate(lines[versioned:], 1 + versioned):
        columns = line.rstrip("\r").split(" ")
        if line.strip() and len(columns) not in (2, 3):
            raise UserError(f"{file}:{number}: expected a pair of pieces")
        if line.strip():
            found.append((columns[0], columns[1]))
    return list(dict.fromkeys(found))


def read_token_list(folder: Path, name: str) -> list[str]:
    """Tokens by id: a JSON list, or one per line."""
    if name.endswith(".json"):
        found = read_json_value(folder, name)
        if not isinstance(found, list) or not all(isinstance(token, str) for token in found):
            raise UserError(f"{folder / name}: expected a list of tokens")
        return found
    text = read_bytes(folder, name, MAX_BYTES).decode("utf-8", errors="replace")
    lines = text.split("\n")
    return [line.rstrip("\r") for line in (lines[:-1] if lines and not lines[-1] else lines)]
