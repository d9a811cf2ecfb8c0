"""An index made by the command, looked up by a retriever, read by a model that retrieves."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.config import parse
from allyouneed.data.retrieval import corpus as chunks
from allyouneed.data.retrieval.corpus import ChunkIndex, build_index, split_chunks
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.retrieval.retriever import ChunkEncoder, Retriever
from allyouneed.nn.batch import Batch, Neighbours, Rows
from allyouneed.nn.models.base import Model

M = 8
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "red",
    "green",
    "blue",
    "tree",
    "house",
    "river",
    "stone",
    "cloud",
    "bird",
]
ATTENTION, CHANNEL = {"kind": "attention", "heads": 2}, {"kind": "ffn", "hidden": 32}


def paragraphs(count=40, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) for _ in range(count)]


def folder(tree, vocabularies, path, task):
    torch.manual_seed(1)
    base = {"vocab": vocabularies.target.size, "width": 16, "embed": {"positions": "sinusoidal"}}
    model = parse(Model, base | tree).build().eval()
    Folder(model, vocabularies, {"kind": task}, max_tokens=64).save(path)
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A corpus with one paragraph twice, encoders of both sorts, and a RETRO, all untrained."""
    place = tmp_path_factory.mktemp("retrieval")
    texts = paragraphs()
    (place / "corpus.txt").write_text("\n\n".join([*texts, texts[3]]) + "\n", encoding="utf-8")
    tokenizer = train(TokenizerConfig(vocab=300, specials=("<mask>",)), texts)
    both = Vocabularies(tokenizer, tokenizer)
    stack = {"kind": "encoder", "encoder": [{"mixer": ATTENTION, "channel": CHANNEL}]}
    folder(stack, both, place / "masked", "masked-lm")
    folder(stack | {"head": "pooled"}, both, place / "similar", "similarity")
    cross = {"kind": "chunked-cross", "heads": 2, "chunk": M}
    plain = {"mixer": ATTENTION | {"pattern": "causal"}, "channel": CHANNEL}
    retro = {"kind": "retro", "encoder": stack["encoder"], "decoder": [plain, plain | {"cross": cross}]}
    folder(retro, both, place / "retro", "causal-lm")
    return place


def command(*words):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


@pytest.fixture(scope="module", params=["masked", "similar"])
def made(work, request):
    place = work / f"index of {request.param}"
    assert command("index", work / "corpus.txt", "-e", work / request.param, "-o", place, "--chunk", M) == 0
    return place


def test_every_token_is_in_a_chunk_and_a_value_includes_the_next_chunk(work, made):
    index = ChunkIndex.load(made)
    tokenizer = index.tokenizer
    texts = (work / "corpus.txt").read_text(encoding="utf-8").strip().split("\n\n")
    assert [tokenizer.decode(index.document(n)) for n in range(len(index.bounds) - 1)] == texts
    place = 0
    for n, text in enumerate(texts):
        ids = tokenizer.encode(text)
        for begin in range(0, len(ids), M):
            assert index.value(place) == ids[begin : begin + 2 * M] and index.documents[place] == n
            place += 1
    assert place == len(index) == index.vectors.ntotal


def test_an_indexed_chunk_finds_itself_first(made):
    retriever = Retriever(made)
    index = retriever.index
    whole = [n for n in range(len(index)) if len(index.value(n)) == 2 * M][:20]
    found = retriever.search([index.value(n)[:M] for n in whole], 3)
    assert [chunk[0][:M] for chunk in found] == [index.value(n)[:M] for n in whole]
    assert all(len(chunk) == 3 for chunk in found) and retriever.search([]) == []


def test_no_chunk_finds_its_own_document_nor_a_copy_of_it(made, monkeypatch):
    """Neither among those fetched at first nor, where the document is longer than that, when asked again."""
    retriever = Retriever(made)
    index = retriever.index
    texts = [index.document(n) for n in range(len(index.bounds) - 1)]
    own = [[n for n in range(len(index)) if texts[index.documents[n]] == text] for text in texts]
    answers = []
    for more in (16, 0):
        monkeypatch.setattr(chunks, "MORE", more)
        found = retriever.neighbours(texts, 2)
        assert (found.lengths[3, : len(texts[3]) // M] > 0).all()
        for row, text in enumerate(texts):
            values = [index.value(n) for n in own[row]]
            for u in range(len(text) // M):
                for place in range(2):
                    one = found.tokens[row, u, place, : found.lengths[row, u, place]].tolist()
                    assert one and one not in values
        answers.append(found)
    assert torch.equal(answers[0].tokens, answers[1].tokens)


def test_neighbours_are_the_nearest_by_hand(made):
    retriever = Retriever(made)
    index = retriever.index
    text = index.tokenizer.encode("a text that stands in no corpus: seven birds, a river, three red stones, a cloud")
    keys = retriever.encoder(
        [index.value(n)[:M] if len(index.value(n)) > M else index.value(n) for n in range(len(index))]
    )
    found = retriever.neighbours([text], 3)
    assert found.tokens.shape == (1, len(text) // M, 3, 2 * M)
    for u, chunk in enumerate(split_chunks(text, M)):
        far = np.square(keys - retriever.encoder([chunk])).sum(1)
        for place, number in enumerate(np.argsort(far, kind="stable")[:3]):
            value = index.value(int(number))
            assert found.tokens[0, u, place, : len(value)].tolist() == value


def test_texts_of_another_tokenizer_are_compared_as_text(work, tmp_path):
    other = train(TokenizerConfig(vocab=270), paragraphs(seed=5))
    Vocabularies(other, other).save(tmp_path / "other")
    place = tmp_path / "index"
    options = ["--chunk", M, "--tokenizer", tmp_path / "other"]
    assert command("index", work / "corpus.txt", "-e", work / "masked", "-o", place, *options) == 0
    retriever = Retriever(place)
    assert retriever.index.tokenizer.hash == other.hash
    chunk = retriever.index.value(0)[:M]
    assert retriever.search([chunk], 1)[0][0][:M] == chunk


def test_a_large_index_is_searched_partially_with_exclusions(work, monkeypatch):
    monkeypatch.setattr(chunks, "EXACT", 10)
    monkeypatch.setattr(chunks, "MORE", 0)
    model = Folder.load(work / "masked")
    tokenizer = model.vocabularies.target
    texts = [tokenizer.encode(text) for text in paragraphs(200)]
    encoder = ChunkEncoder(model, tokenizer)
    index = build_index(texts, M, encoder, tokenizer, encoder.about)
    vectors = encoder(split_chunks(texts[0], M))
    for numbers in index.nearest(vectors, 2, [texts[0]] * len(vectors)):
        assert len(numbers) == 2 and 0 not in index.documents[numbers]


def test_a_model_retrieves_while_it_generates(work, made):
    """What is written with an index is what the whole text gets with its neighbours at once; without one it differs."""
    generator = ayn.load(work / "retro")
    prompts = ["seven red birds and a river", "one"]
    alone = generator.generate(prompts, method="greedy", max_length=30)
    found = generator.retrieve(made).generate_full(prompts, method="greedy", max_length=30)
    assert [full.text for full in found] != alone
    retriever, tokenizer = Retriever(made), generator.tokenizer
    for prompt, full in zip(prompts, found, strict=True):
        ids = [tokenizer.bos, *tokenizer.encode(prompt)]
        for _ in range(full.candidates[0].tokens):
            near = retriever.search(split_chunks(ids, M), 2)
            source = Neighbours.of([near], 2, 2 * M) if near else None
            with torch.no_grad():
                logits = generator.model.logits(Batch(Rows(torch.tensor([ids])), source))[0, -1]
            logits[generator.engine.runner.forbidden] = -torch.inf
            ids.append(int(logits.argmax()))
        said = tokenizer.decode(ids)
        assert said[len(prompt) :] == full.text


def test_mismatches_are_user_errors(work, made, tmp_path, capsys, monkeypatch):
    def told(*words):
        capsys.readouterr()
        assert command(*words) == 2
        return capsys.readouterr().err

    corpus, good = work / "corpus.txt", ["-e", work / "masked", "-o", tmp_path / "index"]
    assert "no such" in told("index", tmp_path / "none.txt", *good)
    assert "no such model folder" in told("index", corpus, "-e", tmp_path / "none", "-o", tmp_path / "index")
    assert "expected encoder or decoder" in told("index", corpus, "-e", work / "retro", "-o", tmp_path / "index")
    assert "already exists and is not an index" in told("index", corpus, "-e", work / "masked", "-o", work / "masked")
    assert "expected paragraph" in told("index", corpus, *good, "--document", "page")
    (tmp_path / "blank.txt").write_text("\n\n")
    assert "contains no text" in told("index", tmp_path / "blank.txt", *good)
    assert not (tmp_path / "index").exists()
    with pytest.raises(UserError, match="not an index"):
        Retriever(tmp_path)
    with pytest.raises(UserError, match="not the encoder"):
        Retriever(made, work / ("similar" if made.name.endswith("masked") else "masked"))
    with pytest.raises(UserError, match="does not retrieve"):
        decoder = {"kind": "decoder", "decoder": [{"mixer": ATTENTION | {"pattern": "causal"}}]}
        both = Folder.load(work / "masked").vocabularies
        ayn.load(folder(decoder, both, tmp_path / "gpt", "causal-lm")).retrieve(made)
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert "[retrieval]'" in told("index", corpus, *good)


def test_a_damaged_index_is_refused(work, made, tmp_path):
    copy = shutil.copytree(made, tmp_path / "copy")
    (copy / "begins.npy").write_bytes((copy / "begins.npy").read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"begins.npy missing or damaged"):
        ChunkIndex.load(copy)
    (copy / "meta.json").write_text(json.dumps({"format": 7}))
    with pytest.raises(UserError, match="format 7, expected 1"):
        ChunkIndex.load(copy)
    (copy / "meta.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as an index"):
        ChunkIndex.load(copy)
