"""Segment recurrence (`task: {kind: causal-lm, memory: true}`): Transformer-XL by a recipe."""

import math
import random

import pytest
import torch
import yaml

import allyouneed as ayn
from allyouneed.config import ConfigError
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.folder import Folder
from allyouneed.infer.evaluate import evaluate
from allyouneed.metrics.perplexity import recurrent
from allyouneed.training import load_recipe, loop, train
from allyouneed.training.reporting.log import read_log
from micro_run import Listener
from toy_texts import documents

MIXER = {"kind": "attention", "heads": 2, "pattern": "causal & block-window(16, 2)", "positions": "transformer-xl"}
LAYER = {"repeat": 2, "mixer": MIXER | {"cache": "hidden"}, "channel": {"kind": "ffn", "hidden": 32}}
RECIPE = {
    "task": {"kind": "causal-lm", "memory": True},
    "model": {"kind": "decoder", "width": 16, "dropout": 0.1, "decoder": [LAYER]},
    "data": {"train": "train.txt", "valid": {"path": "valid.txt", "document": "file"}},
    "tokenizer": {"vocab": 300},
    "batch": {"rows": 4, "row": 16},
    "schedule": {"kind": "constant", "peak": 0.01},
    "steps": 14,
    "save": {"every": 5, "keep": 3},
    "average": 2,
    "validate": {"every": 7, "sentences": 0},
    "device": "cpu",
    "precision": "fp32",
}


PERMUTED = {"pattern": "permuted & block-window(16, 2)", "positions": "xlnet"}
XLNET = {
    "task": {"kind": "permutation-lm", "one_in": 4, "memory": True},
    "model": {
        "kind": "encoder",
        "width": 16,
        "dropout": 0.1,
        "embed": {"asks": True},
        "encoder": [LAYER | {"mixer": LAYER["mixer"] | PERMUTED}],
    },
    "batch": {"rows": 4, "row": 20},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    place = tmp_path_factory.mktemp("long")
    for split, count in (("train", 12), ("valid", 6)):
        (place / f"{split}.txt").write_text(documents(count, random.Random(split)), encoding="utf-8")
    return place


def recipe(work, output, *changes, **keys):
    path = work / f"{output.name}.yaml"
    tree = RECIPE | {"output": str(output)} | keys
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return load_recipe(path, changes)


def losses(run):
    return [entry["loss"].hex() for entry in read_log(run / "log.jsonl") if "loss" in entry]


@pytest.fixture(scope="module")
def straight(work, tmp_path_factory):
    """A run that was never interrupted."""
    given = recipe(work, tmp_path_factory.mktemp("straight") / "run")
    train(given, console=Listener().console)
    return given.output


@pytest.mark.parametrize(
    "at, keys", [(3, {}), (7, {}), (14, {}), (7, {"accumulate": 2}), (8, XLNET)], ids=["3", "7", "14", "two", "xlnet"]
)
def test_an_interrupted_run_with_memory_resumes_bit_for_bit(at, keys, work, straight, tmp_path, monkeypatch):
    """The checkpoint contains the memory: the first batch after it has the loss of an uninterrupted run."""
    real = loop.run_update
    if not keys:
        whole = straight
    else:
        whole = tmp_path / "straight"
        train(recipe(work, whole, **keys), console=Listener().console)

    def dies(*given):
        if given[4] == at:
            raise RuntimeError("power cut")
        return real(*given)

    monkeypatch.setattr(loop, "run_update", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        train(recipe(work, tmp_path / "run", **keys), console=Listener().console)
    monkeypatch.setattr(loop, "run_update", real)
    listener = Listener()
    train(recipe(work, tmp_path / "run", **keys), console=listener.console)
    assert "resuming the run" in listener.text
    assert len(losses(whole)) == 14 and losses(tmp_path / "run") == losses(whole)
    weights = [folder / "model" / "model.safetensors" for folder in (whole, tmp_path / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_resuming_without_the_memory_gives_other_losses(work, straight, tmp_path, monkeypatch):
    """The test above can fail: memory matters to the losses."""
    monkeypatch.setattr("allyouneed.training.checkpoints.Checkpoint.restore_memory", lambda *_: None)
    real = loop.run_update

    def dies(*given):
        if given[4] == 8:
            raise RuntimeError("power cut")
        return real(*given)

    monkeypatch.setattr(loop, "run_update", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        train(recipe(work, tmp_path / "run"), console=Listener().console)
    monkeypatch.setattr(loop, "run_update", real)
    train(recipe(work, tmp_path / "run"), console=Listener().console)
    found, expected = losses(tmp_path / "run"), losses(straight)
    assert found[:7] == expected[:7] and found[7] != expected[7]  # there is a checkpoint of step 7, the best so far


def test_validation_carries_the_memory_through_the_whole_text(work, straight):
    """The same number as the recurrence over the text gives, and another than that of pieces."""
    model = ayn.load(straight / "model")
    judged, _ = evaluate(model, work / "valid.txt")  # read as the training data was: paragraphs, end to end
    tokenizer, texts = model.tokenizer, (work / "valid.txt").read_text(encoding="utf-8").strip().split("\n\n")
    tokens, labels = [], []
    for text in texts:
        ids = tokenizer.encode(text)
        tokens += [tokenizer.bos, *ids]
        labels += [*ids, tokenizer.eos]
    states, total = model.model.start(1), 0.0
    with torch.no_grad():
        hidden = model.model.advance(ayn.nn.batch.Rows(torch.tensor([tokens])), states)
        total = float(model.model.head.loss(hidden, torch.tensor([labels]), 0.0)[1])
    assert judged.figures["loss"] == pytest.approx(total / len(tokens), rel=1e-5)
    valid = [entry["valid"] for entry in read_log(straight / "log.jsonl") if "valid" in entry]
    assert len(valid) == 2
    # of one document, it is what evaluate.perplexity calls recurrent
    ids = tokenizer.encode((work / "valid.txt").read_text(encoding="utf-8").rstrip())
    found = recurrent(model.model, torch.tensor([tokenizer.bos, *ids, tokenizer.eos]), 16)
    folder = Folder.load(straight / "model")
    folder.files = {"document": "file"}
    whole, _ = evaluate(type(model)(folder), work / "valid.txt")
    assert whole.figures["loss"] == pytest.approx(found.mean, rel=1e-5)
    assert whole.figures["perplexity"] == pytest.approx(math.exp(found.mean), rel=1e-5)


def test_a_model_with_memory_generates(straight):
    assert ayn.load(straight / "model").generate("the cat", method="greedy", max_length=40)


def test_rows_continue_across_batches(work, tmp_path):
    from allyouneed.training.prepare import RunFolder, prepare
    from allyouneed.training.reporting.progress import Reporter

    given = recipe(work, tmp_path / "run")
    prepared = prepare(given, RunFolder(given.output), Reporter(Listener().console))
    assert isinstance(prepared.train, SegmentBatches) and isinstance(prepared.valid, SegmentBatches)
    assert prepared.valid.rows == 1 and prepared.train.rows == 4
    first, second = list(prepared.train.batches(0))[:2]
    assert (first.labels[:, -1] == second.rows.tokens[:, 0]).all()


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            ["model.decoder[0].mixer.pattern=causal"],
            r"decoder\[0\]\.mixer\.pattern: the state would grow without bound",
        ),
        (["model.embed.positions=sinusoidal"], r"embed\.positions: absolute positions do not work"),
        (["model.embed.positions=sinusoidal", "model.decoder[0].mixer.pattern=causal"], r"positions.*[\s\S]*pattern"),
    ],
)
def test_models_without_bounded_state_are_rejected(work, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        recipe(work, tmp_path / "run", *changes)
    gated = {"kind": "decoder-decoder", "width": 16, "first": [{"mixer": {"kind": "gated-retention", "heads": 2}}]}
    gated |= {"second": [{"cross": {"kind": "attention", "heads": 2, "pattern": "causal"}}]}
    with pytest.raises(ConfigError, match=r"decoder-decoder does not support task\.memory"):
        recipe(work, tmp_path / "run", model=gated)


def test_a_rewind_clears_non_finite_memory(work, tmp_path, monkeypatch):
    """Three bad batches in a row: back to the checkpoint, and on with an empty memory."""
    real, seen = loop.run_update, []

    def poisoned(*given):
        if 7 <= given[4] <= 9 and len(seen) < 3:
            seen.append(given[4])
            given[0].states.layers[0]["mixer"].keys.fill_(float("nan"))
        return real(*given)

    monkeypatch.setattr(loop, "run_update", poisoned)
    listener = Listener()
    given = recipe(work, tmp_path / "run", validate={"every": 14, "sentences": 0})
    assert train(given, console=listener.console).steps == 14
    assert "rewinding to the checkpoint of step 5" in listener.text and seen == [7, 8, 9]
    assert all(math.isfinite(entry["loss"]) for entry in read_log(tmp_path / "run" / "log.jsonl") if "loss" in entry)
