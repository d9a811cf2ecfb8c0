"""Errors in a recipe or its data are reported by path, file and line before training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import allyouneed as ayn
from allyouneed.config import ConfigError, parse, preset_names
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.training import Recipe, load_recipe, train
from allyouneed.training.reporting.log import read_log
from toy_texts import ATTENTION, BOTH, DECODER, ENCODER, LAYER, RUNS, Listener, recipe


@pytest.mark.parametrize(
    ("run", "keys", "words"),
    [
        (
            "causal-lm",
            {"model": ENCODER},
            "causal-lm trains a model of kind decoder or decoder-decoder or recurrent-memory or retro, this is encoder",
        ),
        ("masked-lm", {"model": BOTH}, "masked-lm trains a model of kind encoder, this is encoder-decoder"),
        ("tagging", {"task": "taging"}, "task.kind: unknown task 'taging'; did you mean 'tagging'"),
        ("causal-lm", {"validate": {"metric": "bleu"}}, r"validate\.metric: causal-lm has perplexity, loss"),
        ("causal-lm", {"batch": {"source_row": 9}}, r"batch\.source_row needs a task with source and target"),
        (
            "causal-lm",
            {"data": {"train": "a.txt", "filters": {"ratio": 2}}},
            "needs two texts per example; causal-lm has one",
        ),
        (
            "causal-lm",
            {"model": DECODER | {"embed": {"positions": {"kind": "learned", "length": 32}}}},
            r"model\.embed\.positions: 32 positions, but .* up to 64 tokens; set data\.max_tokens: 32",
        ),
        ("similarity", {"tokenizer": {"joint": False}}, r"tokenizer\.joint: false is for translation"),
        ("contrastive", {"data": {"train": {"path": "a.tsv", "to": "de"}}}, "'from' and 'to' are for translation"),
        (
            "classification",
            {"data": {"train": {"path": "a.tsv", "colums": [1, 0]}}},
            r"data\.train\[0\]\.colums: unknown; did you mean 'columns'",
        ),
        (
            "causal-lm",
            {"data": {"train": [{"path": "a.txt"}, {"path": "b.txt", "columns": [0]}]}},
            r"data\.train\[1\]\.columns: unknown",
        ),
        (
            "causal-lm",
            {"data": {"train": {"path": "a.txt", "kind": "pairs"}}},
            "reads files of kind 'text', not 'pairs'",
        ),
        ("classification", {"batch": {"row": 32}}, r"data\.max_tokens is 48, but a row of batch holds 32"),
        (
            "classification",
            {"model": ENCODER | {"head": {"kind": "classes", "pool": "middle"}}},
            r"model\.head\.pool: 'middle' is not allowed",
        ),
    ],
    ids=str,
)
def test_impossible_task_recipes_are_rejected(
    run: str, keys: dict[str, Any], words: str, texts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe(tmp_path, texts, run, **keys)


LSTM = ENCODER | {"encoder": [LAYER | {"mixer": {"kind": "lstm"}}]}


@pytest.mark.parametrize("run", ["classification", "similarity"])
def test_a_pooling_that_has_not_seen_the_text_is_refused(run: str, texts: Path, tmp_path: Path) -> None:
    head = {"kind": "pooled" if run == "similarity" else "classes", "pool": "first"}
    with pytest.raises(ConfigError, match=r"model\.head\.pool: the first token sees 1 of 48 tokens .* set it to last"):
        recipe(tmp_path, texts, run, model=LSTM | {"head": head})


def test_the_default_pooling_moves_to_what_has_seen_the_text_and_says_so(texts: Path, tmp_path: Path) -> None:
    bidirectional = ENCODER | {"encoder": [LAYER | {"mixer": {"kind": "lstm", "bidirectional": True}}]}
    narrow = ENCODER | {"encoder": [LAYER | {"mixer": ATTENTION | {"pattern": "window(3)"}}]}
    models = {"last": LSTM, "first": bidirectional, "mean": narrow}
    for pool, model in models.items():
        made = recipe(tmp_path, texts, "classification", model=model, steps=1)
        config: Any = made.model_for(None)
        assert config.head.pool == pool
    listener = Listener()
    train(recipe(tmp_path, texts, "classification", model=LSTM, steps=1), console=listener.console)
    assert "head.pool: last, as the first token sees 1 of 48 tokens" in listener.text


def test_a_module_of_ones_own_is_not_built_with_a_blind_pooling() -> None:
    tree = LSTM | {"vocab": 50, "head": {"kind": "classes", "labels": 2}}
    with pytest.raises(UserError, match=r"model\.head\.pool: the first token sees 1 of 2 tokens"):
        ayn.build(tree)
    assert ayn.build(tree, ["head.pool=last"]).config.head.pool == "last"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "preset", "words"),
    [
        (
            "translation",
            "whisper-tiny",
            "source_embed: translation trains a model that reads text, this one reads frames",
        ),
        (
            "classification",
            "vit-base-16",
            "embed: classification trains a model that reads text, this one reads patches",
        ),
        ("masked-lm", "clip-vit-b-32", "kind: masked-lm trains a model of kind encoder, this is two-towers"),
        ("permutation-lm", "bert-base", "embed.asks: permutation-lm needs query tokens"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_does(task: str, preset: str, words: str) -> None:
    tree = {"task": task, "model": preset, "data": {"train": "no such file"}, "output": "run"}
    with pytest.raises(ConfigError, match=words) as caught:
        parse(Recipe, tree).model_for(None)
    named = str(caught.value).split(f"presets for {task}: ")[1]
    assert named.split(",")[0].split()[0] in preset_names()
    usable = {"bert-base": "masked-lm", "vit-base-16": "image-classification", "clip-vit-b-32": "image-text"}
    assert (usable | {"whisper-tiny": "transcription"})[preset] in named.split("tasks for this model: ")[1]


def wrong(run: str, text: str, texts: Path, tmp_path: Path, *changes: str, split: str = "train") -> str:
    """The message that training on this text ends with."""
    bad = tmp_path / f"bad.{RUNS[run][0]}"
    bad.write_text(text, encoding="utf-8")
    given = recipe(tmp_path, texts, run, f"data.{split}.path={bad}", *changes)
    with pytest.raises(UserError) as caught:
        train(given, fresh=True, console=Listener().console)
    return str(caught.value)


@pytest.mark.parametrize("run", RUNS)
def test_an_empty_file_is_named(run: str, texts: Path, tmp_path: Path) -> None:
    said = wrong(run, "", texts, tmp_path)
    assert "the file is empty" in said and "0 read" not in said


def test_unseen_labels_are_reported_with_their_line(texts: Path, tmp_path: Path) -> None:
    """A file of unseen labels only is refused; a few are reported, get no loss, and count as errors."""
    said = wrong("classification", "poss\tgood\n", texts, tmp_path, split="valid")
    assert "none of the texts in the data is usable" in said
    assert "label unseen in training: 1" in said
    assert "bad.labelled.tsv:1: 'poss' does not occur in the training data: 'good'" in said
    for run, text, words in [
        ("classification", "pos\tgood\nposs\tgood\n", "bad.labelled.tsv:2: 'poss' does not occur"),
        ("tagging", "Anna B-PER\n\nUlm B-CITY\n", "bad.conll:3: 'B-CITY' does not occur"),
    ]:
        path, listener = tmp_path / f"bad.{RUNS[run][0]}", Listener()
        path.write_text(text)
        result = train(
            recipe(tmp_path, texts, run, f"data.valid.path={path}", "steps=1"), fresh=True, console=listener.console
        )
        assert words in listener.text and result.scores["valid"]["accuracy"] <= 50


def test_a_column_that_holds_no_labels_is_noticed(texts: Path, tmp_path: Path) -> None:
    assert "only one label, 'pos'" in wrong("classification", "pos\ta\npos\tb\n", texts, tmp_path)
    said = wrong("classification", "just text\n", texts, tmp_path)
    assert "no text to learn a vocabulary from" in said and "bad.labelled.tsv:1: 1 column(s), no column 1" in said
    assert "only one tag, 'O'" in wrong("tagging", "Anna O\n", texts, tmp_path)


def test_scores_outside_the_range_are_named(texts: Path, tmp_path: Path) -> None:
    assert "bad.scored.tsv:2: score 9 is outside task.range" in wrong(
        "similarity", "1\ta\tb\n9\ta\tb\n", texts, tmp_path
    )


def test_unusable_data_is_reported(texts: Path, tmp_path: Path) -> None:
    said = wrong("contrastive", "only one column\n", texts, tmp_path, split="valid")
    assert "none of the pairs in the data is usable" in said and "1 column(s), expected 2" in said
    assert "no text to learn a vocabulary from" in wrong("contrastive", "only one column\n", texts, tmp_path)


def test_contrastive_needs_two_pairs(texts: Path, tmp_path: Path) -> None:
    for split in ("train", "valid"):
        assert "only one pair" in wrong("contrastive", "a\tb\n", texts, tmp_path, split=split)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("causal-ml", "task.kind: unknown task 'causal-ml'; did you mean 'causal-lm'?"),
        ({"kind": "similarity", "range": [5, 0]}, "task: range: [lowest, highest]"),
        (None, "task: expected the name of a task or keys with 'kind', not null"),
    ],
    ids=str,
)
def test_a_wrong_task_is_the_only_error(task: Any, said: str, tmp_path: Path) -> None:
    """Which files are allowed depends on the task, so no other error is reported with it."""
    path = tmp_path / "mine.yaml"
    tree = {"task": task, "model": "gpt2", "data": {"train": "a.txt", "valid": {"path": "b.txt"}}, "stepz": 3}
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    one, other = sorted(caught.value.problems)
    assert one.startswith("stepz: unknown") and other.startswith(said)


def test_the_head_is_the_tasks_and_its_size_the_datas(texts: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path, texts, "classification", model=ENCODER | {"head": {"kind": "classes", "pool": "mean"}})
    head = given.model_for(None, ["a", "b", "c"]).head  # type: ignore[attr-defined]
    assert (head.kind, head.labels, head.pool) == ("classes", 3, "mean")
    assert recipe(tmp_path, texts, "classification").model_for(None, ["a", "b"]).head.pool == "first"  # type: ignore[attr-defined]
    causal = recipe(tmp_path, texts, "classification", model=DECODER)
    assert causal.model_for(None, ["a", "b"]).head.pool == "last", "only the last token has seen all"  # type: ignore[attr-defined]
    fixed = recipe(tmp_path, texts, "classification", model=ENCODER | {"head": {"kind": "classes", "labels": 7}})
    with pytest.raises(UserError, match=r"model\.head\.labels: 7, but the training data has 2"):
        train(fixed, console=Listener().console)


@pytest.mark.parametrize("run", RUNS)
def test_a_saved_recipe_means_the_same(run: str, texts: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path, texts, run)
    again = parse(Recipe, yaml.safe_load(yaml.safe_dump(given.resolved())))
    assert again.resolved() == given.resolved() and again.task == given.task and again.metric == given.metric


def test_decoding_defaults_depend_on_the_task(texts: Path, tmp_path: Path) -> None:
    assert recipe(tmp_path, texts, "causal-lm").decoding.method == "sample"
    greedy = recipe(tmp_path, texts, "causal-lm", decoding={"method": "greedy"}).decoding
    assert (greedy.method, greedy.top_p) == ("greedy", None)
    assert recipe(tmp_path, texts, "translation").decoding.method == "beam"


# --- from one task to another ---------------------------------------------------------------------------------------


def test_a_pretrained_body_gets_a_fresh_head_and_learns_faster(texts: Path, tmp_path: Path, trained: Any) -> None:
    start = trained("masked-lm")[0] / "model"
    listener = Listener()
    given = recipe(tmp_path, texts, "classification", steps=30, start=str(start))
    result = train(given, console=listener.console)
    assert "weights loaded; newly initialised: head.classes.bias, head.classes.weight" in listener.text
    before, after = Folder.load(start), Folder.load(result.model)
    assert after.vocabularies.hash == before.vocabularies.hash and after.labels == ["neg", "pos"]
    assert result.scores["valid"]["accuracy"] > 90
    again = Listener()
    more = recipe(tmp_path, texts, "classification", steps=1, start=str(result.model))
    (tmp_path / "more").mkdir()
    train(more.model_copy(update={"output": tmp_path / "more" / "run"}), console=again.console)
    assert "newly initialised" not in again.text, "the same labels: the head is kept too"
    first = read_log(tmp_path / "more" / "run" / "log.jsonl")[0]["loss"]
    assert first < 0.4


def test_start_weights_are_loaded_exactly(texts: Path, tmp_path: Path, trained: Any) -> None:
    start = trained("masked-lm")[0] / "model"
    still = "schedule={kind: constant, peak: 1.0e-12}"
    given = recipe(tmp_path, texts, "tagging", still, steps=1, start=str(start))
    result = train(given, console=Listener().console)
    before, after = Folder.load(start).model.state_dict(), Folder.load(result.model).model.state_dict()
    for name, tensor in after.items():
        if not name.startswith("head."):
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-6)


def test_a_tokenizer_without_the_tokens_a_task_needs_is_refused(texts: Path, tmp_path: Path, trained: Any) -> None:
    start = trained("classification")[0] / "model"
    given = recipe(tmp_path, texts, "masked-lm", start=str(start))
    with pytest.raises(UserError, match=r"the tokenizer has no <mask>, which masked-lm needs"):
        train(given, console=Listener().console)


def test_a_test_set_of_a_language_model_is_scored_by_its_perplexity(texts: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path, texts, "causal-lm", f"data.test={texts / 'valid.txt'}", "steps=4")
    result = train(given, console=Listener().console)
    assert result.scores["test"] == pytest.approx(result.scores["valid"])
