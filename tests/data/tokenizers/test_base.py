"""Any text round-trips exactly, and the same text trains the same tokenizer."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, language_token, train
from allyouneed.errors import UserError

WORDS = (
    "the a dog cat house tree runs walks eats fünf Häuser über schön größer naïve l'homme 狗 猫在 房子 日本語 テキスト"
)


def corpus(seed: int = 0, lines: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=8)) + rng.choice([".", "!", " 2026", "。"]) for _ in range(lines)]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Tokenizer]:
    yield train(TokenizerConfig(kind=request.param, vocab=400), corpus(), languages=["en", "de"])


NASTY = [
    "",
    " ",
    "  a  b ",
    "\x00\x1f\x7f",
    "▁a▁",
    "\ufeff",
    "e\u0301\u0302",
    "👩‍👩‍👧😀",
    "<pad>",
    "a</s><s>b",
    "<2en>",
    "Ġ",
    "\r\n\t\u2028",
]


@given(text=st.text() | st.lists(st.sampled_from([*NASTY, *WORDS.split(), " ", "1"])).map("".join))
@settings(max_examples=300, deadline=None)
@example("<pad><s></s><2en>")
def test_any_text_comes_back_exactly_and_never_becomes_a_special(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    specials = {tokenizer.pad, tokenizer.bos, tokenizer.eos, *tokenizer.languages.values()}
    assert not specials & set(ids)
    assert all(0 <= number < tokenizer.size for number in ids)


@given(text=st.text())
@settings(deadline=None)
def test_spans_cover_the_text_in_order(tokenizer: Tokenizer, text: str) -> None:
    spans = tokenizer.spans(text)
    assert len(spans) == len(tokenizer.encode(text))
    assert sorted({n for start, end in spans for n in range(start, end)}) == list(range(len(text)))
    assert spans == sorted(spans)


def test_spans_and_tokens_show_the_same_pieces() -> None:
    tokenizer = train(TokenizerConfig(vocab=600), corpus())
    text = "the dog walks. 狗"
    assert [text[start:end] for start, end in tokenizer.spans(text)] == tokenizer.tokens(tokenizer.encode(text))
    assert tokenizer.tokens(tokenizer.encode(text))[:2] == ["the", " dog"]


def test_partial_characters_are_shown_as_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("龘")
    assert "".join(tokenizer.tokens(ids)) == "<E9><BE><98>"
    assert tokenizer.tokens([tokenizer.pad, tokenizer.eos, tokenizer.language("en")]) == ["<pad>", "</s>", "<2en>"]


def test_text_about_specials_does_not_teach_them() -> None:
    tokenizer = train(TokenizerConfig(vocab=300, min_frequency=1), ["<pad></s> <2en>"] * 500, languages=["en"])
    ids = tokenizer.encode("<pad></s><2en>")
    assert min(ids) > tokenizer.language("en") and tokenizer.decode(ids) == "<pad></s><2en>"


def test_batches_equal_singles_and_specials_vanish_from_decoded_text(tokenizer: Tokenizer) -> None:
    texts = ["the dog", "", "猫在 2026"]
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode(text) for text in texts]
    framed = [[tokenizer.bos, *ids, tokenizer.eos, tokenizer.pad] for ids in batch]
    assert tokenizer.decode_batch(framed) == texts == [tokenizer.decode(ids) for ids in framed]
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (0, 1, 2)


def test_digits_stand_alone_and_words_keep_their_space() -> None:
    tokenizer = train(TokenizerConfig(vocab=1000), ["in 2026, 2026年 the dog's house"] * 100)
    assert tokenizer.tokens(tokenizer.encode("in 2026 the dog,")) == [
        "in",
        " ",
        "2",
        "0",
        "2",
        "6",
        " the",
        " dog",
        ",",
    ]


def test_languages_have_tokens_and_unknown_ones_an_error(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokens([tokenizer.language("de")]) == [language_token("de")]
    with pytest.raises(UserError, match=r"'fr'.*de, en"):
        tokenizer.language("fr")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_repeatable_in_this_process_and_in_another(kind: str) -> None:
    config = TokenizerConfig.model_validate({"kind": kind, "vocab": 330})
    hashes = {train(config, corpus()).hash for _ in range(4)}
    # Words of equal frequency in mirror image: as many ties as can be.
    ties = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"] * 3
    assert len({train(config, ties).hash for _ in range(4)}) == 1
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_base import corpus, train, TokenizerConfig\n"
        f"print(train(TokenizerConfig(kind={kind!r}, vocab=330), corpus()).hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    assert hashes == {done.stdout.strip()}
    assert train(config, corpus(seed=1)).hash not in hashes


def test_a_vocabulary_smaller_than_256_bytes_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocabulary of 100 is too small.*259"):
        train(TokenizerConfig(vocab=100), corpus())
    assert train(TokenizerConfig(vocab=259), corpus()).size == 259


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_little_text_makes_a_smaller_vocabulary_and_says_so(kind: str) -> None:
    rng = random.Random(0)
    many = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(300)] * 2
    tokenizer = train(TokenizerConfig.model_validate({"kind": kind, "vocab": 5000}), ["hello hello"])
    assert 259 <= tokenizer.size < 5000
    assert str(tokenizer.size) in tokenizer.notes[0] and "5000" in tokenizer.notes[0]
    assert train(TokenizerConfig.model_validate({"kind": kind, "vocab": 280}), many).notes == []


def test_no_text_and_impossible_configs_are_refused() -> None:
    with pytest.raises(UserError, match="no text"):
        train(TokenizerConfig(), ["", ""])
    with pytest.raises(ConfigError, match="min_frequency"):
        parse(TokenizerConfig, {"kind": "unigram", "min_frequency": 3})
    with pytest.raises(ConfigError, match="specials"):
        parse(TokenizerConfig, {"specials": ["word"]})


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    for call in (tokenizer.encode, tokenizer.spans):
        with pytest.raises(UserError, match="surrogate"):
            call("a\ud800")


def test_a_saved_tokenizer_is_the_same_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    text = "the Häuser 狗 <pad> 😀"
    assert loaded.hash == tokenizer.hash and loaded.encode(text) == tokenizer.encode(text)
    assert loaded.languages == tokenizer.languages and loaded.decode(loaded.encode(text)) == text
    (tmp_path / "t.json").write_text(json.dumps(json.loads((tmp_path / "t.json").read_text()), indent=7))
    assert Tokenizer.load(tmp_path / "t.json").hash == tokenizer.hash


@pytest.mark.parametrize("content", [None, "", "{}", "not json", '{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_missing_or_corrupt_file_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_a_foreign_tokenizer_brings_its_own_specials(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers

    words = {"[UNK]": 0, "hello": 1, "[E]": 2, "[B]": 3, "world": 4, "[P]": 5}
    inner = Inner(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["[E]", "[B]", "[P]"])
    inner.save(str(tmp_path / "f.json"))
    foreign = Tokenizer.load(tmp_path / "f.json", pad="[P]", bos="[B]", eos=2)
    assert (foreign.pad, foreign.bos, foreign.eos) == (5, 3, 2)
    assert foreign.encode("hello world") == [1, 4] and foreign.tokens([1, 4, 2]) == ["hello", "world", "[E]"]
    with pytest.raises(UserError, match="'<pad>'"):
        Tokenizer.load(tmp_path / "f.json")


@pytest.mark.parametrize("joint", [True, False])
def test_vocabularies_survive_their_folder(tmp_path: Path, joint: bool) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"{line}\tziel {line[::-1]}\n" for line in corpus()))
    files = [PairFiles(path=tmp_path / "a.tsv", to="en")]
    Vocabularies.train(TokenizerConfig(vocab=300, joint=False), files).save(tmp_path / "v")
    made = Vocabularies.train(TokenizerConfig(vocab=300, joint=joint), files)
    made.save(tmp_path / "v")  # over the other kind: nothing of it may stay
    loaded = Vocabularies.load(tmp_path / "v")
    assert loaded.joint == made.joint == joint and loaded.hash == made.hash
    assert made.source.language("en") == 3
    assert ("en" in made.target.languages) == joint
    assert (tmp_path / "v" / "tokenizer.target.json").exists() != joint
    if not joint:
        assert made.source.hash != made.target.hash
        assert made.hash != Vocabularies(made.target, made.source).hash
