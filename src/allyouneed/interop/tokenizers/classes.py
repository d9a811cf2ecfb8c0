"""The tokenizer classes of other people's folders: the files they are read from, and what their special tokens are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.interop.tokenizers import languages
from allyouneed.interop.tokenizers import vocab_files as plain_files
from allyouneed.interop.tokenizers.sentencepiece import Piece, SentencePieces, build
from allyouneed.interop.tokenizers.tiktoken import byte_pair_encoding, read_ranks

Shape = tuple[str, str]  # one text and two, with the roles of the marks, and types where they are not 0
BERT: Shape = ("cls A sep", "cls A sep B:1 sep:1")
ROBERTA: Shape = ("cls A sep", "cls A sep sep B sep")
ENDED: Shape = ("A eos", "A eos B eos")
XLNET: Shape = ("A sep cls:2", "A sep B:1 sep:1 cls:2")
TOGETHER: Shape = ("A eos", "A B eos")  # the token of the language comes besides


@dataclass(frozen=True)
class Files:
    """A folder, its tokenizer's options, and the names of its special tokens by role."""

    path: Path
    options: Mapping[str, Any]
    names: Mapping[str, str]

    def find(self, *names: str) -> Path:
        found = next((self.path / name for name in names if (self.path / name).is_file()), None)
        if found is None:
            raise UserError(f"{self.path}: has no tokenizer.json and no {' or '.join(names)}; a text cannot be read")
        return found

    def pieces(self) -> SentencePieces:
        listed = "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model"
        file = self.find(*listed)
        plain_files.bounded(file)
        return SentencePieces.read(file)


@dataclass(frozen=True)
class Kind:
    """`names`: what a special token is called where the files do not say. `shape`: the marks; None where the options
    `add_bos_token` and `add_eos_token` say, and `begins` says what they say when they do not. `language`: where the
    token of the source's language stands. `extra`: special tokens besides."""

    read: Callable[[Files], Any]
    names: Mapping[str, str]
    shape: Shape | None = None
    begins: bool = False
    language: str | None = None
    extra: tuple[str, ...] = field(default=())
    eats_space: bool = False  # does the mask take the space before it along?


def _words(files: Files) -> Any:
    return plain_files.wordpiece(files.find("vocab.txt"), files.names["unk"], files.options)


def _byte_pairs(files: Files) -> Any:
    ranks = sorted(files.path.glob("*.tiktoken"))
    if ranks and not (files.path / "vocab.json").is_file():
        return byte_pair_encoding(read_ranks(ranks[0]), [files.names["eos"]])
    return plain_files.byte_pairs(files.find("vocab.json"), files.find("merges.txt"), files.options)


def _qwen(files: Files) -> Any:
    return plain_files.byte_pairs(
        files.find("vocab.json"), files.find("merges.txt"), files.options, plain_files.QWEN_PIECES
    )


def _clip(files: Files) -> Any:
    return plain_files.clip(files.find("vocab.json"), files.find("merges.txt"), files.names["unk"])


def _bytes(files: Files) -> Any:
    count = files.options.get("extra_ids") or 125
    names = [files.names[role] for role in ("pad", "eos", "unk")]
    return plain_files.byte_tokens(names, [f"<extra_id_{number}>" for number in range(count)])


def _pieces(files: Files) -> Any:
    """As the model says it; special tokens of other types than control are known by their names."""
    return build(files.pieces(), special=list(files.names.values()), unknown=files.names.get("unk"))


def _t5(files: Files) -> Any:
    count = files.options.get("extra_ids", 100)
    extra = [f"<extra_id_{number}>" for number in range(count - 1, -1, -1)]
    model = files.pieces()
    return build(model, more=[(name, 0.0) for name in extra], special=[*extra, *files.names.values()])


def _quotes(lower: bool) -> Callable[[Files], Any]:
    """ALBERT and XLNet: quotes made plain, accents taken away, and lower case unless told otherwise."""

    def read(files: Files) -> Any:
        from tokenizers import normalizers

        steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not files.options.get("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if files.options.get("do_lower_case", lower):
            steps.append(normalizers.Lowercase())
        model = files.pieces()
        # "9," is to be cut before the comma
        apart = [
            Piece(p.text, p.score - 100, p.kind) if p.text[-1:] == "," and p.text[-2:-1].isdigit() else p
            for p in model.pieces
        ]
        model = SentencePieces(**{**vars(model), "pieces": apart})
        return build(model, before=steps, special=list(files.names.values()), unknown=files.names["unk"])

    return read


def _fairseq(*spoken: str, mask: bool = True) -> Callable[[Files], Any]:
    """Four special tokens of fairseq, the pieces without their first three, languages, a mask."""

    def read(files: Files) -> Any:
        model = files.pieces()
        names = [files.names[role] for role in ("bos", "pad", "eos", "unk")]
        listed = [*names, *(piece.text for piece in model.pieces[3:]), *spoken]
        listed += [files.names["mask"]] if mask else []
        numbers = {text: number for number, text in enumerate(dict.fromkeys(listed))}
        return build(model, numbers, special=[*files.names.values(), *spoken], unknown=files.names["unk"])

    return read


def _m2m(files: Files) -> Any:
    numbers = plain_files.numbers_of(files.find("vocab.json"))
    codes = languages.WMT_21 if files.options.get("language_codes") == "wmt21" else languages.M2M_100
    tokens = [f"__{code}__" for code in codes]
    first = len(numbers)
    numbers |= {token: first + n for n, token in enumerate(tokens)}
    return build(files.pieces(), numbers, special=[*files.names.values(), *tokens], unknown=files.names["unk"])


BERT_NAMES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
FAIRSEQ = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
GPT2_NAMES = dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>")
LLAMA = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
ALBERT = {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"} | {
    role: BERT_NAMES[role] for role in ("sep", "cls", "mask")
}
XLNET_NAMES = FAIRSEQ | {"sep": "<sep>", "cls": "<cls>"}
BIG_BIRD = FAIRSEQ | {role: BERT_NAMES[role] for role in ("sep", "cls", "mask")}
T5_NAMES = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
M2M_NAMES = {role: name for role, name in FAIRSEQ.items() if role not in ("mask", "cls")}
CLIP_NAMES = GPT2_NAMES | {"bos": "<|startoftext|>", "pad": "<|endoftext|>", "sep": "<|endoftext|>"}

words = Kind(_words, BERT_NAMES, BERT)
pairs = Kind(_byte_pairs, FAIRSEQ, ROBERTA, eats_space=True)
gpt2 = Kind(_byte_pairs, GPT2_NAMES)
llama = Kind(_pieces, LLAMA, begins=True)
KINDS = {
    "BertTokenizer": words,
    "DistilBertTokenizer": words,
    "ElectraTokenizer": words,
    "RoFormerTokenizer": words,
    "RobertaTokenizer": pairs,
    "BartTokenizer": pairs,
    "LongformerTokenizer": pairs,
    "GPT2Tokenizer": gpt2,
    "WhisperTokenizer": gpt2,
    "Qwen2Tokenizer": Kind(_qwen, {"unk": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}),
    "CLIPTokenizer": Kind(_clip, CLIP_NAMES | {"cls": CLIP_NAMES["bos"]}, ROBERTA),
    "T5Tokenizer": Kind(_t5, T5_NAMES, ENDED),
    "ByT5Tokenizer": Kind(_bytes, T5_NAMES, ENDED),
    "AlbertTokenizer": Kind(_quotes(lower=True), ALBERT, BERT, eats_space=True),
    "XLNetTokenizer": Kind(_quotes(lower=False), XLNET_NAMES, XLNET, extra=("<eop>", "<eod>"), eats_space=True),
    "BigBirdTokenizer": Kind(_pieces, BIG_BIRD, BERT, eats_space=True),
    "ReformerTokenizer": Kind(_pieces, {"eos": "</s>", "unk": "<unk>"}),
    "LlamaTokenizer": llama,
    "GemmaTokenizer": Kind(
        _pieces, {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"}, begins=True
    ),
    "XLMRobertaTokenizer": Kind(_fairseq(), FAIRSEQ, ROBERTA, eats_space=True),
    "MBartTokenizer": Kind(_fairseq(*languages.MBART), FAIRSEQ, TOGETHER, language="after", eats_space=True),
    "MBart50Tokenizer": Kind(
        _fairseq(*languages.MBART, *languages.MBART_50), FAIRSEQ, TOGETHER, language="before", eats_space=True
    ),
    "NllbTokenizer": Kind(_fairseq(*languages.NLLB), FAIRSEQ, TOGETHER, language="before", eats_space=True),
    "M2M100Tokenizer": Kind(_m2m, M2M_NAMES, TOGETHER, language="before"),
}
# what a model's tokenizer is when the folder does not name it
OF_MODEL = {
    "albert": "AlbertTokenizer",
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
    "big_bird": "BigBirdTokenizer",
    "clip": "CLIPTokenizer",
    "deepseek_v2": "LlamaTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neo": "GPT2Tokenizer",
    "gpt_bigcode": "GPT2Tokenizer",
    "gptj": "GPT2Tokenizer",
    "llama": "LlamaTokenizer",
    "bitnet": "LlamaTokenizer",
    "longformer": "LongformerTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "mbart": "MBartTokenizer",
    "mistral": "LlamaTokenizer",
    "mixtral": "LlamaTokenizer",
    "mt5": "T5Tokenizer",
    "opt": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "reformer": "ReformerTokenizer",
    "roberta": "RobertaTokenizer",
    "roformer": "RoFormerTokenizer",
    "switch_transformers": "T5Tokenizer",
    "t5": "T5Tokenizer",
    "whisper": "WhisperTokenizer",
    "xlnet": "XLNetTokenizer",
}
