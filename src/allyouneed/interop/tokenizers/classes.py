"""The tokenizer classes of transformers: the files each is read from, and its special tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, has_file
from allyouneed.interop.tokenizers import languages, vocab_files
from allyouneed.interop.tokenizers.sentencepiece import SentencePiece, SentencePieceModel, build
from allyouneed.interop.tokenizers.tiktoken import byte_pair_encoding, read_ranks

TemplateText = tuple[str, str]  # for one text and for two: roles of special tokens, and token types where not 0
BERT: TemplateText = ("cls A sep", "cls A sep B:1 sep:1")
ROBERTA: TemplateText = ("cls A sep", "cls A sep sep B sep")
EOS_TEMPLATE: TemplateText = ("A eos", "A eos B eos")
XLNET: TemplateText = ("A sep cls:2", "A sep B:1 sep:1 cls:2")
PAIR_AS_ONE: TemplateText = ("A eos", "A B eos")  # the language token is added separately
BYT5_EXTRA_IDS = 125
MAX_EXTRA_IDS = 10_000


@dataclass(frozen=True)
class TokenizerFiles:
    """A folder, its tokenizer options, and its special tokens by role."""

    path: Path
    options: Mapping[str, Any]
    names: Mapping[str, str]

    def find(self, *names: str) -> Path:
        found = next((self.path / name for name in names if has_file(self.path, name)), None)
        if found is None:
            raise UserError(f"{self.path}: no tokenizer.json and no {' or '.join(names)}, so texts cannot be tokenized")
        file_in(self.path, found.name)
        return found

    def sentencepiece(self) -> SentencePieceModel:
        listed = "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model"
        return SentencePieceModel.read(self.find(*listed))

    def extra_ids(self, default: int) -> int:
        """How many sentinel tokens follow the vocabulary (T5)."""
        count = self.options.get("extra_ids", default)
        if type(count) is not int or not 0 <= count <= MAX_EXTRA_IDS:
            raise UserError(f"{self.path}: extra_ids: {count!r} is not a number from 0 to {MAX_EXTRA_IDS:,}")
        return count


@dataclass(frozen=True)
class TokenizerClass:
    """`names`: default special tokens by role. `template`: special tokens around texts; None where the options
    `add_bos_token` (default: `adds_bos`) and `add_eos_token` decide. `language`: on which side of the text the source
    language token goes. `extra`: further special tokens. `mask_lstrip`: the mask absorbs the space before it."""

    read: Callable[[TokenizerFiles], Any]
    names: Mapping[str, str]
    template: TemplateText | None = None
    adds_bos: bool = False
    language: str | None = None
    extra: tuple[str, ...] = field(default=())
    mask_lstrip: bool = False


def _wordpiece(files: TokenizerFiles) -> Any:
    return vocab_files.wordpiece(files.find("vocab.txt"), files.names["unk"], files.options)


def _byte_pairs(files: TokenizerFiles) -> Any:
    ranks = [file_in(files.path, file.name) for file in sorted(files.path.glob("*.tiktoken"))]
    if ranks and not (files.path / "vocab.json").is_file():
        return byte_pair_encoding(read_ranks(ranks[0]), [files.names["eos"]])
    return vocab_files.byte_pairs(files.find("vocab.json"), files.find("merges.txt"), files.options)


def _qwen(files: TokenizerFiles) -> Any:
    return vocab_files.byte_pairs(
        files.find("vocab.json"), files.find("merges.txt"), files.options, vocab_files.QWEN_PIECES
    )


def _clip(files: TokenizerFiles) -> Any:
    return vocab_files.clip(files.find("vocab.json"), files.find("merges.txt"), files.names["unk"])


def _byt5(files: TokenizerFiles) -> Any:
    count = files.extra_ids(BYT5_EXTRA_IDS) or BYT5_EXTRA_IDS
    names = [files.names[role] for role in ("pad", "eos", "unk")]
    return vocab_files.byt5(names, [f"<extra_id_{number}>" for number in range(count)])


def _sentencepiece(files: TokenizerFiles) -> Any:
    return build(files.sentencepiece(), special=list(files.names.values()), unknown=files.names.get("unk"))


def _t5(files: TokenizerFiles) -> Any:
    extra = [f"<extra_id_{number}>" for number in range(files.extra_ids(100) - 1, -1, -1)]
    model = files.sentencepiece()
    return build(model, more=[(name, 0.0) for name in extra], special=[*extra, *files.names.values()])


def _albert_xlnet(lower: bool) -> Callable[[TokenizerFiles], Any]:
    """ALBERT and XLNet: ASCII quotes, no accents (unless `keep_accents`), lower case (`do_lower_case`)."""

    def read(files: TokenizerFiles) -> Any:
        from tokenizers import normalizers

        steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not files.options.get("keep_accents", False):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if files.options.get("do_lower_case", lower):
            steps.append(normalizers.Lowercase())
        model = files.sentencepiece()
        # split "9," before the comma
        pieces = [
            SentencePiece(p.text, p.score - 100, p.kind) if p.text[-1:] == "," and p.text[-2:-1].isdigit() else p
            for p in model.pieces
        ]
        model = SentencePieceModel(**{**vars(model), "pieces": pieces})
        return build(model, before=steps, special=list(files.names.values()), unknown=files.names["unk"])

    return read


def _fairseq(*codes: str, mask: bool = True) -> Callable[[TokenizerFiles], Any]:
    """fairseq's four special tokens, the pieces without their first three, languages, a mask."""

    def read(files: TokenizerFiles) -> Any:
        model = files.sentencepiece()
        names = [files.names[role] for role in ("bos", "pad", "eos", "unk")]
        listed = [*names, *(piece.text for piece in model.pieces[3:]), *codes]
        listed += [files.names["mask"]] if mask else []
        ids = {text: number for number, text in enumerate(dict.fromkeys(listed))}
        return build(model, ids, special=[*files.names.values(), *codes], unknown=files.names["unk"])

    return read


def _m2m(files: TokenizerFiles) -> Any:
    ids = vocab_files.read_vocab(files.find("vocab.json"))
    codes = languages.WMT_21 if files.options.get("language_codes") == "wmt21" else languages.M2M_100
    tokens = [f"__{code}__" for code in codes]
    first = len(ids)
    ids |= {token: first + n for n, token in enumerate(tokens)}
    return build(files.sentencepiece(), ids, special=[*files.names.values(), *tokens], unknown=files.names["unk"])


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

bert = TokenizerClass(_wordpiece, BERT_NAMES, BERT)
roberta = TokenizerClass(_byte_pairs, FAIRSEQ, ROBERTA, mask_lstrip=True)
gpt2 = TokenizerClass(_byte_pairs, GPT2_NAMES)
llama = TokenizerClass(_sentencepiece, LLAMA, adds_bos=True)
CLASSES = {
    "BertTokenizer": bert,
    "DistilBertTokenizer": bert,
    "ElectraTokenizer": bert,
    "RoFormerTokenizer": bert,
    "RobertaTokenizer": roberta,
    "BartTokenizer": roberta,
    "LongformerTokenizer": roberta,
    "GPT2Tokenizer": gpt2,
    "WhisperTokenizer": gpt2,
    "Qwen2Tokenizer": TokenizerClass(_qwen, {"unk": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}),
    "CLIPTokenizer": TokenizerClass(_clip, CLIP_NAMES | {"cls": CLIP_NAMES["bos"]}, ROBERTA),
    "T5Tokenizer": TokenizerClass(_t5, T5_NAMES, EOS_TEMPLATE),
    "ByT5Tokenizer": TokenizerClass(_byt5, T5_NAMES, EOS_TEMPLATE),
    "AlbertTokenizer": TokenizerClass(_albert_xlnet(lower=True), ALBERT, BERT, mask_lstrip=True),
    "XLNetTokenizer": TokenizerClass(
        _albert_xlnet(lower=False), XLNET_NAMES, XLNET, extra=("<eop>", "<eod>"), mask_lstrip=True
    ),
    "BigBirdTokenizer": TokenizerClass(_sentencepiece, BIG_BIRD, BERT, mask_lstrip=True),
    "ReformerTokenizer": TokenizerClass(_sentencepiece, {"eos": "</s>", "unk": "<unk>"}),
    "LlamaTokenizer": llama,
    "GemmaTokenizer": TokenizerClass(
        _sentencepiece,
        {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"},
        adds_bos=True,
    ),
    "XLMRobertaTokenizer": TokenizerClass(_fairseq(), FAIRSEQ, ROBERTA, mask_lstrip=True),
    "MBartTokenizer": TokenizerClass(
        _fairseq(*languages.MBART), FAIRSEQ, PAIR_AS_ONE, language="after", mask_lstrip=True
    ),
    "MBart50Tokenizer": TokenizerClass(
        _fairseq(*languages.MBART, *languages.MBART_50), FAIRSEQ, PAIR_AS_ONE, language="before", mask_lstrip=True
    ),
    "NllbTokenizer": TokenizerClass(
        _fairseq(*languages.NLLB), FAIRSEQ, PAIR_AS_ONE, language="before", mask_lstrip=True
    ),
    "M2M100Tokenizer": TokenizerClass(_m2m, M2M_NAMES, PAIR_AS_ONE, language="before"),
}
# by model_type, where the folder names no class
DEFAULT_CLASS = {
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
