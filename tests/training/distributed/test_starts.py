"""Several processes start again after a crash, and are refused together beside another run."""

from __future__ import annotations

from pathlib import Path

import yaml
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from allyouneed.training.checkpoints import Checkpoints
from allyouneed.training.prepare import RunFolder
from allyouneed.training.reporting.log import read_log
from micro_run import Listener, Make
from processes import start_training
from waiting import PATIENCE, until


def test_processes_that_torchrun_restarts_meet_again_and_resume(make: Make, tmp_path: Path, listener: Listener) -> None:
    """torchrun keeps the store of the first start, which holds the addresses of processes that are dead."""
    recipe = make(steps=100_000, save={"every": 5, "keep": 3})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.resolved()))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, ends = start_training(path, 2, store.port, **agent, TORCHELASTIC_RESTART_COUNT="0")
    pointer = recipe.output / "checkpoints" / "last.json"
    until(lambda: ends[0].poll() or (pointer.exists() and '"step": 0' not in pointer.read_text()))
    first[1].kill()
    assert ends[0].poll(PATIENCE) and "lost another process" in ends[0].recv()
    for process in first:
        process.join()
    newest = Checkpoints(recipe.output / "checkpoints", 3, listener.console.print).latest_valid()
    assert newest is not None and newest.step >= 5
    last = newest.step + 3
    ends = start_training(path, 2, store.port, f"steps={last}", **agent, TORCHELASTIC_RESTART_COUNT="1")[1]
    assert [end.recv() if end.poll(PATIENCE) else "nothing" for end in ends] == ["", ""]
    assert [entry["step"] for entry in read_log(recipe.output / "log.jsonl")] == list(range(1, last + 1))


def test_all_processes_of_a_refused_start_end_and_one_says_why(make: Make, tmp_path: Path) -> None:
    recipe = make(steps=5)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.resolved()))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RunFolder(recipe.output).lock():
        ends = start_training(path, 2, store.port, TORCHELASTIC_USE_AGENT_STORE="True")[1]
        main, other = [end.recv() if end.poll(PATIENCE) else "nothing" for end in ends]
    assert "UserError" in main and "another process is training here" in main
    assert "SystemExit: 2" in other and "lost" not in other
