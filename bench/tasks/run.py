"""Tasks on public data against published figures: bench/tasks/experiments.yaml, each by an ordinary recipe.

    python bench/tasks/run.py --data DATA --weights WEIGHTS                                 # on a CPU, one at a time
    python bench/tasks/run.py --data DATA --weights WEIGHTS --device cuda --together 8 --minutes 8
    python bench/tasks/run.py --data DATA --weights WEIGHTS --only mnist scan --pack PACKED # the files these need
    python bench/tasks/run.py --data DATA --weights WEIGHTS --tiny                          # a rehearsal
    python bench/tasks/run.py --page --add FILE                                             # results of another machine

DATA has the folders cls, sim, tag, qa, s2s and image, with official or stated splits as tsv.gz, jsonl.gz, idx and npz.
WEIGHTS has folders of Hugging Face models by the names that experiments start from: `python tests/real/fetch.py
WEIGHTS`. Every training is a process of its own (`allyouneed train`). What has run with the same recipe on the same
kind of device is not run again; what --minutes stops is saved and goes on with the next call. Scores are added to
docs/results/tasks.json (--results), and the page is written from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[2]))

from bench.tasks.page import write_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "tasks.json"
SPLITS = ("train", "valid", "test")
TINY = 0.02  # of the data
PATIENCE = 100  # seconds that a stopped training has for saving


@dataclass(frozen=True, eq=False)
class Job:
    """One recipe of an experiment with one seed."""

    experiment: str
    run: str
    seed: int
    recipe: dict[str, Any]  # without the folders of this machine
    start: str | None

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.run}"

    @property
    def trains(self) -> bool:
        return bool(self.recipe.get("task") != "none")

    @property
    def fingerprint(self) -> str:
        """What it depends on."""
        return hashlib.sha256(json.dumps(self.recipe, sort_keys=True).encode()).hexdigest()[:12]

    def key(self, device: str) -> tuple[str, str, int, str, str]:
        return self.experiment, self.run, self.seed, device, self.fingerprint


def load_table() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text("utf-8"))[
        "experiments"
    ]
    return found


def jobs(table: dict[str, Any], only: list[str], seeds: list[int]) -> Iterator[Job]:
    for seed in seeds:
        for name, experiment in table.items():
            for run, changes in experiment["runs"].items():
                if not only or any(word in f"{name}-{run}" for word in only):
                    yield Job(name, run, seed, _recipe(experiment, changes), changes.get("start"))


def _recipe(experiment: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    base = ROOT / "recipes" / changes["recipe"] if "recipe" in changes else None
    recipe = yaml.safe_load(base.read_text("utf-8")) if base else {}
    recipe |= {key: value for key, value in changes.items() if key != "recipe"}
    files, portions = experiment["data"], experiment.get("portions", {})
    data: dict[str, Any] = {}
    for split in SPLITS:
        if split in files or split in portions:
            entry = {"path": files.get(split, files["train"]), **experiment.get("entry", {})}
            data[split] = [entry | ({"portion": portions[split]} if split in portions else {})]
    longest = experiment.get("max_tokens")
    return recipe | {"data": data | ({"max_tokens": longest} if longest else {})}


def placed(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """The recipe on this machine; with --tiny, a few steps on a part of the data."""
    recipe = json.loads(json.dumps(job.recipe))
    for entries in (recipe["data"][split] for split in SPLITS if split in recipe["data"]):
        for entry in entries:
            entry["path"] = str((given.data / entry["path"]).resolve())
            if given.tiny:
                low, high = entry.get("portion", (0.0, 1.0))
                entry["portion"] = [low, low + (high - low) * TINY]
    if job.start is not None:
        recipe["start"] = str((given.weights / job.start).resolve())
    recipe |= {"seed": job.seed, "device": given.device, "output": str(folder(job, given)), "name": job.name}
    if given.tiny:
        recipe.pop("epochs", None)
        recipe |= {"steps": 4, "validate": recipe.get("validate", {}) | {"every": 2, "limit": 20}}
        recipe |= {
            "save": {"every": 2, "keep": 1},
            "average": 0,
            "batch": {"rows": 16} if "image" in str(recipe["data"]) else {},
        }
        recipe["schedule"] = {"kind": "constant", "peak": 0.0001}
    return recipe


def folder(job: Job, given: argparse.Namespace) -> Path:
    return (given.output / f"{job.name}-{job.seed}-{given.device}{'-tiny' if given.tiny else ''}").resolve()


# --- running --------------------------------------------------------------------------------------------------------


def start(job: Job, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    place = folder(job, given)
    place.parent.mkdir(parents=True, exist_ok=True)
    path, log = place.with_suffix(".yaml"), place.with_suffix(".log")
    path.write_text(yaml.safe_dump(placed(job, given), sort_keys=False), "utf-8")
    command = [sys.executable, "-m", "allyouneed", *(["train", str(path)] if job.trains else scoring(job, given))]
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"{job.name}, seed {job.seed}: {log}", flush=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )


def scoring(job: Job, given: argparse.Namespace) -> list[str]:
    """The command that scores the model an experiment starts from, as it is."""
    recipe = placed(job, given)
    (test,) = recipe["data"]["test"]
    options = ["--columns", ",".join(map(str, test["columns"]))] if "columns" in test else []
    options += ["--portion", ",".join(map(str, test["portion"]))] if "portion" in test else []
    return [
        "evaluate",
        test["path"],
        "--model",
        recipe["start"],
        "--device",
        given.device,
        "--json",
        "--quiet",
        *options,
    ]


def run_all(wanted: list[Job], given: argparse.Namespace) -> int:
    """The number of trainings that failed."""
    done = {tuple(record["key"]) for record in read_results(given.results)}
    waiting = [job for job in wanted if job.key(given.device) not in done]
    print(f"{len(wanted) - len(waiting)} of {len(wanted)} have run before", flush=True)
    until = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed = 0
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < given.together:
                job = waiting.pop(0)
                running[job] = start(job, given)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                failed += not record(job, given, running.pop(job).returncode)
            time.sleep(1)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for job, process in running.items():
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if not (code == 0 and record(job, given, code)):
                print(f"{job.name}, seed {job.seed}: stopped, goes on with the next call", flush=True)
    return failed


def record(job: Job, given: argparse.Namespace, code: int) -> bool:
    """Add the scores of a finished training to the results."""
    place = folder(job, given)
    if not job.trains and not code:
        scores = json.loads(place.with_suffix(".log").read_text("utf-8").splitlines()[-1])
        result = {"steps": 0, "weights": "as they are", "training_seconds": 0, "scores": {"test": scores}}
        place.mkdir(exist_ok=True)
        (place / "result.json").write_text(json.dumps(result | {"examples": {}, "baselines": {}}), "utf-8")
    if code or not (place / "result.json").exists():
        last = place.with_suffix(".log").read_text("utf-8", "replace").strip().splitlines()[-3:]
        print(f"{job.name}, seed {job.seed}: exit code {code}\n  " + "\n  ".join(last), flush=True)
        return False
    found = json.loads((place / "result.json").read_text("utf-8"))
    kept = ("steps", "weights", "training_seconds", "scores", "examples", "baselines")
    entry = {
        "key": job.key(given.device),
        **{key: found[key] for key in kept},
        "machine": machine(place) if job.trains else given.device.upper(),
    }
    add([entry], given.results)
    print(f"{job.name}, seed {job.seed}: {found['scores'].get('test')}", flush=True)
    return True


def add(entries: list[dict[str, Any]], path: Path) -> None:
    """Add records to the results, in place of those of the same experiments, seeds and devices."""
    fresh = {tuple(one["key"][:4]) for one in entries}
    results = [one for one in read_results(path) if tuple(one["key"][:4]) not in fresh]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*results, *entries], indent=1, ensure_ascii=False) + "\n", "utf-8")


def machine(place: Path) -> str:
    """The device, as the training printed it."""
    lines = place.with_suffix(".log").read_text("utf-8", "replace").splitlines()
    return next(
        (line for line in lines if line.startswith(("CPU", "NVIDIA", "GPU", "cuda"))), lines[0] if lines else ""
    )


def current(table: dict[str, Any], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of recipes that the table still has."""
    known = {(job.experiment, job.run, job.fingerprint) for job in jobs(table, [], [1])}
    return [one for one in records if (one["key"][0], one["key"][1], one["key"][4]) in known]


def read_results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8")) if path.exists() else []


# --- packing --------------------------------------------------------------------------------------------------------


def pack(wanted: list[Job], given: argparse.Namespace) -> None:
    """The files that these experiments read, the weights in half precision, in folders `data` and `weights`."""
    files = {entry["path"] for job in wanted for split in SPLITS for entry in job.recipe["data"].get(split, ())}
    files |= {name.replace("images-idx3", "labels-idx1") for name in files}
    for name in sorted(files):
        (given.pack / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(given.data / name, given.pack / "data" / name)
    for name in sorted({job.start for job in wanted if job.start is not None}):
        _halve(given.weights / name, given.pack / "weights" / name)
    size = sum(path.stat().st_size for path in given.pack.rglob("*") if path.is_file())
    print(f"{given.pack}: {size / 2**20:.1f} MiB")


def _halve(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".txt"):
            shutil.copy(path, target)
    stored = source / "model.safetensors"
    pickled = source / "pytorch_model.bin"
    tensors = load_file(stored) if stored.exists() else torch.load(pickled, "cpu", weights_only=True)
    halved = {name: one.half() if one.is_floating_point() else one for name, one in tensors.items()}
    save_file({name: one.contiguous() for name, one in halved.items()}, target / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path, default=Path("build/real"))
    parser.add_argument("--output", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", default=[], help="experiments whose names contain one of these")
    parser.add_argument("--without", nargs="*", default=[], help="not those whose names contain one of these")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--together", type=int, default=1, help="trainings beside each other")
    parser.add_argument("--minutes", type=float, help="stop, and save what runs, after so many")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: four steps on 2 %% of the data; not recorded")
    parser.add_argument("--pack", type=Path, help="copy the files these experiments need, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results, and run nothing")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="with --page: results of other machines")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which stops and saves what runs
    table = load_table()
    for other in given.add:
        add(read_results(other), given.results)
    if not given.page:
        if given.data is None or not given.data.is_dir():
            parser.error(f"--data: the folder of the data sets ({given.data} is none)")
        wanted = [
            job for job in jobs(table, given.only, given.seeds) if not any(word in job.name for word in given.without)
        ]
        if not wanted:
            parser.error(f"no experiment has a name with {given.only}; there are {', '.join(table)}")
        if missing := sorted({job.start for job in wanted if job.start and not (given.weights / job.start).is_dir()}):
            parser.error(f"--weights: no folder {', '.join(missing)} in {given.weights}")
        if given.pack is not None:
            return pack(wanted, given)
        if given.tiny:
            given.results = given.output / "tiny.json"
        if failed := run_all(wanted, given):
            sys.exit(f"{failed} failed")
    if not given.tiny and given.results == RESULTS:
        write_page(table, current(table, read_results(RESULTS)))


if __name__ == "__main__":
    main()
