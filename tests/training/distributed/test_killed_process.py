"""When a process of a torchrun job is killed, the run ends with a message and can be resumed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from allyouneed.training import train
from allyouneed.training.checkpoints import Checkpoints
from allyouneed.training.reporting.log import read_log
from micro_run import Listener, Make
from waiting import PATIENCE, until

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def worker(launcher: int, rank: int) -> int:
    """The process of this rank, by what torchrun wrote into its environment."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


def test_a_killed_process_ends_the_run_with_a_message_and_its_last_checkpoint(
    make: Make, tmp_path: Path, listener: Listener
):
    recipe = make(steps=100_000, save={"every": 5, "keep": 3})
    path = tmp_path / "many.yaml"
    path.write_text(yaml.safe_dump(recipe.resolved()))
    command = [*TORCHRUN, "-m", "allyouneed", "train", str(path)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    pointer = recipe.output / "checkpoints" / "last.json"
    until(lambda: launcher.poll() is not None or (pointer.exists() and '"step": 0' not in pointer.read_text()))
    assert launcher.poll() is None, launcher.communicate()[1]
    os.kill(worker(launcher.pid, 1), signal.SIGKILL)
    said = launcher.communicate(timeout=PATIENCE)[1]
    assert launcher.returncode == 1
    assert "allyouneed: process 0 of 2: lost another process of the run" in said
    assert "run the same command again to resume" in said
    assert "Traceback" not in said.partition("allyouneed: process 0")[0]  # torchrun has one of its own, behind
    newest = Checkpoints(recipe.output / "checkpoints", 3, listener.console.print).latest_valid()
    assert newest is not None and newest.step >= 5 and "damaged" not in listener.text
    again = make(steps=newest.step + 3, save={"every": 5, "keep": 3})
    assert train(again, console=listener.console).steps == newest.step + 3
    assert f"after step {newest.step}" in listener.text
    assert [e["step"] for e in read_log(recipe.output / "log.jsonl")] == list(range(1, newest.step + 4))
