"""What a person can do with a model of each task: `ayn.load(folder)` and a call."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.folder import Folder
from allyouneed.infer.evaluate import evaluate
from allyouneed.infer.predictors.base import EvaluationResult
from allyouneed.infer.predictors.classifier import Classifier
from allyouneed.infer.predictors.registry import predictor
from allyouneed.tasks.task import Task

Load = Callable[[str], Any]
PROMPTS = ["the cat", "a dog likes the moon. my friend follows", "", "她"]


@pytest.fixture(scope="session")
def load(trained: Callable[[str], tuple[Path, str]]) -> Load:
    return lambda run: ayn.load(trained(run)[0] / "model")


# --- language models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["causal-lm", "prefix-lm", "prefix-lm text"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "greedy", "max_length": 12},
        {"method": "beam", "beam": 3, "max_length": 9},
        {"method": "sample", "temperature": 1.5, "seed": 5, "max_length": 15},
    ],
    ids=lambda options: options["method"],
)
def test_a_continuation_is_the_same_alone_and_in_a_batch(load: Load, run: str, options: dict[str, Any]) -> None:
    model = load(run)
    together = [full.candidates[0] for full in model.generate_full(PROMPTS, **options)]
    alone = [model.generate_full([text], first=n, **options)[0].text for n, text in enumerate(PROMPTS)]
    assert [one.text for one in together] == alone and any(alone)
    assert all(one.tokens <= options["max_length"] for one in together)
    assert all(one.finished or one.tokens == options["max_length"] for one in together)


def test_greedy_tokens_are_the_most_likely_given_the_whole_text(load: Load) -> None:
    """Greedy, without a cache: the whole text through the model again for each token."""
    model = load("causal-lm")
    tokenizer = model.tokenizer
    for prompt in PROMPTS:
        ids = [tokenizer.bos, *tokenizer.encode(prompt)]
        begin = len(ids)
        never = [n for n in tokenizer.specials if n != tokenizer.eos]
        while len(ids) - begin < 12:
            with torch.no_grad():
                scores = model.model.logits(ayn.nn.batch.Batch(ayn.nn.batch.Rows(torch.tensor([ids]))))[0, -1]
            scores[never] = -torch.inf
            best = int(scores.argmax())
            if best == tokenizer.eos:
                break
            ids.append(best)
        assert model.generate(prompt, method="greedy", max_length=12) == tokenizer.decode(ids[begin:])


def test_several_continuations_with_scores(load: Load) -> None:
    model = load("causal-lm")
    (found,) = model.generate_full(["the cat"], method="beam", beam=4, best=3, max_length=8)
    assert len(found.candidates) == 3 and found.prompt == "the cat"
    scores = [candidate.score for candidate in found.candidates]
    assert scores == sorted(scores, reverse=True)
    drawn = model.generate_full(["the cat"], method="sample", best=5, seed=1)[0].candidates
    assert len({candidate.text for candidate in drawn}) > 1
    assert model.generate("the cat", seed=1) == model.generate("the cat", seed=1)
    assert not model.generate_full(["the cat"], method="greedy", max_length=1)[0].candidates[0].finished


def test_a_prefix_model_answers_prompts(load: Load) -> None:
    model = load("prefix-lm")
    found = model.generate(["she"], method="greedy")[0]
    assert found and not found.startswith("she")


def test_invalid_prompts_are_refused(load: Load) -> None:
    model = load("causal-lm")
    with pytest.raises(ayn.UserError, match="must be a string, not int"):
        model.generate(["a", 3])
    with pytest.raises(ayn.UserError, match=r"use \[text\]"):
        model.generate_full("a")
    with pytest.raises(ayn.UserError, match="beem: unknown"):
        model.generate("a", beem=3)
    long = model.generate_full(["the cat sees the moon. " * 20], method="greedy", max_length=2)[0]
    assert "it was trained on 64" in long.notes[0]


@pytest.mark.parametrize("run", ["masked-lm", "permutation-lm"])
def test_masks_are_filled(run: str, load: Load) -> None:
    model = load(run)
    one = model.fill_mask("the cat<mask> the sea.", top=3)
    assert len(one) == 1 and len(one[0]) == 3
    best = one[0][0]
    assert best.text == f"the cat{best.token} the sea." and one[0][1].score <= best.score <= 1
    two = model.fill_mask(["<mask> cat", "the<mask> sees<mask>."], top=2)
    assert [len(text) for text in two] == [1, 2]
    alone = model.fill_mask("<mask> cat", top=2)
    assert [f.text for f in alone[0]] == [f.text for f in two[0][0]], "alone and in a batch"
    assert [f.score for f in alone[0]] == pytest.approx([f.score for f in two[0][0]], rel=1e-5)
    assert "<mask>" in two[1][0][0].text, "the other mask stays"
    with pytest.raises(ayn.UserError, match="contains no <mask>"):
        model.fill_mask("the cat")
    with pytest.raises(ayn.UserError, match="at least 1"):
        model.fill_mask("<mask>", top=0)


def test_gaps_are_filled(load: Load) -> None:
    model = load("span-corruption")
    texts = ["the cat <mask> sea. a dog<mask>", "my friend<mask>."]
    found = model.fill(texts, beam=1)
    assert found[1].startswith("my friend") and found[1].endswith(".") and "<mask>" not in "".join(found)
    assert model.fill(texts[1], beam=1) == found[1]
    with pytest.raises(ayn.UserError, match="expected 1 to 8 <mask>"):
        model.fill("the cat")


# --- answers --------------------------------------------------------------------------------------------------------


def test_texts_are_classified_in_words(load: Load) -> None:
    model = load("classification")
    texts = ["the film is wonderful.", "a dog likes the sea. the film is a bore."]
    assert model.labels == ["neg", "pos"]
    assert model.classify(texts) == ["pos", "neg"] and model.classify(texts[0]) == "pos"
    full = model.classify_full([*texts, ""])
    for one in full:
        assert list(one.scores.values()) == sorted(one.scores.values(), reverse=True)
        assert sum(one.scores.values()) == pytest.approx(1) and one.label == next(iter(one.scores))
    assert model.classify_full(texts[:1])[0].scores == pytest.approx(full[0].scores, abs=1e-6)
    assert isinstance(model.classify(("the film", "is wonderful")), str)
    (cut,) = model.classify_full(["the film is wonderful. " * 30])
    assert "truncated to the training length of 46" in cut.notes[0] and not full[0].notes
    with pytest.raises(ayn.UserError, match="a string or a pair of strings"):
        model.classify([("a", "b", "c")])


def test_words_are_tagged(load: Load) -> None:
    model = load("tagging")
    found = model.tag("Anna lives in New York .")
    assert [word for word, _ in found] == ["Anna", "lives", "in", "New", "York", "."]
    assert dict(found)["Anna"] == "B-PER" and dict(found)["York"] == "I-LOC"
    many = model.tag([["Anna", "lives", "in", "New", "York", "."], "王芳 lives in 上海"])
    assert many[0] == found and [word for word, _ in many[1]] == ["王", "芳", "lives", "in", "上", "海"]
    (full,) = model.tag_full(["Anna lives in New York ."])
    assert full.spans == [("PER", ["Anna"]), ("LOC", ["New", "York"])]
    long = ["Anna", "lives", "in", "Ulm", "."] * 40
    assert [word for word, _ in model.tag([long])[0]] == long, "in parts, none lost"
    with pytest.raises(ayn.UserError, match="a list of non-empty words"):
        model.tag([["a", " "]])
    assert model.tag([[]]) == [[]]


def test_texts_become_vectors(load: Load) -> None:
    model = load("similarity")
    texts = ["the cat sees the moon", "a dog", "the cat sees the moon. a dog hears a bird."]
    vectors = model.embed(texts)
    assert vectors.shape == (3, 32)
    torch.testing.assert_close(model.embed(texts[1]), vectors[1], rtol=1e-5, atol=1e-6)
    cosine = torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0)
    assert model.similarity((texts[0], texts[1])) == pytest.approx(float(cosine), abs=1e-5)
    same, other = model.similarity([(texts[0], texts[0]), ("the cat sees the moon", "a child likes some bread")])
    assert same == pytest.approx(1) and other < 0.7
    assert model.embed([]).shape == (0, 32)
    with pytest.warns(UserWarning, match="truncated to 46"):
        model.embed("the cat " * 50)
    with pytest.raises(ayn.UserError, match="expected pairs of texts"):
        model.similarity(["ab", "cd"])


def test_paired_texts_are_retrieved(load: Load) -> None:
    model = load("contrastive")
    own, wrong = model.similarity([("a dog hears the sea", "狗听见大海"), ("a dog hears the sea", "老人喜欢面包")])
    assert own > wrong + 0.2


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_keeps_its_labels_and_its_task(trained: Callable[[str], tuple[Path, str]], tmp_path: Path) -> None:
    folder = Folder.load(trained("classification")[0] / "model")
    assert folder.labels == ["neg", "pos"] and folder.task["kind"] == "classification"
    folder.save(tmp_path / "again")
    assert isinstance(predictor(Folder.load(tmp_path / "again")), Classifier)
    with pytest.raises(ayn.UserError, match=r"unknown task 'juggling' .*\(allowed: translation"):
        predictor(replace(folder, task={"kind": "juggling"}))


def test_the_model_card_names_the_labels(trained: Callable[[str], tuple[Path, str]]) -> None:
    card = (trained("tagging")[0] / "model" / "README.md").read_text(encoding="utf-8")
    assert "- labels: B-LOC, B-PER, I-LOC, I-PER, O" in card and "300 sentences" in card and "words in 60 steps" in card


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("causal-lm", "txt"),
        ("masked-lm words", "txt"),
        ("permutation-lm", "txt"),
        ("span-corruption", "txt"),
        ("prefix-lm", "pairs.tsv"),
        ("translation", "pairs.tsv"),
        ("classification", "labelled.tsv"),
        ("tagging", "conll"),
        ("similarity", "scored.tsv"),
        ("contrastive", "pairs.tsv"),
    ],
)
def test_a_model_is_scored_on_a_file_as_in_training(
    run: str, name: str, trained: Callable[[str], tuple[Path, str]], texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is read as the training data was: the folder knows which column is what."""
    folder = trained(run)[0]
    expected = json.loads((folder / "result.json").read_text())["scores"]["valid"]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(texts / f"valid.{name}"), "--model", str(folder / "model"), "--json"])
    assert ended.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    metric = next(iter(Task.registry[run.split()[0]].metrics))
    assert found[metric] == pytest.approx(expected[metric], rel=1e-3)


def test_a_file_without_usable_examples_is_named(trained: Callable[[str], tuple[Path, str]], tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_text("one column\n")
    model = ayn.load(trained("classification")[0] / "model")
    with pytest.raises(ayn.UserError, match=r"bad\.tsv: no usable texts(.|\n)*no column 1"):
        evaluate(model, tmp_path / "bad.tsv")


@pytest.mark.parametrize(
    ("run", "file", "text", "said"),
    [
        ("classification", "odd.tsv", "pos\tgood\nposs\tgood\n", "1 of 2 labels are not in .* errors: 'poss'"),
        ("tagging", "odd.conll", "Anna B-PER\nUlm B-CITY\n", "1 of 2 labels are not in .* errors: 'B-CITY'"),
    ],
)
def test_labels_unknown_to_the_model_are_noted(
    run: str, file: str, text: str, said: str, trained: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    judged, _ = evaluate(ayn.load(trained(run)[0] / "model"), tmp_path / file)
    assert [re.search(said, note) is not None for note in judged.notes] == [True]


def test_options_of_translation_are_refused_for_other_tasks(
    trained: Callable[[str], tuple[Path, str]], texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained("tagging")[0] / "model"
    for given in (["--beam", "2"], ["--output", str(tmp_path / "out")], ["--lowercase"], ["--to", "de"]):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", str(texts / "valid.conll"), "--model", str(model), *given])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and f"{given[0]} is for translation" in said


def test_samples_are_one_line_without_control_characters() -> None:
    shown = EvaluationResult({}, "", [{"text": "a\nb\x1b[2J\tc", "predicted": "\u3000好"}]).samples_text()
    assert shown == "  text       a⏎b\\x1b[2J\\x09c\n  predicted  \u3000好"
