"""Imported models in use: the same answers as `transformers` gives, with their own tokenizers."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import allyouneed as ayn
from allyouneed.errors import UserError
from allyouneed.infer.evaluate import evaluate
from allyouneed.interop.load import about
from allyouneed.training import load_recipe, train
from tokenizer_files import LINES, ROBERTA, byte_pairs, marian, said, sentence_pieces, words

TEXTS = ["translate English to German: The quick brown fox.", "she sells sea shells", "a", "Über die Häuser, 你好"]
SMALL = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3}
SMALL |= {"decoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.6}
SMALL |= {"max_position_embeddings": 64}
ENCODER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
ENCODER |= {"initializer_range": 0.6, "max_position_embeddings": 66}
LANGUAGE = re.compile(r"__[a-z]+__")
WAYS = {
    "greedy": ({"num_beams": 1}, {"method": "greedy"}),
    "beam": (
        {"num_beams": 3, "length_penalty": 1.5},
        {"method": "beam", "beam": 3, "penalty": "power", "length_penalty": 1.5},
    ),
}


@dataclass
class Case:
    model: Any
    tokenizer: Any
    ours: Any
    says_languages: bool = False  # the library does not take their tokens for special


def saved(folder: Path, model: Any, tokenizer: Any = None) -> Any:
    model.eval().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return ayn.load(folder)


def t5(folder: Path) -> Case:
    tokenizer = transformers.T5Tokenizer.from_pretrained(sentence_pieces(folder, "t5"))
    config = transformers.T5Config(
        vocab_size=len(tokenizer) + 5,
        d_model=24,
        d_kv=7,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        initializer_factor=4.0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Case(model, tokenizer, saved(folder, model, tokenizer))


def byt5(folder: Path) -> Case:
    said(folder, tokenizer_class="ByT5Tokenizer")
    tokenizer = transformers.ByT5Tokenizer.from_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=384,
        d_model=24,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        initializer_factor=4.0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.generation_config.bad_words_ids = [[number] for number in range(131, 384)]  # whole characters only
    return Case(model, tokenizer, saved(folder, model))


def bart(folder: Path) -> Case:
    tokenizer = transformers.RobertaTokenizer.from_pretrained(byte_pairs(folder, ROBERTA))
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=len(tokenizer), **ids, **SMALL)
    )
    model.generation_config.forced_bos_token_id = 0
    model.generation_config.forced_eos_token_id = 2
    return Case(model, tokenizer, saved(folder, model, tokenizer))


def opus(folder: Path) -> Case:
    pad = marian(folder, without=("▁the",))
    ids = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad, "forced_eos_token_id": 0}
    model = transformers.MarianMTModel(transformers.MarianConfig(vocab_size=pad + 1, **ids, **SMALL))
    model.generation_config.bad_words_ids = [[pad]]
    model.generation_config.forced_eos_token_id = 0
    return Case(model, transformers.MarianTokenizer.from_pretrained(folder), saved(folder, model))


def m2m(folder: Path) -> Case:
    tokenizer = transformers.M2M100Tokenizer.from_pretrained(sentence_pieces(folder, "m2m_100"))
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    size = tokenizer.get_lang_id("zu") + 1
    model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(vocab_size=size, **ids, **SMALL))
    return Case(model, tokenizer, saved(folder, model), says_languages=True)


def mbart(folder: Path) -> Case:
    tokenizer = transformers.MBart50Tokenizer.from_pretrained(sentence_pieces(folder, "mbart"))
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.MBartConfig(vocab_size=len(tokenizer), **ids, **SMALL)
    return Case(
        (model := transformers.MBartForConditionalGeneration(config)), tokenizer, saved(folder, model, tokenizer)
    )


def mbart_one_way(folder: Path) -> Case:
    """Its targets begin with the language token."""
    tokenizer = transformers.MBartTokenizer.from_pretrained(sentence_pieces(folder, "mbart"))
    start = tokenizer.convert_tokens_to_ids("de_DE")
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": start}
    config = transformers.MBartConfig(vocab_size=len(tokenizer), **ids, **SMALL)
    return Case(
        (model := transformers.MBartForConditionalGeneration(config)), tokenizer, saved(folder, model, tokenizer)
    )


def theirs(case: Case, text: str, options: dict[str, Any], **more: Any) -> str:
    given = dict(case.tokenizer(text, return_tensors="pt"))
    given.pop("token_type_ids", None)
    out = case.model.generate(**given, do_sample=False, max_new_tokens=12, **options, **more)
    found = case.tokenizer.decode(out[0], skip_special_tokens=True)
    return LANGUAGE.sub("", found).strip() if case.says_languages else found.strip()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [t5, byt5, bart])
def test_generated_texts_are_those_of_transformers(make: Callable[[Path], Case], way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = make(tmp_path)
    asked, options = WAYS[way]
    expected = [theirs(case, text, asked) for text in TEXTS]
    found = case.ours.seq2seq(TEXTS, max_length=12, extra=99, **options)
    assert [text.strip() for text in found] == expected
    assert len(set(expected)) > 1  # it does look at what it reads


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "languages"), [(opus, {}), (m2m, {"to": "de"}), (mbart, {"to": "de_DE"}), (mbart_one_way, {})]
)
def test_translations_are_those_of_transformers(
    make: Callable[[Path], Case], languages: dict[str, str], way: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    case = make(tmp_path)
    asked, options = WAYS[way]
    forced = {}
    if make is not opus:
        case.tokenizer.src_lang = "en" if make is m2m else "en_XX"
        languages = {**languages, "from_": "en"}
    if "to" in languages:
        number = case.tokenizer.get_lang_id("de") if make is m2m else case.tokenizer.convert_tokens_to_ids("de_DE")
        forced = {"forced_bos_token_id": number}
    expected = [theirs(case, text, asked, **forced) for text in TEXTS]
    found = case.ours.translate(TEXTS, max_length=12, extra=99, **languages, **options)
    assert found == expected
    assert len(set(expected)) > 1


GENERATION = [
    {"max_length": 9, "min_length": 5},
    {"max_length": 11, "min_length": 6, "num_beams": 3, "length_penalty": 0.7, "early_stopping": True},
    {"max_new_tokens": 7, "num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("number", range(len(GENERATION)))
@pytest.mark.parametrize("make", [t5, bart, opus, m2m])
def test_a_folder_brings_its_own_generation_options(make: Callable[[Path], Case], number: int, tmp_path: Path) -> None:
    torch.manual_seed(11)
    case = make(tmp_path)
    case.model.generation_config.update(**GENERATION[number])
    if make is m2m:
        case.model.generation_config.forced_bos_token_id = case.tokenizer.get_lang_id("de")
    ours = saved(tmp_path, case.model)
    assert ours.folder.notes == []
    expected = []
    for text in TEXTS:
        given = dict(case.tokenizer(text, return_tensors="pt"))
        given.pop("token_type_ids", None)
        out = case.tokenizer.decode(case.model.generate(**given)[0], skip_special_tokens=True)
        out = out.replace("\ufffd", "")  # random weights generate bytes that are no UTF-8; ours are never printed
        expected.append((LANGUAGE.sub("", out) if case.says_languages else out).strip())
    from_ = {"from_": "en"} if make is m2m else {}
    found = ours.translate(TEXTS, **from_) if make in (opus, m2m) else ours.seq2seq(TEXTS)
    assert [text.strip() for text in found] == expected


def test_multilingual_models_require_languages(tmp_path: Path) -> None:
    ours = m2m(tmp_path).ours
    with pytest.raises(UserError, match="set the source language"):
        ours.translate("Hello", to="de")
    with pytest.raises(UserError, match="set the target language"):
        ours.translate("Hello", from_="en")
    with pytest.raises(UserError, match="unknown target language 'klingon'"):
        ours.translate("Hello", to="klingon", from_="en")


def test_links_of_an_imported_translator_point_into_the_texts(tmp_path: Path) -> None:
    torch.manual_seed(2)
    ours = m2m(tmp_path).ours
    (found,) = ours.translate_full(["the quick fox"], "de", from_="en", align=True, method="greedy", max_length=6)
    assert found.alignment
    for link in found.alignment:
        assert found.source[slice(*link.source_span)] == link.source
        assert found.text[slice(*link.target_span)] == link.target


def test_a_text_too_long_to_read_is_refused_and_t5_reads_any(tmp_path: Path) -> None:
    (tmp_path / "bart").mkdir()
    (tmp_path / "t5").mkdir()
    with pytest.raises(UserError, match="more than the model's 64; shorten or split it"):
        bart(tmp_path / "bart").ours.seq2seq("the cat sat on the mat " * 30)
    assert isinstance(t5(tmp_path / "t5").ours.seq2seq("the cat sat " * 300, method="greedy", max_length=2), str)


def test_special_tokens_are_read_when_they_are_meant(tmp_path: Path) -> None:
    case = t5(tmp_path)
    text = "The <extra_id_0> sat on <extra_id_1> mat"
    ids = case.tokenizer(text, return_tensors="pt")["input_ids"]
    expected = case.tokenizer.decode(
        case.model.generate(ids, max_new_tokens=6, do_sample=False)[0], skip_special_tokens=True
    )
    assert case.ours.seq2seq_full([text], specials=True, method="greedy", max_length=6)[0].text == expected
    source = case.ours.folder.tokenizers.source
    assert not set(source.encode(text)) & {source.special("<extra_id_0>"), source.special("<extra_id_1>")}


def bert(folder: Path, kind: str, **more: Any) -> tuple[Any, Any, Any]:
    tokenizer = transformers.BertTokenizer.from_pretrained(words(folder))
    config = transformers.BertConfig(vocab_size=len(tokenizer), **ENCODER, **more)
    model = getattr(transformers, f"BertFor{kind}")(config)
    return model, tokenizer, saved(folder, model, tokenizer)


def roberta(folder: Path, kind: str, **more: Any) -> tuple[Any, Any, Any]:
    tokenizer = transformers.RobertaTokenizer.from_pretrained(byte_pairs(folder, ROBERTA))
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    config = transformers.RobertaConfig(vocab_size=len(tokenizer), **ids, **ENCODER, **more)
    model = getattr(transformers, f"RobertaFor{kind}")(config)
    return model, tokenizer, saved(folder, model, tokenizer)


def xlnet(folder: Path, kind: str, **more: Any) -> tuple[Any, Any, Any]:
    tokenizer = transformers.XLNetTokenizer.from_pretrained(sentence_pieces(folder, "xlnet"))
    config = transformers.XLNetConfig(
        vocab_size=len(tokenizer), d_model=24, n_layer=2, n_head=3, d_inner=32, initializer_range=0.6, **more
    )
    model = getattr(transformers, f"XLNetFor{kind}")(config)
    return model, tokenizer, saved(folder, model, tokenizer)


@pytest.mark.parametrize("make", [bert, roberta])
def test_masks_are_filled_as_by_transformers(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, tokenizer, ours = make(tmp_path, "MaskedLM")
    mask = tokenizer.mask_token
    text = f"the cat {mask} on the mat"
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=len(tokenizer))
    specials = set(tokenizer.all_special_ids)
    expected = [entry for entry in pipe(text) if entry["token"] not in specials]
    found = ours.fill_mask("the cat <mask> on the mat", top=7)[0]
    assert [filling.token.strip() for filling in found] == [entry["token_str"].strip() for entry in expected[:7]]
    assert [filling.text for filling in found] == [entry["sequence"] for entry in expected[:7]]
    scores = [entry["score"] for entry in expected[:7]]
    assert [filling.score for filling in found] == pytest.approx(scores, rel=1e-4)
    two = ours.fill_mask([f"{mask} cat <mask>"], top=2)
    assert len(two[0]) == 2 and all("<mask>" in filling.text for fillings in two[0] for filling in fillings)


def test_xlnet_predicts_masked_tokens(tmp_path: Path) -> None:
    torch.manual_seed(9)
    tokenizer = transformers.XLNetTokenizer.from_pretrained(sentence_pieces(tmp_path, "xlnet"))
    config = transformers.XLNetConfig(
        vocab_size=len(tokenizer), d_model=24, n_layer=2, n_head=3, d_inner=32, initializer_range=0.6
    )
    model = transformers.XLNetLMHeadModel(config)
    ours = saved(tmp_path, model, tokenizer)
    given = tokenizer("the cat<mask> on the mat", return_tensors="pt", return_token_type_ids=True)
    ids = given["input_ids"]
    place = ids[0].tolist().index(tokenizer.mask_token_id)
    hidden = torch.zeros(1, ids.shape[1], ids.shape[1])
    hidden[:, :, place] = 1
    asked = torch.zeros(1, 1, ids.shape[1])
    asked[0, 0, place] = 1
    with torch.no_grad():
        logits = model(ids, token_type_ids=given["token_type_ids"], perm_mask=hidden, target_mapping=asked).logits
    shares = logits[0, 0].softmax(-1)
    shares[ours.tokenizer.specials] = -1
    scores, tokens = shares.topk(5)
    (found,) = ours.fill_mask("the cat<mask> on the mat", top=5)
    assert [filling.token for filling in found] == [tokenizer.decode([number]) for number in tokens.tolist()]
    assert [filling.score for filling in found] == pytest.approx(scores.tolist(), rel=1e-4)


@pytest.mark.parametrize("make", [bert, roberta, xlnet])
def test_classes_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(4)
    labels = {0: "bad", 1: "good", 2: "neither"}
    model, tokenizer, ours = make(tmp_path, "SequenceClassification", id2label=labels, label2id={})
    model.config.problem_type = None
    texts: list[Any] = [LINES[0], "a", ("the cat sat", LINES[4]), ("Über die Häuser", "the dog")]
    for text, found in zip(texts, ours.classify_full(texts), strict=True):
        both = [text] if isinstance(text, str) else text
        given = tokenizer(*both, return_tensors="pt", return_token_type_ids=make is not roberta)
        with torch.no_grad():
            chances = model(**given).logits[0].softmax(-1).tolist()
        expected = {labels[number]: chance for number, chance in enumerate(chances)}
        assert found.scores == pytest.approx(expected, abs=1e-5), text
        assert found.label == max(expected, key=expected.__getitem__)


def test_a_single_class_is_an_independent_probability(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model, tokenizer, ours = bert(tmp_path, "SequenceClassification", num_labels=1)
    (found,) = ours.classify_full([("the cat", "the dog")])
    with torch.no_grad():
        expected = model(**tokenizer("the cat", "the dog", return_tensors="pt")).logits.sigmoid().item()
    assert found.scores == pytest.approx({"LABEL_0": expected}, abs=1e-5)


@pytest.mark.parametrize("make", [bert, roberta])
def test_words_are_tagged_by_their_first_piece(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(6)
    labels = {0: "O", 1: "B-X", 2: "I-X"}
    model, tokenizer, ours = make(tmp_path, "TokenClassification", id2label=labels, label2id={})
    text = "Über die Häuser fliegt  ein großer 北京 Vogel emoji 😀 unbelievable"
    given = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    places = given.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        tags = model(**given).logits[0].argmax(-1).tolist()
    found = ours.tag(text)
    at = 0
    for word, tag in found:
        at = text.index(word, at)
        first = next(n for n, (begin, end) in enumerate(places) if begin < end and begin <= at < end)
        assert tag == labels[tags[first]], word
        at += len(word)
    assert [word for word, _ in found if word in "北京"] == ["北", "京"]
    assert ours.tag([["the", "cat"], ["a"]])[0] == ours.tag("the cat")
    assert ours.tag("") == ours.tag(" ") == [] and ours.tag(["a", ""])[1] == []


@pytest.mark.parametrize("make", [bert, roberta])
def test_embeddings_are_means_of_hidden_states(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model, tokenizer, _ = make(tmp_path, "MaskedLM")
    ours = ayn.load(tmp_path, task="similarity")
    body = model.base_model
    with torch.no_grad():
        expected = [body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in LINES[:3]]
    assert torch.allclose(ours.embed(LINES[:3]), torch.stack(expected), atol=1e-5)


def test_an_imported_folder_of_ours_answers_the_same(tmp_path: Path) -> None:
    torch.manual_seed(8)
    (tmp_path / "theirs").mkdir()
    case = m2m(tmp_path / "theirs")
    case.ours.folder.save(tmp_path / "ours")
    options: dict[str, Any] = {"to": "de", "from_": "en", "method": "greedy", "max_length": 9}
    assert ayn.load(tmp_path / "ours").translate(TEXTS, **options) == case.ours.translate(TEXTS, **options)


def test_an_imported_masked_model_can_be_trained(tmp_path: Path) -> None:
    """Its mask token is named differently."""
    _, _, ours = bert(tmp_path, "MaskedLM")
    (tmp_path / "text.txt").write_text("\n".join(LINES * 4), encoding="utf-8")
    recipe = {
        "task": "masked-lm", "start": str(ours.folder.path), "output": str(tmp_path / "run"), "steps": 2,
        "data": {"train": str(tmp_path / "text.txt"), "max_tokens": 24}, "batch": {"rows": 2, "row": 24},
        "save": {"every": 2}, "precision": "fp32", "device": "cpu",
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    train(load_recipe(tmp_path / "recipe.yaml"))
    assert ayn.load(tmp_path / "run" / "model").fill_mask("the cat <mask> on the mat")


def test_a_task_without_files_of_examples_explains_the_alternative(tmp_path: Path) -> None:
    case = t5(tmp_path)
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    result, _ = evaluate(case.ours, tmp_path / "pairs.tsv")
    assert {"exact", "rouge-l", "bleu"} <= set(result.figures)  # an imported model is scored on pairs
    case.ours.folder.task["kind"] = "rhymes"
    with pytest.raises(UserError, match=r"rhymes cannot be scored on a file of examples.* --hypotheses"):
        evaluate(case.ours, tmp_path / "pairs.tsv")


def test_an_opus_model_knows_the_direction_that_its_tokenizer_names(tmp_path: Path) -> None:
    opus(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    named = {"source_lang": "eng", "target_lang": "deu"}
    settings.write_text(json.dumps(named))
    assert ayn.load(tmp_path).folder.directions == about(tmp_path)["directions"] == [("en", "de")]
    settings.write_text(json.dumps(named | {"target_lang": "ROMANCE"}))  # a group, chosen by tokens
    assert ayn.load(tmp_path).folder.directions == about(tmp_path)["directions"] == []


@pytest.mark.parametrize("make", [bert, roberta])
def test_answers_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(8)
    model, tokenizer, ours = make(tmp_path, "QuestionAnswering")
    model.double(), ours.model.double()  # scores are differences of logits of 6, which fp32 rounds at 1e-6
    question, text = "the cat?", "Über die Häuser fliegt ein großer Vogel unbelievable"
    given = tokenizer(question, text, return_tensors="pt", return_offsets_mapping=True)
    offsets, places = given.pop("offset_mapping")[0].tolist(), given.sequence_ids(0)
    with torch.no_grad():
        found = model(**given)
    begin, end = found.start_logits[0], found.end_logits[0]
    inside = [n for n, one in enumerate(places) if one == 1]
    spans = [(float(begin[a] + end[b]), a, b) for a in inside for b in inside if a <= b < a + 30]
    best, first, last = max(spans)
    (answer,) = ours.answer_full([(question, text)])
    assert answer.text == text[offsets[first][0] : offsets[last][1]].strip()
    assert answer.answers[0].score == pytest.approx(best - float(begin[0] + end[0]), abs=1e-5)
    assert answer.nothing == pytest.approx(float(begin[0] + end[0]) - best, abs=1e-5)
