"""Imported tokenizers encode and decode texts as the originals do: the `sentencepiece` library for its models,
`transformers` for all else."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allyouneed.config import parse, preset_tree
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.interop.tokenizers.languages import NLLB
from allyouneed.interop.tokenizers.load import _has_token_types, read, write
from allyouneed.interop.tokenizers.sentencepiece import SentencePieceModel, build
from allyouneed.nn.models.base import Model
from tokenizer_files import (
    LINES,
    ROBERTA,
    SENTENCE_PIECES,
    SPELLED,
    TEXTS,
    byte_pairs,
    marian,
    pieces,
    processor,
    said,
    sentence_pieces,
    word_ends,
    words,
)

END = ["<|endoftext|>"]
# files without tokenizer.json: (class, model type, how they are made)
PLAIN: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "bert": ("BertTokenizer", "bert", words),
    "bert cased": (
        "BertTokenizer",
        "bert",
        lambda f: words(f, do_lower_case=False, strip_accents=False, tokenize_chinese_chars=False),
    ),
    "bert tidy": ("BertTokenizer", "bert", lambda f: words(f, clean_up_tokenization_spaces=True)),
    "bert accents": ("BertTokenizer", "electra", lambda f: words(f, do_lower_case=True, strip_accents=False)),
    "roberta": ("RobertaTokenizer", "roberta", lambda f: byte_pairs(f, ROBERTA)),
    "roberta space": ("RobertaTokenizer", "bart", lambda f: byte_pairs(f, ROBERTA, add_prefix_space=True)),
    "gpt2": ("GPT2Tokenizer", "gpt2", lambda f: byte_pairs(f, END)),
    "opt": ("GPT2Tokenizer", "opt", lambda f: byte_pairs(f, END, add_bos_token=True)),
    "qwen2": ("Qwen2Tokenizer", "qwen2", lambda f: byte_pairs(f, END)),
    "clip": ("CLIPTokenizer", "clip", word_ends),
    "byt5": ("ByT5Tokenizer", "t5", lambda f: said(f, tokenizer_class="ByT5Tokenizer")),
}
# the same, and SentencePiece models, as tokenizer.json
JSON: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    **{name: case for name, case in PLAIN.items() if name != "byt5"},
    "whisper": ("WhisperTokenizer", "whisper", lambda f: byte_pairs(f, END)),
    "t5": ("T5Tokenizer", "t5", lambda f: sentence_pieces(f, "t5")),
    "albert": ("AlbertTokenizer", "albert", lambda f: sentence_pieces(f, "albert")),
    "xlnet": ("XLNetTokenizer", "xlnet", lambda f: sentence_pieces(f, "xlnet")),
    "big_bird": ("BigBirdTokenizer", "big_bird", lambda f: sentence_pieces(f, "big_bird")),
    "llama": ("LlamaTokenizer", "llama", lambda f: sentence_pieces(said(f, add_bos_token=True), "llama")),
    "gemma": ("GemmaTokenizer", "gemma", lambda f: sentence_pieces(said(f, add_bos_token=True), "gemma")),
}


def original(name: str, folder: Path) -> Any:
    return getattr(transformers, name).from_pretrained(folder)


def same(ours: Vocabularies, theirs: Any) -> None:
    for text in [*TEXTS, *LINES]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.source.encode(text) == ids, text
        assert ours.target.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def same_frames(ours: Tokenizer, theirs: Any) -> None:
    one, other = (ours.encode(text) for text in ("Hello world", "the cat"))
    found = theirs("Hello world")
    assert ours.frame(one)[0] == found["input_ids"]
    two = theirs("Hello world", "the cat")
    tokens, types = ours.frame(one, other)
    assert tokens == two["input_ids"]
    assert types == two.get("token_type_ids", types)
    assert ours.frame(one)[1] == found.get("token_type_ids", ours.frame(one)[1])


@pytest.mark.parametrize("name", PLAIN)
def test_plain_files_are_read_as_the_original_reads_them(name: str, tmp_path: Path) -> None:
    kind, model, make = PLAIN[name]
    make(tmp_path)
    ours, theirs = read(tmp_path, {"model_type": model}), original(kind, tmp_path)
    assert ours is not None
    same(ours, theirs)
    same_frames(ours.source, theirs)


def test_words_split_as_in_the_slow_bert_tokenizer(tmp_path: Path) -> None:
    """In Python, without the `tokenizers` library."""
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    ours, theirs = read(words(tmp_path), {"model_type": "bert"}), BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    assert ours is not None
    for text in [*TEXTS, *LINES]:
        assert ours.source.encode(text) == theirs.convert_tokens_to_ids(theirs.tokenize(text)), text


@pytest.mark.parametrize("name", JSON)
def test_a_tokenizer_json_is_read_kept_and_written_without_a_difference(name: str, tmp_path: Path) -> None:
    kind, model, make = JSON[name]
    (tmp_path / "plain").mkdir()
    make(tmp_path / "plain")
    original(kind, tmp_path / "plain").save_pretrained(tmp_path / "theirs")
    theirs = original(kind, tmp_path / "theirs")
    ours = read(tmp_path / "theirs", {"model_type": model})
    assert ours is not None
    same(ours, theirs)
    same_frames(ours.source, theirs)
    assert ours.source.encode(SPELLED, specials=True) == theirs(SPELLED, add_special_tokens=False)["input_ids"]

    ours.save(tmp_path / "kept")
    again = Vocabularies.load(tmp_path / "kept")
    assert again.hash == ours.hash and again.source.about == ours.source.about
    assert again.source.encode(LINES[0]) == ours.source.encode(LINES[0])

    write(again, tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXTS, *LINES]:
        ids = ours.source.frame(ours.source.encode(text))[0]
        assert exported(text)["input_ids"] == ids, text
        assert exported.decode(ids, skip_special_tokens=True) == ours.source.decode(ids), text
    two = ours.source.frame(ours.source.encode("one"), ours.source.encode("two"))
    assert exported("one", "two", return_token_type_ids=True)["input_ids"] == two[0]
    assert exported("one", "two", return_token_type_ids=True)["token_type_ids"] == two[1]


@pytest.mark.parametrize("kind", SENTENCE_PIECES)
def test_a_sentencepiece_model_encodes_and_decodes_as_the_library(kind: str) -> None:
    raw = pieces(kind)
    theirs, ours = processor(raw), build(SentencePieceModel.parse(raw))
    unknown = theirs.unk_id()
    for text in [*TEXTS, *LINES]:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == theirs.decode([number for number in ids if number != unknown]), text


@pytest.mark.parametrize("kind", ["t5", "llama"])
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs", "Mn", "Mc", "Me"]), max_size=30))
def test_any_text_is_tokenized_as_by_the_library(kind: str, text: str) -> None:
    """Characters that join those before them are left to `TEXTS`: `tokenizers` normalises cluster by cluster."""
    raw = pieces(kind)
    assert made(kind).encode(text) == processor(raw).encode(text)


@cache
def made(kind: str) -> Tokenizer:
    return Tokenizer(build(SentencePieceModel.parse(pieces(kind))), template=Template())


@pytest.mark.parametrize(
    ("kind", "model", "name"),
    [
        ("t5", "t5", "T5Tokenizer"),
        ("albert", "albert", "AlbertTokenizer"),
        ("xlnet", "xlnet", "XLNetTokenizer"),
        ("big_bird", "big_bird", "BigBirdTokenizer"),
        ("reformer", "reformer", "ReformerTokenizer"),
    ],
)
def test_sentencepiece_files_have_the_marks_and_ids_of_the_original(
    kind: str, model: str, name: str, tmp_path: Path
) -> None:
    sentence_pieces(tmp_path, kind)
    ours, theirs = read(tmp_path, {"model_type": model}), original(name, tmp_path)
    assert ours is not None
    same_frames(ours.source, theirs)
    assert ours.source.size == len(theirs)
    for text in ("Hello world, the quick brown fox.", "Über die Straße", "日本語カタカナ", "emoji 😀"):
        assert ours.source.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text


def test_llama_and_gemma_files_begin_a_text_with_their_mark(tmp_path: Path) -> None:
    for kind in ("llama", "gemma"):
        folder = tmp_path / kind
        folder.mkdir()
        sentence_pieces(folder, kind)
        ours = read(folder, {"model_type": kind})
        assert ours is not None
        bos = processor(pieces(kind)).bos_id()
        assert ours.source.opening == (bos,) and ours.source.bos == bos
        assert ours.source.eos == processor(pieces(kind)).eos_id()
        said(folder, add_bos_token=False)
        plain = read(folder, {"model_type": kind})
        assert plain is not None and plain.source.opening == ()


def test_marian_takes_ids_from_its_vocabulary(tmp_path: Path) -> None:
    pad = marian(tmp_path, without=("▁the", "▁cat", "▁good"))
    config = {"model_type": "marian", "pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad}
    ours, theirs = read(tmp_path, config), original("MarianTokenizer", tmp_path)
    assert ours is not None
    for text in [*TEXTS, *LINES]:
        ids = theirs(text)["input_ids"]
        assert ours.source.frame(ours.source.encode(text))[0] == ids, text
        said_ = theirs(text_target=text)["input_ids"]
        assert ours.target.decode(said_).strip() == theirs.decode(said_, skip_special_tokens=True), text
        assert ours.target.encode(text) == said_[:-1], text
    assert ours.source.size == ours.target.size == pad + 1
    assert ours.target.opening == (pad,) and ours.target.bos == pad
    ours.save(tmp_path / "kept")
    again = Vocabularies.load(tmp_path / "kept")
    assert again.source.encode(LINES[-1]) == ours.source.encode(LINES[-1])
    with pytest.raises(UserError, match="pieces without an id in the model"):
        write(again, tmp_path / "out")


def test_marian_names_the_languages_it_writes(tmp_path: Path) -> None:
    marian(tmp_path, languages=("de", "fra"))
    ours = read(tmp_path, {"model_type": "marian", "eos_token_id": 0})
    theirs = original("MarianTokenizer", tmp_path)
    assert ours is not None and set(ours.source.languages) == {"de", "fra"}
    ids = theirs(">>fra<< Hello world")["input_ids"]
    assert [ours.source.language("fra"), *ours.source.encode("Hello world")] == ids[:-1]


@pytest.mark.parametrize(
    ("kind", "name", "model", "code", "other"),
    [
        ("mbart", "MBartTokenizer", "mbart", "de_DE", "en_XX"),
        ("mbart", "MBart50Tokenizer", "mbart", "sl_SI", "pt_XX"),
        ("m2m_100", "M2M100Tokenizer", "m2m_100", "de", "zu"),
    ],
)
def test_language_tokens_have_the_ids_and_sides_of_the_original(
    kind: str, name: str, model: str, code: str, other: str, tmp_path: Path
) -> None:
    said(sentence_pieces(tmp_path, kind), tokenizer_class=name)
    ours, theirs = read(tmp_path, {"model_type": model, "decoder_start_token_id": 2}), original(name, tmp_path)
    assert ours is not None
    for language in (code, other):
        theirs.src_lang = language
        ids, number = theirs("Hello world")["input_ids"], ours.source.language(language)
        with_marks = ours.source.frame(ours.source.encode("Hello world"))[0]
        before = ours.source.template.language == "before"
        assert ([number, *with_marks] if before else [*with_marks, number]) == ids
    assert ours.source.language(code[:2]) == ours.source.language(code)
    with pytest.raises(UserError, match="has no language 'xx'"):
        ours.source.language("xx")


def test_nllb_counts_its_languages_after_the_pieces_and_knows_short_names(tmp_path: Path) -> None:
    """As the published model does (`ace_Arab` is 256001 after 256000 pieces, `<mask>` last); transformers 5.22 forgets
    the languages where there is no tokenizer.json."""
    said(sentence_pieces(tmp_path, "m2m_100"), tokenizer_class="NllbTokenizer")
    ours = read(tmp_path, {"model_type": "m2m_100", "decoder_start_token_id": 2})
    assert ours is not None
    first = processor(pieces("m2m_100")).get_piece_size() + 1
    assert [ours.source.language(code) for code in NLLB] == list(range(first, first + 202))
    assert ours.source.mask == first + 202
    assert ours.source.language("de") == ours.source.language("deu") == ours.source.language("deu_Latn")
    assert ours.source.language("zho") == ours.source.language("zh") == ours.source.language("zho_Hans")
    assert ours.source.language("zh-TW") == ours.source.language("zho_Hant") != ours.source.language("中文")
    with pytest.raises(UserError, match=r"has no language 'ace' \(languages: ace_Arab, ace_Latn\)"):
        ours.source.language("ace")


def test_the_default_languages_of_a_saved_folder_are_known(tmp_path: Path) -> None:
    theirs = original("MBart50Tokenizer", sentence_pieces(tmp_path, "mbart"))
    theirs.src_lang = "fr_XX"
    theirs.save_pretrained(tmp_path / "saved")
    ours = read(tmp_path / "saved", {"model_type": "mbart", "decoder_start_token_id": 2})
    assert ours is not None and ours.source.template.spoken is not None
    assert ours.source.template.before == () and ours.source.template.language == "before"


@pytest.mark.parametrize("kind", ["t5", "albert", "xlnet", "llama"])
def test_text_cannot_spell_a_special_token(kind: str, tmp_path: Path) -> None:
    sentence_pieces(tmp_path, kind)
    ours = read(tmp_path, {"model_type": kind})
    assert ours is not None
    tokenizer, unknown = ours.source, processor(pieces(kind)).unk_id()
    for name in tokenizer.added.values():
        found = tokenizer.encode(f"a {name} b{name}")
        assert not {number for number in found if number in tokenizer.added} - {unknown}, name
        assert len(tokenizer.spans(f"a {name} b{name}")) == len(found)
    if kind in ("t5", "llama"):  # the others change the text first
        text = "a </s> <s>b <unk> ＜ｕｎｋ＞"
        assert tokenizer.encode(text) == processor(pieces(kind)).encode(text)


def test_a_mask_has_two_spellings(tmp_path: Path) -> None:
    byte_pairs(tmp_path, ROBERTA)
    (tmp_path / "words").mkdir()
    words(tmp_path / "words")
    roberta, bert = read(tmp_path, {"model_type": "roberta"}), read(tmp_path / "words", {"model_type": "bert"})
    assert roberta is not None and bert is not None
    theirs = original("BertTokenizer", tmp_path / "words")
    ids = theirs("the [MASK] sat", add_special_tokens=False)["input_ids"]
    assert bert.source.encode_masked("the [MASK] sat") == bert.source.encode_masked("the <mask> sat") == ids
    assert bert.source.decode_masked(ids) == "the <mask> sat"
    assert bert.source.mask not in bert.source.encode("the [MASK] sat")
    # RoBERTa's mask takes the space before it along
    found = roberta.source.encode_masked("the <mask> sat")
    assert found == [*roberta.source.encode("the"), 4, *roberta.source.encode(" sat")]


def test_marks_follow_the_generation_settings(tmp_path: Path) -> None:
    byte_pairs(tmp_path, ROBERTA)
    generation = {
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "eos_token_id": [2, 9],
        "bad_words_ids": [[1], [5, 6]],
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ours = read(tmp_path, {"model_type": "bart", "decoder_start_token_id": 2, "eos_token_id": 7})
    assert ours is not None
    marks = ours.target.template
    assert (marks.opening, marks.forced, marks.stops, marks.never, marks.ended) == ((2,), (0,), (9,), (1,), True)
    assert ours.target.eos == 2


def test_a_folder_without_texts_has_no_tokenizer(tmp_path: Path) -> None:
    assert read(tmp_path, {"model_type": "vit"}) is None


def broken(folder: Path) -> list[tuple[str, Callable[[], Any], str]]:
    def text(name: str, content: str) -> Callable[[], Any]:
        return lambda: (folder / name).write_text(content, encoding="utf-8")

    good = pieces("t5")
    charsmap = b"\x1a\x06\x12\x04" + b"\xff\xff\xff\x7f"
    return [
        ("t5", text("tokenizer.json", "{not json"), "cannot be read as a tokenizer"),
        ("t5", text("tokenizer.json", '{"model": {"type": "Magic"}}'), "cannot be read as a tokenizer"),
        ("t5", text("tokenizer_config.json", "[1, 2]"), "expected a JSON object"),
        ("t5", lambda: (folder / "spiece.model").write_bytes(good[: len(good) // 2]), "not a SentencePiece model"),
        ("t5", lambda: (folder / "spiece.model").write_bytes(b"\xff" * 40), "not a SentencePiece model"),
        (
            "t5",
            lambda: (folder / "spiece.model").write_bytes(good + charsmap),
            "cannot be read as a tokenizer|not a SentencePiece",
        ),
        ("bert", text("vocab.txt", "[PAD]\nhello\n"), r"\[UNK\] is missing"),
        ("bert", text("vocab.txt", "[UNK]\na\nb\n"), "no token for cls, sep"),
        ("gpt2", text("merges.txt", "a b c\n"), "a merge must have two tokens"),
        ("gpt2", text("vocab.json", '{"a": 0, "b": 0}'), "not a vocabulary"),
        ("gpt2", text("vocab.json", '{"a": -1}'), "not a vocabulary"),
        ("unheard", text("vocab.txt", "a\n"), "a tokenizer without a class"),
    ]


@pytest.mark.parametrize("number", range(12))
def test_malformed_tokenizer_files_are_refused(number: int, tmp_path: Path) -> None:
    model, spoil, message = broken(tmp_path)[number]
    if model == "gpt2":
        byte_pairs(tmp_path, END)
    if number == 2:
        sentence_pieces(tmp_path, "t5")
    spoil()
    with pytest.raises(UserError, match=message):
        read(tmp_path, {"model_type": model})


def test_more_tokens_than_the_embedding_has_are_refused(tmp_path: Path) -> None:
    words(tmp_path)
    ours = read(tmp_path, {"model_type": "bert"})
    assert ours is not None
    size = ours.source.size
    assert read(tmp_path, {"model_type": "bert", "vocab_size": size}) is not None
    with pytest.raises(UserError, match=f"{size} tokens, the model's embedding {size - 1}"):
        read(tmp_path, {"model_type": "bert", "vocab_size": size - 1})


def test_a_damaged_charsmap_is_refused_with_a_message(tmp_path: Path) -> None:
    """The library panics on it, at the latest when it reads a text."""
    model = SentencePieceModel.parse(pieces("t5"))
    spoilt = replace(model, charsmap=struct.pack("<I", 64) + bytes(range(3, 67)), rule="")
    with pytest.raises(UserError, match="damaged"):
        Tokenizer(build(spoilt), template=Template()).encode_batch([*TEXTS, *LINES])


def test_a_file_too_large_for_a_tokenizer_is_not_read(tmp_path: Path) -> None:
    for model, name in (("bert", "vocab.txt"), ("t5", "spiece.model"), ("gpt2", "tokenizer.json")):
        with (tmp_path / name).open("wb") as file:
            file.truncate((1 << 28) + 1)
        with pytest.raises(UserError, match="at most 268,435,456 are read"):
            read(tmp_path, {"model_type": model})


@pytest.mark.parametrize("number", [-1, 500, 10**12])
def test_special_tokens_outside_the_embedding_are_refused(number: int, tmp_path: Path) -> None:
    byte_pairs(tmp_path, END)
    config: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 500}
    assert read(tmp_path, config | {"eos_token_id": 499}) is not None
    with pytest.raises(UserError, match=rf"special token ids \[{number}\]"):
        read(tmp_path, config | {"eos_token_id": number})
    (tmp_path / "generation_config.json").write_text(json.dumps({"forced_bos_token_id": number}))
    with pytest.raises(UserError, match=rf"special token ids \[{number}\]"):
        read(tmp_path, config)
    with pytest.raises(UserError, match="token ids must be integers"):
        read(tmp_path, config | {"eos_token_id": "zero"})


def test_padding_and_truncation_of_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    original("BertTokenizer", words(tmp_path)).save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tree["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tree["padding"] = {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None}
    tree["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    plain = read(tmp_path, {"model_type": "bert"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    ours = read(tmp_path, {"model_type": "bert"})
    assert plain is not None and ours is not None and ours.source.template == plain.source.template
    assert ours.source.template.count() == 2
    assert ours.source.encode(LINES[0]) == plain.source.encode(LINES[0])


@pytest.mark.parametrize(
    ("preset", "one"),
    [
        ("bert-base", "<s> A </s>"),
        ("xlnet-base", "<s> A </s>"),
        ("marian", "A </s>"),
        ("llama-15m", "<s> A"),
    ],
)
def test_our_own_tokenizer_is_written_as_the_model_reads_texts(preset: str, one: str, tmp_path: Path) -> None:
    own = train(TokenizerConfig(vocab=400, specials=("<mask>",)), LINES * 2)
    other = train(TokenizerConfig(vocab=300), LINES)
    write(Vocabularies(own, other), tmp_path, parse(Model, preset_tree(preset)))  # type: ignore[type-abstract]
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, *LINES]:
        ids = own.encode(text)
        parts = {"<s>": [own.bos], "</s>": [own.eos], "A": ids}
        assert exported(text)["input_ids"] == [number for part in one.split() for number in parts[part]]
        assert exported.decode(ids) == text
    assert exported.mask_token_id == own.mask and exported.pad_token_id == own.pad
    target = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    assert target(LINES[0], add_special_tokens=False)["input_ids"] == other.encode(LINES[0])


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    byte_pairs(tmp_path, END)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 500, "<more>": 501}))
    ours, theirs = read(tmp_path, {"model_type": "gpt2"}), original("GPT2Tokenizer", tmp_path)
    assert ours is not None and ours.source.special("<more>") == 501
    assert theirs.convert_tokens_to_ids("<more>") == 501
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 7000}))
    with pytest.raises(UserError, match="7000"):
        read(tmp_path, {"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
    ],
)
def test_token_types_exist_where_the_original_has_them(said: dict[str, Any], told: bool) -> None:
    assert _has_token_types(said) == told


def test_rounded_scores_give_the_same_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    scores = [0.0, 0.0, 0.0, -3.9348676204681396, *(-7 / 3 * 1.1**n for n in range(200))]
    inner = Inner(models.Unigram([(f"t{n}", score) for n, score in enumerate(scores)], unk_id=0))
    before = Tokenizer(inner, template=Template(after=(2,)))
    before.save(tmp_path / "tokenizer.json")
    again = Tokenizer(Inner.from_file(str(tmp_path / "tokenizer.json")), template=Template(after=(2,)))
    assert json.loads(before._inner.to_str()) != json.loads(again._inner.to_str()), "nothing was lost: no test"
    assert before.hash == again.hash
