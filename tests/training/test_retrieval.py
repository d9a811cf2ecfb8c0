"""A recipe with an index: neighbours are looked up once, never contain what follows a chunk, and are used in training,
in validation and in generation."""

import random
import shutil

import numpy as np
import pytest
import torch
import yaml

import allyouneed as ayn
from allyouneed.config import ConfigError, parse
from allyouneed.data.retrieval.corpus import ChunkIndex
from allyouneed.data.retrieval.neighbours import PassageSet
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.data.tokenizers.base import train as learn
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.evaluate import evaluate
from allyouneed.infer.retrieval.neighbour_cache import look_up
from allyouneed.infer.retrieval.retriever import Retriever, index_corpus
from allyouneed.nn.models.base import Model
from allyouneed.training import load_recipe, loop, train
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.log import read_log
from allyouneed.training.reporting.progress import Reporter
from micro_run import Listener
from toy_texts import documents

M, K = 8, 2
ATTENTION, CHANNEL = {"kind": "attention", "heads": 2}, {"kind": "ffn", "hidden": 32}
READS = {"wiring": "pre-norm", "mixer": ATTENTION, "channel": CHANNEL}
PLAIN = READS | {"mixer": ATTENTION | {"pattern": "causal"}}
RETRO = {
    "kind": "retro",
    "width": 16,
    "neighbours": K,
    "embed": {"positions": "sinusoidal"},
    "encoder": [READS | {"cross": ATTENTION}],
    "decoder": [PLAIN, PLAIN | {"cross": {"kind": "chunked-cross", "heads": 2, "chunk": M}}],
}
RECIPE = {
    "task": "causal-lm",
    "model": RETRO,
    "data": {"train": "train.txt", "valid": "valid.txt"},
    "retrieval": "train.index",
    "batch": {"rows": 4, "row": 48},
    "schedule": {"kind": "constant", "peak": 0.01},
    "steps": 8,
    "save": {"every": 3},
    "average": 0,
    "validate": {"every": 8, "sentences": 1},
    "decoding": {"extra": 12},
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Texts, an untrained reader, and an index of the training text."""
    place = tmp_path_factory.mktemp("retrieval")
    for split, count in (("train", 40), ("valid", 8)):
        (place / f"{split}.txt").write_text(documents(count, random.Random(split)), encoding="utf-8")
    tokenizer = learn(TokenizerConfig(vocab=300), [(place / "train.txt").read_text(encoding="utf-8")])
    config = {"kind": "encoder", "vocab": tokenizer.size, "width": 16, "encoder": [READS]}
    torch.manual_seed(1)
    reader = Folder(parse(Model, config).build().eval(), Vocabularies(tokenizer, tokenizer), {"kind": "masked-lm"})
    reader.save(place / "reader")
    index_corpus([place / "train.txt"], reader, M)[0].save(place / "train.index")
    return place


def recipe(work, output, *changes, **keys):
    path = work / f"{output.name}.yaml"
    tree = {key: value for key, value in (RECIPE | {"output": str(output)} | keys).items() if value is not None}
    path.write_text(yaml.safe_dump(tree))
    return load_recipe(path, changes)


def losses(run):
    return [entry["loss"].hex() for entry in read_log(run / "log.jsonl") if "loss" in entry]


@pytest.fixture(scope="module")
def made(work, tmp_path_factory):
    """A complete run and its output."""
    listener = Listener()
    result = train(recipe(work, tmp_path_factory.mktemp("made") / "run"), console=listener.console)
    return result.model.parent, listener.text


def test_training_and_evaluation_with_and_without_neighbours(made):
    folder, said = made
    (valid,) = [entry["valid"] for entry in read_log(folder / "log.jsonl") if "valid" in entry]
    assert set(valid) == {name + more for name in ("loss", "perplexity") for more in ("", " without neighbours")}
    assert valid["loss"] != valid["loss without neighbours"]
    assert "perplexity without neighbours" in said and "perplexity without neighbours" in (
        folder / "model" / "README.md"
    ).read_text(encoding="utf-8")


def test_an_interrupted_retrieval_run_resumes_bit_for_bit(made, work, tmp_path, monkeypatch):
    real = loop.run_update

    def dies(*given, **more):
        if given[4] == 6:
            raise RuntimeError("power cut")
        return real(*given, **more)

    monkeypatch.setattr(loop, "run_update", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        train(recipe(work, tmp_path / "run"), console=Listener().console)
    monkeypatch.setattr(loop, "run_update", real)
    # what was looked up is not looked up again
    monkeypatch.setattr("allyouneed.infer.retrieval.neighbour_cache.look_up", None)
    listener = Listener()
    result = train(recipe(work, tmp_path / "run"), console=listener.console)
    assert "after step 3" in listener.text and losses(tmp_path / "run") == losses(made[0])
    weights = [folder / "model.safetensors" for folder in (result.model, made[0] / "model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("cut", ["paragraph", "file", "line"])
def test_no_chunk_retrieves_its_own_document(work, tmp_path, cut):
    """Also where the documents of the index are not those of the training data."""
    (tmp_path / "lines.txt").write_text((work / "train.txt").read_text(encoding="utf-8").replace(". ", ".\n"), "utf-8")
    corpus = tmp_path / "lines.txt" if cut == "line" else work / "train.txt"
    index_corpus([corpus], Folder.load(work / "reader"), M, document=cut)[0].save(tmp_path / "index")
    given = recipe(work, tmp_path / "run", retrieval=str(tmp_path / "index"))
    items = prepare(given, RunFolder(given.output), Reporter(Listener().console)).train.items
    index, some = items.index, 0
    for number in range(len(items)):
        text = items.items.store["text"][int(items.items.pieces.documents[number])].tolist()
        own = {tuple(text[n : n + M]) for n in range(len(text) - M + 1)}
        tokens, lengths = (x[0].tolist() for x in vars(items.neighbours(np.array([number]))).values())
        for chunk, sizes in zip(tokens, lengths, strict=True):
            for one, size in zip(chunk, sizes, strict=True):
                some += size > 0
                assert not any(tuple(one[n : n + M]) in own for n in range(size - M + 1))
    assert some > 20 and len(index) > 20


def test_batches_hold_the_neighbours_of_their_texts(work, tmp_path):
    given = recipe(work, tmp_path / "run")
    prepared = prepare(given, RunFolder(given.output), Reporter(Listener().console))
    inner, retriever, seen = prepared.train.items.items, prepared.retriever, 0
    numbers = look_up(inner, retriever, K)
    begins = np.cumsum(prepared.train.items.counts) - prepared.train.items.counts
    for step, batch in enumerate(prepared.train.batches(0)):
        assert batch.rows.segments is None and batch.rows.tokens.numel() <= 4 * 48
        for row, number in enumerate(prepared.spare.describe(0, step)):
            said = inner.piece(number)[0]
            assert batch.rows.tokens[row, : len(said)].tolist() == said.tolist()
            for u in range(len(said) // M):
                near = [retriever.index.value(n) for n in numbers[begins[number] + u] if n >= 0]
                sizes = batch.source.lengths[row, u].tolist()
                assert [len(one) for one in near] == [size for size in sizes if size]
                for place, one in enumerate(near):
                    assert batch.source.tokens[row, u, place, : len(one)].tolist() == one
                    seen += 1
            assert not batch.source.lengths[row, len(said) // M :].any()
    assert seen > 50


def test_the_folder_knows_its_index(made, work, tmp_path):
    model = ayn.load(made[0] / "model")
    prompt, options = "the cat sees the moon. a dog", {"method": "greedy", "max_length": 12}
    found = model.generate(prompt, **options)
    assert model.retriever is not None and model.retriever.path == work / "train.index"
    assert ayn.load(made[0] / "model").retrieve(work / "train.index").generate(prompt, **options) == found
    judged, _ = evaluate(ayn.load(made[0] / "model"), work / "valid.txt")
    (valid,) = [entry["valid"] for entry in read_log(made[0] / "log.jsonl") if "valid" in entry]
    assert judged.figures == pytest.approx(valid, rel=1e-5)


def test_a_missing_index_is_reported(made, work, tmp_path, monkeypatch):
    moved = shutil.copytree(made[0] / "model", tmp_path / "model")
    text = (moved / "config.json").read_text(encoding="utf-8")
    (moved / "config.json").write_text(text.replace("train.index", "gone.index"), "utf-8")
    model = ayn.load(moved)
    for _ in range(2):
        with pytest.raises(UserError, match=r"gone\.index: the index this model was trained with is missing"):
            model.generate("the cat")
    with pytest.raises(UserError, match=r"gone\.index"):
        model.stream("the cat")
    assert model.retrieve(None).generate("the cat", method="greedy", max_length=3)
    assert model.retrieve(work / "train.index").generate("the cat", method="greedy", max_length=3)


def test_mistakes_are_reported_before_training(work, made, tmp_path):
    with pytest.raises(UserError, match=r"none: not an index \(no meta\.json\); build one with"):
        train(recipe(work, tmp_path / "run", retrieval=str(tmp_path / "none")))
    cross = "model.decoder[1].cross.chunk=4"
    with pytest.raises(UserError, match="has chunks of 8 tokens, the model needs 4; rebuild it with --chunk 4"):
        train(recipe(work, tmp_path / "run", cross))
    with pytest.raises(ConfigError, match="'retrieval' uses the tokenizer of its index; remove 'tokenizer'"):
        recipe(work, tmp_path / "run", tokenizer={"vocab": 300})
    with pytest.raises(ConfigError, match="retro needs retrieval"):
        recipe(work, tmp_path / "run", retrieval=None)
    with pytest.raises(ConfigError, match="decoder does not use retrieval; retro does"):
        recipe(work, tmp_path / "run", model={"kind": "decoder", "width": 16, "decoder": [PLAIN]})
    other = learn(TokenizerConfig(vocab=280), ["the cat sees the moon"] * 3)
    model = Folder.load(made[0] / "model").model
    Folder(model, Vocabularies(other, other), {"kind": "causal-lm"}).save(tmp_path / "other")
    with pytest.raises(UserError, match="was built with another tokenizer; rebuild it with --tokenizer"):
        train(recipe(work, tmp_path / "run", model=None, start=str(tmp_path / "other")))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_another_index_under_the_same_run_is_noticed(work, made, tmp_path):
    train(recipe(work, tmp_path / "run", steps=3), console=Listener().console)
    index = ChunkIndex.load(work / "train.index")
    assert train(recipe(work, tmp_path / "run", steps=3)).already
    reader = Folder.load(work / "reader")
    index_corpus([work / "valid.txt"], reader, M)[0].save(tmp_path / "other.index")
    assert len(index) != len(ChunkIndex.load(tmp_path / "other.index"))
    with pytest.raises(UserError, match=r"the contents of index meta\.json"):
        train(recipe(work, tmp_path / "run", steps=3, retrieval=str(tmp_path / "other.index")))


def test_fine_tuning_a_retrieval_model(work, made, tmp_path):
    given = recipe(work, tmp_path / "run", model=None, start=str(made[0] / "model"), steps=2)
    assert train(given, console=Listener().console).steps == 2
    assert Retriever(work / "train.index").index.tokenizer.hash == ayn.load(tmp_path / "run" / "model").tokenizer.hash


def test_passages_are_those_of_the_definition():
    dice = np.random.default_rng(0)
    for size in (1, 3, 8):
        text, others = dice.integers(0, 3, 40), dice.integers(0, 3, (60, 9))
        runs = {tuple(text[n : n + size]) for n in range(len(text) - size + 1)}
        for other in [*others, *(text[n : n + 9] for n in range(20))]:
            expected = any(tuple(other[n : n + size]) in runs for n in range(len(other) - size + 1))
            assert PassageSet(text, size).shares_passage(other) == expected
    assert not PassageSet(np.array([1, 2]), 3).shares_passage(np.array([1, 2, 3, 4]))
