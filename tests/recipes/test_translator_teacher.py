"""recipes/translator: the snapshot between two sessions of the teacher, a session, and test sets that stay out."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import Tensor

from allyouneed.folder import Folder
from allyouneed.metrics.likelihood import mean_loss
from allyouneed.nn.models.weights import named_tensors
from allyouneed.training import load_recipe, train
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter

RECIPE = Path(__file__).parents[2] / "recipes" / "translator"
SMALL = ["width=32", "encoder[0].repeat=1", "decoder[0].repeat=1", "dropout=0", "encoder[0].mixer.heads=2"]
SMALL += ["decoder[0].mixer.heads=2", "decoder[0].cross.heads=2", "encoder[0].channel.hidden=64"]
SMALL += ["decoder[0].channel.hidden=64"]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPE)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with pairs and teacher.yaml for a small model."""
    lines = [f"the number {n} of {m}\tdie Zahl {n} von {m}\n" for n in range(12) for m in range(12)]
    (tmp_path / "en-de.general.tsv.gz").write_bytes(gzip.compress("".join(lines[::2]).encode()))
    (tmp_path / "en-de.valid.tsv.gz").write_bytes(gzip.compress("".join(lines[1::8]).encode()))
    tree = yaml.safe_load((RECIPE / "teacher.yaml").read_text("utf-8"))
    entries = [{"path": "en-de.%s.tsv.gz", "from": "en", "to": "de"}]
    entries += [{"path": "en-de.%s.tsv.gz", "columns": [1, 0], "from": "de", "to": "en"}]
    for split, name in (("train", "general"), ("valid", "valid")):
        tree["data"][split] = [entry | {"path": entry["path"] % name} for entry in entries]
    tree |= {"set": SMALL, "tokenizer": {"kind": "bpe", "vocab": 300}, "batch": {"rows": 4, "row": 128}}
    tree["schedule"] |= {"warmup": 20, "peak": 0.01}
    tree["validate"] |= {"every": 1000}
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    return tmp_path


def encode_here(patch: pytest.MonkeyPatch) -> None:
    """From now on a session encodes in this process, which saves two more the imports of seconds."""
    import encode
    import session

    def run(command: list[str], check: bool) -> None:
        patch.setattr("sys.argv", command[1:])
        encode.main()

    patch.setattr(session, "subprocess", SimpleNamespace(run=run))
    patch.setattr(encode, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    patch.setenv("RAYON_NUM_THREADS", "1")  # it sets this for its processes


def weights_of(folder: Folder) -> dict[str, Tensor]:
    return {name: tensor.detach().float() for name, tensor in named_tensors(folder.model).items()}


def test_a_snapshot_restores_what_was_rounded_and_costs_little_loss(data: Path) -> None:
    import snapshot

    tree = yaml.safe_load((data / "teacher.yaml").read_text("utf-8"))
    (data / "plain.yaml").write_text(yaml.safe_dump(tree | {"output": "plain", "steps": 60, "task": "translation"}))
    recipe = load_recipe(data / "plain.yaml")
    folder = Folder.load(train(recipe).model)
    snapshot.save(folder, data / "first", sessions=[{"updates": 60}])
    restored, index = snapshot.restore(data / "first")
    assert index["sessions"] == [{"updates": 60}]
    before, after = weights_of(folder), weights_of(restored)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], snapshot.rounded(tensor)), name
        if tensor.ndim < 2:
            assert torch.equal(after[name], tensor)
        else:  # a uniform error of one step
            spread = tensor.flatten(1).std(1, correction=0)
            assert bool(((after[name] - tensor).flatten(1).abs().amax(1) <= spread / snapshot.STEPS / 2 + 1e-6).all())
    restored.save(data / "model")
    assert Folder.load(data / "model").tokenizers.hash == folder.tokenizers.hash
    assert restored.directions == folder.directions
    valid = prepare(recipe, RunFolder(recipe.output), Reporter()).valid
    assert valid is not None
    losses = [mean_loss(one.model, recipe.task, valid)["loss"] for one in (folder, restored)]
    assert losses[0] < 3 and abs(losses[1] - losses[0]) < 0.05


def test_the_weights_of_a_snapshot_take_less_than_five_bits(tmp_path: Path) -> None:
    import snapshot

    weights = {"matrix": torch.randn(2000, 512, generator=torch.Generator().manual_seed(0))}
    snapshot.write(tmp_path, snapshot.encode(weights), {"matrix": [2000, 512]}, {})
    size = sum(path.stat().st_size for path in tmp_path.glob("weights-*.zst"))
    assert 4 < 8 * size / weights["matrix"].numel() < 5
    assert torch.equal(snapshot.read(tmp_path)[0]["matrix"], snapshot.rounded(weights["matrix"]))


def test_large_weights_are_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import snapshot

    monkeypatch.setattr(snapshot, "PIECE", 1000)
    weights = {
        "matrix": torch.randn(60, 70),
        "bias": torch.randn(9),
        "scale": torch.tensor(2.5),
        "empty": torch.zeros(3, 4),
    }
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    snapshot.write(tmp_path, snapshot.encode(weights), shapes, {})
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("weights-*.zst"))]
    assert len(sizes) > 2 and max(sizes) == 1000
    found = snapshot.read(tmp_path)[0]
    for name, tensor in weights.items():
        assert torch.equal(found[name], snapshot.rounded(tensor)), name


def test_a_session_continues_from_the_snapshot_of_the_last(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import session

    monkeypatch.setattr(session.Session, "share", property(lambda self: self.state.step / 60))  # not by the clock

    def run(*options: str) -> dict[str, float]:
        arguments = ["session.py", str(data), "--workers", "1", *options]
        monkeypatch.setattr("sys.argv", arguments)
        session.main()
        index = json.loads((data / "teacher" / "snapshot" / "snapshot.json").read_text("utf-8"))
        rows.append(len(index["sessions"]))
        return index["sessions"][-1]

    rows: list[int] = []
    first = run()
    encode_here(monkeypatch)
    kept = (data / "teacher" / "snapshot").rename(data / "kept")
    second = run("--snapshot", str(kept), "--decay")
    assert rows == [1, 2]
    assert first["updates"] == second["updates"] == 60
    assert second["loss, last"] < first["loss, last"]


def test_a_session_writes_snapshots_on_the_way(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import session

    tree = yaml.safe_load((data / "teacher.yaml").read_text("utf-8"))
    tree["save"] |= {"minutes": 1e-6}
    tree["validate"] |= {"every": 2}
    (data / "teacher.yaml").write_text(yaml.safe_dump(tree), "utf-8")
    encode_here(monkeypatch)
    monkeypatch.setattr(session.Session, "share", property(lambda self: self.state.step / 6))
    monkeypatch.setattr("sys.argv", ["session.py", str(data), "--workers", "1"])
    session.main()
    assert capsys.readouterr().err.count("snapshot after update") == 6


def test_packed_files_come_back_in_any_order(tmp_path: Path) -> None:
    import pack

    texts = {f"{name}.tsv.gz": "".join(f"{name} {n}\tpair {n}\n" for n in range(1000)) for name in ("a", "b")}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    pack.pack(tmp_path, tmp_path / "out", 0, 1)
    for number in ("2", "1"):
        pack.unpack(tmp_path / "out" / number, tmp_path / "back", 1)
    for name, text in texts.items():
        assert gzip.decompress((tmp_path / "back" / name).read_bytes()).decode() == text


def test_a_sample_has_the_beginning_of_every_file_and_back_translations(tmp_path: Path) -> None:
    import pack

    (tmp_path / "out").mkdir()
    for name in ("en-de.words.tsv.gz", "en-de.general.tsv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"a\tb\n" * 9))
    pack.sample(tmp_path, tmp_path / "out", lines=3)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.gz")}
    assert found == {"en-de.words.tsv.gz", "en-de.general.tsv.gz", "en-de.back/0.tsv.gz"}
    assert gzip.decompress((tmp_path / "out/en-de.back/0.tsv.gz").read_bytes()) == b"a\tb\n" * 3


def test_no_training_pair_has_a_sentence_of_a_test_set_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prepare
    import zstandard

    tatoeba = {
        "zh": "一只猫睡在窗台上。\tA cat sleeps.\n",
        "de": "Rain falls.\tRegen fällt.\n",
        "fr": "Rain.\tPluie.\n",
    }
    for language, (folder, *_) in prepare.TATOEBA.items():
        path = tmp_path / "mt" / folder
        path.mkdir(parents=True)
        (path / "tatoeba.train.tsv.gz").write_bytes(gzip.compress(tatoeba[language].encode()))
    news = "The minister opened the new bridge on Monday.\tDie Ministerin eröffnete am Montag die neue Brücke.\n"
    (tmp_path / "mt" / "en-de" / "newstest2013.test.tsv.gz").write_bytes(gzip.compress(news.encode()))
    pud = "The lake lies between two old volcanoes.\tDer See liegt zwischen zwei alten Vulkanen.\n"
    pairs = [
        "the minister opened the NEW bridge on Monday\tEine andere Übersetzung dieses Satzes, die niemand kennt.",
        "Nobody knows where this line comes from, or why.\tDie Ministerin eröffnete am Montag die neue Brücke!",
        "He said: The lake lies between two old volcanoes.\tEr sagte etwas über den See und seine Berge dort.",
        "The ship left the harbour in the morning.\tDas Schiff verließ den Hafen am Morgen.",
    ]
    (tmp_path / "corpora" / "de").mkdir(parents=True)
    for name, text in (
        ("ud-pud", pud),
        ("african-storybook", "\n".join(pairs)),
        ("remixed-dungeon", "A key.\tEin Tor."),
    ):
        packed = zstandard.compress(text.encode())
        (tmp_path / "corpora" / "de" / f"{name}.tsv.zst").write_bytes(packed)
    (tmp_path / "corpora" / "de" / "dict-ding.tsv.zst").write_bytes(zstandard.compress(b"rain\tRegen\n"))
    (tmp_path / "corpora" / "de" / "remixed-dungeon.tsv.zst").write_bytes(
        zstandard.compress(b"A key.\tEin Schl\xc3\xbcssel.\n")
    )
    found = prepare.prepare_language("de", tmp_path / "corpora", tmp_path, tmp_path)
    assert found["sources"]["african-storybook"] == {"held out": 3, "kept": 1}  # type: ignore[index]
    kept = gzip.decompress((tmp_path / "en-de.general.tsv.gz").read_bytes()).decode()
    assert kept == pairs[-1] + "\n"
    assert gzip.decompress((tmp_path / "en-de.valid.tsv.gz").read_bytes()).decode() == pud
