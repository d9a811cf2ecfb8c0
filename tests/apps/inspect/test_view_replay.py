"""The view "replay": checkpoints of a run by name, beside its loss curve."""

import json
import shutil
from pathlib import Path

import pytest

import allyouneed
from allyouneed.apps.inspect.views import build_document
from allyouneed.apps.inspect.views.replay import POINTS, Runs, read_curve
from allyouneed.cli import main
from allyouneed.errors import UserError
from allyouneed.training.checkpoints import Checkpoint
from served import served_client, write_folder
from waiting import PATIENCE

RUN, DATES = (Path(__file__).parents[2] / "fixtures" / "v0_1" / name for name in ("run", "dates_model"))
TEXT = "3 May 2010"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(RUN, tmp_path / "runs" / "dates")
    shutil.copytree(
        RUN / "checkpoints" / "step-00000006", tmp_path / "runs" / "dates" / "checkpoints" / "step-00000009"
    )
    (tmp_path / "runs" / "not a run").mkdir()
    return tmp_path / "runs"


def replay(folder, **request):
    return json.loads(json.dumps(build_document("replay", Runs(folder), **request), allow_nan=False))["data"]


def test_a_run_is_shown_by_its_checkpoints_and_its_log(folder):
    assert replay(folder) == {"runs": [{"name": "dates", "checkpoints": 2}]}
    data = replay(folder, run="dates", text=TEXT)
    log = [json.loads(line) for line in (folder / "dates" / "log.jsonl").read_text().splitlines()]
    losses = {one["step"]: one["loss"] for one in log if "loss" in one}
    assert dict(zip(data["curve"]["steps"], data["curve"]["loss"], strict=True)) == losses
    assert [one["scores"] for one in data["curve"]["valid"]] == [one["valid"] for one in log if "valid" in one]
    assert [one["step"] for one in data["checkpoints"]] == [6, 9] and data["task"] == "translation"
    alone = allyouneed.load(Checkpoint(folder / "dates" / "checkpoints" / "step-00000006", 6).path).translate(TEXT)
    assert [one["answer"] for one in data["answers"]] == [alone, alone]
    inner = replay(folder, run="dates", step=6, text=TEXT)["document"]
    assert inner["view"] == "use" and inner["data"]["answer"] == alone
    assert replay(folder / "dates")["runs"][0]["name"] == "dates"  # the folder of one run


def test_names_are_looked_up_and_never_opened(folder):
    (folder.parent / "secret" / "checkpoints").mkdir(parents=True)
    for name in ("../secret", str(folder / "dates"), "dates/", ".", "", "dates\0"):
        with pytest.raises(UserError, match="unknown run"):
            replay(folder, run=name)
    for request, message in (
        ({"run": "dates", "step": 7}, "no checkpoint of step 7"),
        ({"run": "dates", "step": 6, "view": "replay"}, "not of one model"),
        ({"run": "dates", "step": 6, "view": "nothing"}, "unknown view"),
        ({"run": "dates", "step": 6, "request": {"txt": 1}}, "txt"),
    ):
        with pytest.raises(UserError, match=message):
            replay(folder, **request)
    with pytest.raises(UserError, match="--runs FOLDER"):
        build_document("replay", None)


def test_damaged_and_long_logs(folder):
    log = folder / "dates" / "log.jsonl"
    log.write_text("".join(f'{{"step": {n}, "loss": {n}.0}}\n' for n in range(1, 2 * POINTS + 2)) + '{"step": 9')
    curve = read_curve(log)
    assert curve["mean_of"] == 3 and curve["loss"][0] == 2.0 and len(curve["steps"]) <= POINTS
    log.write_text('{"step": 1, "loss": NaN}\n[1]\nnull\n{"step": 2, "loss": null}\n')
    assert read_curve(log)["steps"] == []
    (folder / "dates" / "checkpoints" / "step-00000009" / "model.safetensors").write_bytes(b"no")
    data = replay(folder, run="dates", text=TEXT)
    assert "error" in data["answers"][1] and str(folder) not in json.dumps(data)


def test_a_server_replays_runs_and_decodes_through_its_engine(folder, tmp_path):
    folders = {
        "one": write_folder(tmp_path / "one", "translator", seed=3),
        "lm": write_folder(tmp_path / "lm", "lm", seed=3),
    }
    with served_client(folders, runs=folder) as (_, client):

        def look(view, **request):
            return client.post(f"/look/api/{view}", json=request, timeout=PATIENCE)

        assert look("replay", run="dates", text=TEXT).json()["data"]["answers"][0]["step"] == 6
        assert look("replay", run="../runs/dates").status_code == 400
        assert look("anatomy", yaml="kind: nothing").status_code == 400
        assert look("compare", models=["one", "lm"], text="the cat").json()["data"]["sides"][1]["model"]["name"] == "lm"
        # what is streamed is what the page then shows in detail
        for name in folders:
            for options in ({"temperature": 0.0}, {"temperature": 0.7, "seed": 5}):
                sent = {"model": name, "prompt": "the cat sat", "max_tokens": 9, "stream": True, **options}
                events = [line[6:] for line in client.post("/v1/completions", json=sent).text.splitlines() if line]
                text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
                more = {"method": "greedy"} if not options["temperature"] else {"method": "sample", **options}
                found = look("use", model=name, text="the cat sat", tokens=9, **more).json()["data"]
                assert found["parts"][0]["text"].strip().startswith(text.strip()) or found["answer"] == text


def test_the_commands_write_pages_or_one_message(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    for arguments in (
        ["replay", str(folder / "dates"), TEXT],
        ["use", TEXT, "-m", str(DATES), "--beam", "2"],
        ["compare", TEXT, *["-m", str(DATES)] * 2],
        ["anatomy", "transformer-tiny", str(DATES), "--size", "8"],
    ):
        try:
            main(["look", *arguments, "-o", str(page)])
        except SystemExit as error:
            assert not error.code
        assert f'"view":"{arguments[0]}"' in page.read_text(encoding="utf-8")
        page.unlink()
    capsys.readouterr()
    for arguments in (
        ["replay", str(folder), TEXT],
        ["use", TEXT, "-m", str(tmp_path / "none")],
        ["compare", TEXT, "-m", str(RUN)],
        ["anatomy", "transformer-tny"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["look", *arguments, "-o", str(page)])
        assert stopped.value.code == 2 and capsys.readouterr().err.count("allyouneed: ") == 1
        assert not page.exists()
