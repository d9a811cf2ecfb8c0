"""A store holds exactly the encoded pairs, reports what it dropped, and never serves damaged data."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from allyouneed.data.batches import store as module
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.errors import UserError
from allyouneed.tasks.translation.translation import pair_encoding

PAIRS = [(f"the {n} dogs run" + " far" * (n % 5), f"die {n} Hunde rennen" + " weit" * (n % 7)) for n in range(300)]
OLD = 1_600_000_000  # a time of change long past, so that hashes of inputs may be remembered


def write(path: Path, pairs: list[tuple[str, str]] = PAIRS, time: int = OLD) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    os.utime(path, (time, time))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[PairFiles]:
    return [PairFiles(path=write(tmp_path / "a.tsv"))]


@pytest.fixture(params=[True, False], ids=["joint", "separate"])
def vocabularies(request: pytest.FixtureRequest, files: list[PairFiles]) -> Vocabularies:
    return Vocabularies.train(TokenizerConfig(vocab=320, joint=request.param), files)


@pytest.fixture
def joint(files: list[PairFiles]) -> Vocabularies:
    return Vocabularies.train(TokenizerConfig(vocab=320), files)


def test_every_sentence_is_there_as_encoded(
    tmp_path: Path, files: list[PairFiles], vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    told: list[int] = []
    store = Store.build(tmp_path / "store", files, Filters(), pair_encoding(vocabularies, 256), progress=told.append)
    assert len(store) == 300 and told[-1] == 300 and told == sorted(told)
    for n, (source, target) in enumerate(PAIRS):
        assert store["source"][n].tolist() == vocabularies.source.encode(source)
        assert store["target"][n].tolist() == vocabularies.target.encode(target)
    assert store["source"].lengths.tolist() == [len(store["source"][n]) for n in range(300)]
    assert store["target"].lengths.tolist() == [len(store["target"][n]) for n in range(300)]
    assert isinstance(store["source"].values, np.memmap) and np.shares_memory(
        store["source"][3], store["source"].values
    )
    some = np.array([5, 0, 299, 5])
    assert store["target"].gather(some).tolist() == [n for i in some for n in store["target"][int(i)].tolist()]
    with pytest.raises(IndexError):
        store["source"][300]


def test_long_sentences_are_left_out_and_reported_never_cut(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    lengths = [max(len(joint.source.encode(s)), len(joint.source.encode(t))) + 1 for s, t in PAIRS]
    limit = sorted(lengths)[150]
    store = Store.build(tmp_path / "store", files, Filters(), pair_encoding(joint, limit))
    fitting = [n for n, length in enumerate(lengths) if length <= limit]
    assert [store["source"][i].tolist() for i in range(len(store))] == [
        joint.source.encode(PAIRS[n][0]) for n in fitting
    ]
    first = next(n for n, length in enumerate(lengths) if length > limit)
    assert store.report.drops["too many tokens"].count == 300 - len(fitting)
    assert f"a.tsv:{first + 1}: {lengths[first]} tokens" in store.report.text()
    assert Store.open(tmp_path / "store").report.text() == store.report.text()


def test_several_files_with_languages_begin_with_their_token(tmp_path: Path) -> None:
    files = [
        PairFiles(path=write(tmp_path / "a.tsv"), to="de"),
        PairFiles(path=write(tmp_path / "b.tsv"), columns=(1, 0), to="en"),
        PairFiles(path=write(tmp_path / "c.tsv", [("plain", "rein")])),
    ]
    vocabularies = Vocabularies.train(TokenizerConfig(vocab=320), files)
    store = Store.build(tmp_path / "store", files, Filters(duplicates=True), pair_encoding(vocabularies, 256))
    tokenizer = vocabularies.source
    assert store["source"][0].tolist() == [tokenizer.language("de"), *tokenizer.encode(PAIRS[0][0])]
    assert store["source"][300].tolist() == [tokenizer.language("en"), *tokenizer.encode(PAIRS[0][1])]
    assert store["source"][600].tolist() == tokenizer.encode("plain")
    assert store["target"][300].tolist() == tokenizer.encode(PAIRS[0][0])
    with pytest.raises(UserError, match=r"'fr'.*de, en"):
        Store.build(
            tmp_path / "other",
            [PairFiles(path=tmp_path / "a.tsv", to="fr")],
            Filters(),
            pair_encoding(vocabularies, 256),
        )


def test_filters_and_broken_lines_are_in_the_same_report(tmp_path: Path, joint: Vocabularies) -> None:
    path = tmp_path / "b.tsv"
    path.write_text("a\tb\na\tb\nbroken\n\tx\n")
    store = Store.build(tmp_path / "s", [PairFiles(path=path)], Filters(duplicates=True), pair_encoding(joint, 256))
    assert len(store) == store.report.kept == 1 and store.report.read == 4
    assert {why: drops.count for why, drops in store.report.drops.items()} == {"broken": 1, "empty": 1, "duplicate": 1}


def test_nothing_usable_is_an_error_that_shows_why(tmp_path: Path, joint: Vocabularies) -> None:
    path = tmp_path / "b.tsv"
    path.write_text("a,b\n")
    with pytest.raises(UserError, match=r"none of the pairs in the data is usable(.|\n)*b\.tsv:1: 1 column"):
        Store.build(tmp_path / "store", [PairFiles(path=path)], Filters(), pair_encoding(joint, 256))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tsv", "b.tsv"], "a failed build leaves nothing behind"


def test_empty_sentences_can_be_kept_on_request(tmp_path: Path, joint: Vocabularies) -> None:
    path = tmp_path / "b.tsv"
    path.write_text("\tx\n\ty\n")
    store = Store.build(tmp_path / "store", [PairFiles(path=path)], Filters(empty=False), pair_encoding(joint, 256))
    assert store["source"].lengths.tolist() == [0, 0] and store["source"][1].tolist() == []


def test_a_big_vocabulary_gets_wide_ids(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Store.build(tmp_path / "narrow", files, Filters(), pair_encoding(joint, 256))
    monkeypatch.setattr(type(joint.source), "size", 65537)
    wide = Store.build(tmp_path / "wide", files, Filters(), pair_encoding(joint, 256))
    assert narrow["source"].values.dtype == np.uint16 and wide["source"].values.dtype == np.uint32
    assert all(narrow["source"][n].tolist() == wide["source"][n].tolist() for n in range(300))


def flip(path: Path, keep_time: bool = False) -> None:
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def raise_examples(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"examples": 999}))


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("source.values", flip),
    ("target.values", cut),
    ("target.offsets", flip),
    ("source.offsets", cut),
    ("source.values", Path.unlink),
    ("meta.json", cut),
    ("meta.json", raise_examples),
    ("meta.json", Path.unlink),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_store_is_refused_and_rebuilt_by_ensure(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies, name: str, damage: Callable[[Path], object]
) -> None:
    folder = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256)).folder
    damage(folder / name)
    with pytest.raises(UserError, match="build it"):
        Store.open(folder)
    again = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256))
    assert again["source"][7].tolist() == joint.source.encode(PAIRS[7][0])
    Store.open(folder, full=True)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_changes_that_keep_size_and_mtime_are_found(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    store = Store.build(tmp_path / "store", files, Filters(), pair_encoding(joint, 256))
    flip(store.folder / "target.values", keep_time=True)
    with pytest.raises(UserError, match=r"target\.values.*changed since"):
        Store.open(store.folder)


def test_ensure_reuses_the_store_without_reading_the_inputs_again(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256))
    inputs, digest = {path for entry in files for path in entry.files()}, module.sha256
    monkeypatch.setattr(module, "sha256", lambda path: pytest.fail(f"read {path}") if path in inputs else digest(path))
    monkeypatch.setattr(module, "_encode", lambda *_: pytest.fail("built again"))
    second = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256))
    assert second.folder == first.folder and second.fingerprint == first.fingerprint


def test_ensure_builds_anew_when_anything_that_matters_changes(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    def folder(**other: object) -> Path:
        given = {"files": files, "filters": Filters(), "encoding": pair_encoding(joint, 100)} | other
        return Store.open_or_build(tmp_path / "cache", **given).folder  # type: ignore[arg-type]

    folders = [
        folder(),
        folder(encoding=pair_encoding(joint, 101)),
        folder(filters=Filters(duplicates=True)),
        folder(files=[PairFiles(path=tmp_path / "a.tsv", columns=(1, 0))]),
        folder(encoding=pair_encoding(Vocabularies.train(TokenizerConfig(vocab=265), files), 100)),
    ]
    write(tmp_path / "a.tsv", PAIRS[::-1], time=OLD + 1)  # as large as before
    folders.append(folder())
    assert len(set(folders)) == len(folders)
    write(tmp_path / "a.tsv", PAIRS, time=OLD + 2)
    assert folder() == folders[0], "the content counts, not the time it was written"


def test_an_input_changed_without_a_new_mtime_is_noticed(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    path = tmp_path / "a.tsv"
    stamp = path.stat().st_mtime_ns  # long ago, so its hash is cached
    first = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256))
    path.write_text(path.read_text().replace("dogs", "cats"))
    os.utime(path, ns=(stamp, stamp))
    again = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256))
    assert again.fingerprint != first.fingerprint


def test_a_file_changed_a_moment_ago_is_hashed_again(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    path = tmp_path / "a.tsv"
    path.touch()
    stamp = path.stat().st_mtime_ns
    first = Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256))
    path.write_text(path.read_text().replace("dogs", "cats"))
    os.utime(path, ns=(stamp, stamp))  # within the grain of the clock: same size, same time
    assert (
        Store.open_or_build(tmp_path / "cache", files, Filters(), pair_encoding(joint, 256)).fingerprint
        != first.fingerprint
    )


def test_an_input_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    with pytest.raises(UserError, match=r"a\.tsv: changed while"):
        Store.build(
            tmp_path / "s", files, Filters(), pair_encoding(joint, 256), progress=lambda _: (tmp_path / "a.tsv").touch()
        )
    assert not (tmp_path / "s").exists()


def test_a_crash_while_building_leaves_no_store(tmp_path: Path, files: list[PairFiles], joint: Vocabularies) -> None:
    def crash(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store.build(tmp_path / "store", files, Filters(), pair_encoding(joint, 256), progress=crash)
    with pytest.raises(UserError, match="no token store here"):
        Store.open(tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv"]


def test_a_folder_of_something_else_is_never_replaced(
    tmp_path: Path, files: list[PairFiles], joint: Vocabularies
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists and is not a token store"):
        Store.build(tmp_path / "mine", files, Filters(), pair_encoding(joint, 256))
    assert (tmp_path / "mine" / "thesis.txt").exists()
    Store.build(tmp_path / "store", files, Filters(), pair_encoding(joint, 256))
    assert len(Store.build(tmp_path / "store", files, Filters(), pair_encoding(joint, 256))) == 300, (
        "a store may be replaced"
    )
