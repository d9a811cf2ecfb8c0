"""What `allyouneed bench` promises: the same work for all, in turn; figures that belong together; clear refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.cli.lab.bench import _ratios, _table
from allyouneed.config import override, parse, preset_tree
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.lab.benchmark import Peer, PeerProcess, Turns, Workload, hf, make_workload, ours
from allyouneed.nn.models.base import Model
from waiting import PATIENCE, until

SMALL = ["width=16", "decoder[0].repeat=1", "decoder[0].mixer.heads=2", "decoder[0].channel.hidden=32"]
READS = ["decoder[0].cross.heads=2", "encoder[0].repeat=1", "encoder[0].mixer.heads=2", "encoder[0].channel.hidden=32"]


def folder(tokenizer: Tokenizer, preset: str, changes: list[str], task: str) -> Folder:
    torch.manual_seed(0)
    tree = override(preset_tree(preset), [f"vocab={tokenizer.size}", *changes])
    model = parse(Model, tree).build().eval()  # type: ignore[type-abstract]
    return Folder(model, Vocabularies(tokenizer, tokenizer), {"kind": task})


@pytest.fixture(scope="module")
def places(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("bench")
    made = {
        "gpt2": folder(tokenizer, "gpt2", SMALL, "causal-lm"),
        "marian": folder(tokenizer, "marian", [*SMALL, *READS], "translation"),
        "bert": folder(
            tokenizer,
            "bert-base",
            ["width=16", *(f"encoder[0].{rest}" for rest in ("repeat=1", "mixer.heads=2", "channel.hidden=32"))],
            "masked-lm",
        ),
    }
    for name, one in made.items():
        one.save(where / name)
    return {name: where / name for name in made}


def work(path: Path, texts: list[str] | None = None, **more: Any) -> Workload:
    from allyouneed.interop.load import load

    return Workload(**vars(make_workload(load(path), (1, 3), 2, 6, texts)) | more)


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("gpt2", ["reading", "first", "greedy 1", "greedy 3"]),
        ("marian", ["reading", "first", "greedy 1", "greedy 3", "beam 1", "beam 3"]),
        ("bert", ["texts 1", "texts 3"]),
    ],
)
def test_every_job_does_the_stated_work(places: dict[str, Path], name: str, jobs: list[str]) -> None:
    load = work(places[name])
    found, facts = ours(Peer("ours", "as it is", str(places[name])), load)
    assert list(found) == jobs and facts["weights, MB"] > 0 and facts["load, s"] > 0
    for job, act in found.items():
        result = act()
        if job.startswith(("greedy", "beam")):
            said = sum(len(best[0].tokens) for best in result)
            assert said == load.work(job) == int(job[-1]) * 6, "as many tokens as were asked for, and no fewer"
    if load.generates:
        assert load.work("first") == 1 and load.work("reading") == len(load.long) and facts["ceiling"] > 0


def test_sounds_and_images_are_counted_as_such(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import tiny_whisper as whisperlet

    whisperlet.ours(whisperlet.theirs(2, True), tmp_path / "whisper")
    image = {"kind": "patches", "image": 8, "patch": 4, "positions": {"kind": "learned", "length": 5}}
    layer = {"mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 16}}
    head = {"kind": "classes", "labels": 3}
    tree = {"kind": "encoder", "width": 8, "embed": image, "encoder": [layer], "head": head}
    seen = Folder(ayn.build(tree), None, {"kind": "image-classification"}, labels=["a", "b", "c"])
    seen.save(tmp_path / "image")
    for name, unit in (("whisper", "windows"), ("image", "images")):
        load = work(tmp_path / name)
        found, _ = ours(Peer("ours", "as it is", str(tmp_path / name)), load)
        assert list(found) == [f"{unit} 1", f"{unit} 3"] and load.work(f"{unit} 3") == 3
        assert len(found[f"{unit} 3"]()) == 3
    with pytest.raises(UserError, match="takes no text; remove --data"):
        work(tmp_path / "image", ["a text"])


def test_transformers_does_the_same_work(places: dict[str, Path], tmp_path: Path) -> None:
    from allyouneed.interop.export import writer
    from allyouneed.interop.load import load as opened

    for name, before in (("gpt2", 6), ("marian", 1)):
        out = tmp_path / name
        out.mkdir()
        writer("hf")(opened(places[name]), out)
        load = work(places[name])
        found, facts = hf(Peer("hf", "float32", str(out)), load)
        assert list(found) == list(ours(Peer("ours", "as it is", str(places[name])), load)[0])
        assert found["greedy 3"]().shape == (3, before + 6) and found["first"]().shape == (1, before + 1)
        assert found["reading"]() == found["reading"]() and facts["weights, MB"] > 0


def test_texts_are_read_instead_of_random_tokens(places: dict[str, Path], tokenizer: Tokenizer) -> None:
    load = work(places["marian"], ["the quick fox", "", "你好"])
    assert load.given == [tokenizer.encode(text) for text in ("the quick fox", "你好", "the quick fox")]
    assert work(places["gpt2"]).given == work(places["gpt2"]).given != work(places["gpt2"], ["a"]).given
    with pytest.raises(UserError, match="no text to measure with"):
        work(places["marian"], [""])


@pytest.mark.slow
def test_contenders_run_side_by_side_in_separate_processes(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rows", "1,2", "--length", 4, "--turns", 1, "--threads", 1, "--json"]
    assert run("bench", places["gpt2"], *options, "--compare", "int8", "--against", "ctranslate2") == 0
    found = json.loads(capsys.readouterr().out)
    measured, ratios = found["measured"], found["ratios"]
    names = ["as it is", "int8", "CTranslate2 int8"]
    for count in (1, 2):
        speeds = measured[f"greedy, {count} at a time, tokens/s"]
        assert list(speeds) == names and min(speeds.values()) > 0
        assert ratios["int8 / as it is"][f"greedy, {count} at a time, tokens/s"] == pytest.approx(
            speeds["int8"] / speeds["as it is"]
        )
        assert ratios["int8 / CTranslate2 int8"][f"greedy, {count} at a time, tokens/s"] == pytest.approx(
            speeds["int8"] / speeds["CTranslate2 int8"]
        )
    assert measured["weights, MB"]["int8"] < measured["weights, MB"]["as it is"]
    assert found["load"] == {"device": "cpu", "threads": 1, "length": 4, "rows": [1, 2]}


def test_the_table_has_figures_and_ratios() -> None:
    class Still:
        def __init__(self, peer: Peer, jobs: list[str]) -> None:
            self.peer, self.jobs = peer, jobs
            self.figures = {"load, s": 1.0, "ceiling": 100.0} if peer.kind == "ours" else {"load, s": 2.0}

    load, peers = Workload(rows=(1,), length=10), [Peer("ours", "as it is", ""), Peer("hf", "float32", "")]
    turns = Turns([Still(peers[0], ["first", "greedy 1"]), Still(peers[1], ["greedy 1"])])  # type: ignore[list-item]
    turns.best = {("as it is", "first"): 0.05, ("as it is", "greedy 1"): 0.2}
    turns.best["transformers float32", "greedy 1"] = 0.5
    shown = _table(turns, load, peers).splitlines()
    cells = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1:] for line in shown[3:]}
    assert cells == {
        "load, s": ["1.0", "2.0"],
        "first token, ms": ["50.0"],
        "greedy, 1 at a time, tokens/s": ["50.0", "20.0", "2.50x"],
        "ceiling, 1 at a time: weights are read": ["100.0"],
        "share of that ceiling, %": ["50.0"],
    }
    assert _ratios(turns, load) == {"as it is / transformers float32": {"greedy, 1 at a time, tokens/s": 2.5}}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--rows", "1,x"], "--rows 1,x: expected numbers from 1"),
        (["--rows", "0"], "--rows 0: expected numbers from 1"),
        (["--compare", "int3"], "--compare int3: expected int8 or bf16"),
        (["--against", "torch"], "--against torch: expected hf or ctranslate2"),
        (["--data", "nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_what_cannot_be_measured_is_reported(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert run("bench", places["gpt2"], *args) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err and not shown.out


def test_errors_of_a_process_are_reported(places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"as it is: cannot be measured: .*no such model folder"):
        PeerProcess(Peer("ours", "as it is", str(tmp_path / "none")), work(places["gpt2"]))
    with pytest.raises(UserError, match="--against is for models that generate text"):
        from allyouneed.cli.lab.bench import bench

        bench(places["bert"], rows="1", beam=1, length=4, against=["hf"], turns=1, threads=1)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_behind(places: dict[str, Path]) -> None:
    options = ["--rows", "1", "--turns", "100000", "--threads", "1"]
    args = [sys.executable, "-m", "allyouneed", "bench", str(places["gpt2"]), *options]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    own = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: own.read_text() or process.poll() is not None)
    children = own.read_text().split()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and children
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]
