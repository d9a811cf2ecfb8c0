"""Shortlists of Marian: what a translation may have follows from the file, in Marian's folder and in ours."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

import allyouneed as ayn
import translation_files as files
from allyouneed.apps.serve.engine.text_models import text_model
from allyouneed.apps.serve.sampling import SamplingFields
from allyouneed.cli import main
from allyouneed.data.shortlist import Shortlist
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.interop.load import load
from allyouneed.interop.single_file import marian_shortlist

SETTINGS = files.ORDINARY | {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
MODEL, LIST = "model.deen.intgemm.alphas.bin", "lex.50.50.deen.s2t.bin"
FIRST = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student's folder whose config names a shortlist."""
    pieces = files.train_pieces()
    size = sentencepiece.SentencePieceProcessor(model_proto=pieces).get_piece_size()
    arrays = files.marian_arrays(size, SETTINGS, seed=6)
    inputs = dict.fromkeys(arrays, 25.0)
    folder = tmp_path_factory.mktemp("student")
    files.write_marian(folder, files.quantize_as_intgemm(arrays, inputs), SETTINGS, "bin").rename(folder / MODEL)
    (folder / "vocab.deen.spm").write_bytes(pieces)
    dice = Random(4)
    lists = [sorted(dice.sample(range(size), dice.randrange(3))) for _ in range(size)]
    files.write_shortlist(folder / LIST, lists, FIRST)
    (folder / "lists.json").write_text(json.dumps(lists))
    lines = ["vocabs: [vocab.deen.spm, vocab.deen.spm]", f"shortlist: [{LIST}, false]", "beam-size: 1"]
    (folder / "config.intgemm8bitalpha.yml").write_text("\n".join(lines))
    return folder


@pytest.fixture
def student(made: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "student"
    folder.mkdir()
    for file in made.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def expected_tokens(folder: Path, source: list[int], shared: bool = True) -> list[int]:
    """The definition, in sets."""
    lists = json.loads((folder / "lists.json").read_text())
    found = set(range(FIRST)).union(*(lists[token] for token in source), source if shared else [])
    for token in range(FIRST, len(lists)):
        if len(found) % 8:
            found.add(token)
    return sorted(found)


def test_the_tokens_of_a_source_are_marians(student: Path) -> None:
    folder = load(student)
    assert folder.shortlist is not None
    for text in files.TEXTS[:5]:
        source = [*folder.tokenizers.source.encode(text), folder.tokenizers.source.eos]
        found = folder.shortlist.allowed(source).tolist()
        assert found == expected_tokens(student, source) and len(found) % 8 == 0
        assert len(found) < folder.shortlist.size
    sizes, file = (folder.shortlist.size,) * 2, student / LIST
    apart = marian_shortlist.read(file, sizes, shared=False)
    assert apart.allowed([7, 9]).tolist() == expected_tokens(student, [7, 9], shared=False)


def test_vocabularies_of_their_own_copy_no_source_tokens(student: Path) -> None:
    (student / "srcvocab.deen.spm").write_bytes((student / "vocab.deen.spm").read_bytes())
    (student / "vocab.deen.spm").rename(student / "trgvocab.deen.spm")
    (student / "config.intgemm8bitalpha.yml").unlink()  # Firefox has none: the file beside the model is its shortlist
    folder = load(student)
    assert folder.shortlist is not None
    assert folder.shortlist.allowed([7, 9, 11]).tolist() == expected_tokens(student, [7, 9, 11], shared=False)


def test_students_translate_with_their_shortlist_also_after_import(student: Path, tmp_path: Path) -> None:
    model, texts = ayn.load(student), files.TEXTS[:5]
    assert model.folder.shortlist is not None
    found = model.translate(texts, max_length=12)
    free = model.translate(texts, max_length=12, shortlist=False)
    assert found != free
    tokens = model.folder.tokenizers.source
    for text in texts:
        source = [*tokens.encode(text), tokens.eos]
        ((answer,),) = model.engine.generate([source], Decoding(method="greedy", max_length=12))
        assert set(answer.tokens) <= set(model.folder.shortlist.allowed(source).tolist())
    beams = model.translate(texts, beam=3, max_length=12)
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(student), str(tmp_path / "ours")])
    assert not stopped.value.code
    ours = ayn.load(tmp_path / "ours")
    assert ours.translate(texts, max_length=12) == found
    assert ours.translate(texts, max_length=12, shortlist=False) == free
    assert ours.translate(texts, beam=3, max_length=12) == beams
    (student / LIST).unlink()
    without = ayn.load(student)
    assert without.translate(texts, max_length=12) == free
    assert any("every token may be chosen" in note for note in without.folder.notes)
    config = tmp_path / "ours" / "config.json"
    about = json.loads(config.read_text())
    about["decoding"]["shortlist"] = False
    config.write_text(json.dumps(about))
    assert ayn.load(tmp_path / "ours").translate(texts, max_length=12) == free


def test_a_server_batches_continuously_with_it(student: Path) -> None:
    """The requests of a server, which join one after the other."""
    model, texts = ayn.load(student), files.TEXTS[:5]
    served, fields = text_model(model), SamplingFields()
    assert served is not None
    scheduler, states = model.engine.scheduler(), []
    for text in texts:
        request = served.encode(text, fields, 12)
        states.append(scheduler.submit(request._replace(sample_key=(0,)), served.spec(request, fields)))
        scheduler.step()
        scheduler.step()
    scheduler.run()
    found = [served.clean(model.folder.tokenizers.target.decode(state.hypotheses[0].tokens)) for state in states]
    assert found == model.translate(texts, max_length=12, protect=False)
    assert found != model.translate(texts, max_length=12, protect=False, shortlist=False)


def damage(raw: bytes, at: int, value: int) -> bytes:
    changed = bytearray(raw)
    changed[at : at + 8] = value.to_bytes(8, "little")
    checksum = marian_shortlist.hash_of(bytes(changed[16:]))
    changed[8:16] = checksum.to_bytes(8, "little")
    return bytes(changed)


def test_damaged_and_hostile_files_are_one_message(student: Path) -> None:
    file = student / LIST
    raw = file.read_bytes()
    ids = 48 + 8 * int.from_bytes(raw[32:40], "little")
    cases = {
        b"": "not a binary shortlist",
        raw[:47]: "not a binary shortlist",
        b"x" + raw[1:]: "not a binary shortlist",
        raw[:-4]: "copy it again",
        raw + bytes(8): "copy it again",
        raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]: "checksum",
        damage(raw, 16, 0): "no token is always allowed",
        damage(raw, 32, 1 << 62): "copy it again",
        damage(raw, 40, (1 << 64) - 1): "copy it again",
        damage(raw, 48, 1): "do not follow",
        damage(raw, 56, 1 << 63): "do not follow",
        damage(raw, 56, (1 << 63) - 1): "do not follow",
        damage(raw, ids - 8, 0): "do not follow",
        damage(raw, ids, 1 << 31): "lists tokens outside",
    }
    for content, told in cases.items():
        file.write_bytes(content)
        with pytest.raises(UserError, match=told) as refused:
            load(student)
        assert str(file) in str(refused.value)
    file.write_bytes(damage(damage(raw, 56, (1 << 63) - 1), 64, 1 << 63))  # differences of such offsets overflow
    with pytest.raises(UserError, match="do not follow"):
        load(student)
    files.write_shortlist(file, [[1]] * 500, FIRST)
    with pytest.raises(UserError, match="lists for 500 source tokens"):
        load(student)


def test_a_large_first_number_allows_everything(student: Path) -> None:
    files.write_shortlist(student / LIST, [[]] * 3 + [[1]], 1 << 40)
    folder = load(student)
    assert folder.shortlist is not None
    assert len(folder.shortlist.allowed([1, 30])) == folder.shortlist.size


def test_hostile_shortlists_of_our_folders(student: Path, tmp_path: Path) -> None:
    folder = load(student)
    assert folder.shortlist is not None
    file, vocabs = tmp_path / "shortlist.safetensors", folder.model.config.vocabs
    folder.shortlist.save(file)
    right = load_file(file)
    source = list(range(3, 9))
    assert torch.equal(Shortlist.load(file, vocabs).allowed(source), folder.shortlist.allowed(source))
    parts = {
        "ids": [right["ids"] + 1000, -right["ids"], right["ids"].float(), right["ids"][:-1], right["ids"][None]],
        "offsets": [right["offsets"].flip(0), right["offsets"][:0], torch.arange(5000), right["offsets"] + 1],
        "always": [right["always"][:0], right["always"] + 1000, right["always"] - 2],
    }
    for name, wrong in parts.items():
        for part in wrong:
            save_file(right | {name: part.contiguous()}, file)
            with pytest.raises(UserError, match=r"shortlist\.safetensors: "):
                Shortlist.load(file, vocabs)
    save_file({"always": right["always"]}, file)
    with pytest.raises(UserError, match="not a shortlist"):
        Shortlist.load(file, vocabs)
    save_file(right, file)
    with pytest.raises(UserError, match="no vocabulary"):
        Shortlist.load(file, None)
