"""Small trained tokenizers of every kind, in their original file formats."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

LINES = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells (by the sea shore), doesn't she?",
    "Über die Häuser fliegt ein großer Vogel; Straße, Öl und Äpfel sind schön.",
    "你好，世界。我们今天去北京大学。 日本語の文章です。カタカナとひらがな。",
    "مرحبا بالعالم هذا نص عربي  हिन्दी में एक वाक्य है। नमस्ते दुनिया",
    "Hello world 1234 3.14 $100 emoji 😀 👩‍👩‍👧 done. < > s / ( ) [ ] 9, 10, 2024!",
    "the cat sat on the mat and the dog ran to the cat; it was good, very good, translate English to German",
]
TEXTS = [
    "",
    " ",
    "Hello world, the quick brown fox.",
    "  double  spaces   here ",
    "a tab\there\tand\nnew lines\r\n",
    "Über die Straße, ÄÖÜ ß",
    "你好，世界。我们去北京。",
    "日本語カタカナひらがな",
    "مرحبا بالعالم",
    "हिन्दी में नमस्ते",
    "cafe\u0301 a\u0308pfel e\u0323\u0302 combining",
    "😀 👩‍👩‍👧 🇩🇪 emoji",
    "\x00\x01\x07 control \x7f \u200b \u00ad",
    "ＦＵＬＬ ｗｉｄｔｈ ﾊﾝｶｸ ½ ﬁ ™",
    "a" * 300,
    "It's 9, 10, 3.14 and $100... (brackets) don't!",
    "\u00a0nbsp\u3000ideographic",
]
SPELLED = "text </s> <s> [SEP] <pad>[MASK] <|endoftext|> <unk> [CLS]<mask> <cls> more"

ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
CONTROLS = ("[CLS]", "[SEP]", "[MASK]")
# what is special about the SentencePiece models of each kind
SENTENCE_PIECES: dict[str, dict[str, Any]] = {
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "albert": {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": CONTROLS},
    "xlnet": {
        "control_symbols": ("<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"),
        "user_defined_symbols": ("(", ")"),
    },
    "big_bird": {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "control_symbols": CONTROLS},
    "reformer": {"model_type": "bpe", "user_defined_symbols": ("(", "good")},
    "llama": {"model_type": "bpe", "vocab_size": 700, **IDENTITY},
    "gemma": {
        "model_type": "bpe",
        "vocab_size": 700,
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
        **IDENTITY,
    },
    "mbart": {},
    "m2m_100": {"model_type": "bpe"},
    "marian": {"vocab_size": 300},
}
FILES = {"llama": "tokenizer.model", "gemma": "tokenizer.model", "mbart": "sentencepiece.bpe.model"}
FILES |= {"m2m_100": "sentencepiece.bpe.model", "marian": "source.spm"}


@cache
def pieces(kind: str, **changes: Any) -> bytes:
    """A trained SentencePiece model."""
    import sentencepiece

    out = io.BytesIO()
    said = {"model_type": "unigram", "vocab_size": 420} | SENTENCE_PIECES[kind] | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 12),
        model_writer=out,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        **{key: list(value) if isinstance(value, tuple) else value for key, value in said.items()},
    )
    return out.getvalue()


def processor(raw: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=raw)


def sentence_pieces(folder: Path, kind: str) -> Path:
    raw = pieces(kind)
    (folder / FILES.get(kind, "spiece.model")).write_bytes(raw)
    if kind == "m2m_100":
        names = ["<s>", "<pad>", "</s>", "<unk>", *names_of(raw)]
        (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    return folder


def names_of(raw: bytes) -> list[str]:
    found = processor(raw)
    return [found.id_to_piece(n) for n in range(found.get_piece_size()) if not found.is_control(n)][1:]


def marian(folder: Path, without: tuple[str, ...] = (), languages: tuple[str, ...] = ()) -> int:
    """Two models and one vocabulary that lacks some of their pieces; the number of its padding comes back."""
    here, there = pieces("marian", vocab_size=420), pieces("marian")
    (folder / "source.spm").write_bytes(here)
    (folder / "target.spm").write_bytes(there)
    names = ["</s>", "<unk>", *(f">>{code}<<" for code in languages)]
    names += [name for name in (*names_of(here), *names_of(there)) if name not in without]
    listed = [*dict.fromkeys(names), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(listed)}))
    return len(listed) - 1


def words(folder: Path, **options: Any) -> Path:
    """WordPiece: vocab.txt."""
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer(lowercase=options.get("do_lower_case", True))
    trained.train_from_iterator(LINES * 4, vocab_size=400, min_frequency=1, show_progress=False)
    tokens = sorted(trained.get_vocab().items(), key=lambda both: both[1])
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in tokens), encoding="utf-8")
    return said(folder, **options)


def byte_pairs(folder: Path, specials: list[str], **options: Any) -> Path:
    """GPT-2's: vocab.json and merges.txt."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        LINES * 4, vocab_size=500, min_frequency=1, special_tokens=specials, show_progress=False
    )
    trained.save_model(str(folder))
    return said(folder, **options)


def word_ends(folder: Path) -> Path:
    """CLIP's: the same files, with `</w>` at the end of words."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = normalizers.Lowercase()
    cut = pre_tokenizers.Split(Regex(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True)
    trained.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        LINES * 4,
        trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    names += [f"{letter}</w>" for letter in sorted(alphabet) if f"{letter}</w>" not in model["vocab"]]
    names += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    return folder


def said(folder: Path, **options: Any) -> Path:
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")
    return folder
