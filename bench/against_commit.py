"""Speed of the working tree against another commit: the same jobs in alternating processes, as ratios new / old.

    python bench/against_commit.py e7311cb                          # CPU jobs; the commit is checked out under build/
    python bench/against_commit.py /path/to/old/tree                # a tree that is already there
    python bench/against_commit.py e7311cb --jobs base-b1,start     # some jobs
    python bench/against_commit.py /path/to/old/tree --device cuda  # adds the GPU jobs

Each side runs in its own process with PYTHONPATH set to its tree, the same threads and the same random weights, and is
stopped (SIGSTOP) while the other one runs. The decoding jobs at int8 and on GPU are those of each tree's own
bench/decode/cpu.py and bench/decode/gpu.py, the GPU training jobs step `Ours` of bench/train/gpu.py; what no bench
offers in both trees (fp32, training on CPU, start-up) goes through the public API. A ratio above 1 means that the
working tree is faster. It is the median over rounds of old seconds / new seconds, followed by its range and by the
ratio of the best rounds; on a busy machine the best rounds are the better estimate.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
ROUND = 1.0  # seconds: a short call is repeated within a round
LENGTH = 32  # tokens in and out of a CPU decoding job
SENTENCE = "Machine learning is fun."
Call = Callable[[], Any]


class Job(NamedTuple):
    """`make(folder, *args)` returns the call to measure and the number of units it processes."""

    make: Callable[..., tuple[Call, float]]
    args: tuple[Any, ...]
    unit: str = "tokens"


# --- in a side's process ----------------------------------------------------------------------------------------------


def first_of(*choices: str) -> Any:
    """The first `module:name` that this tree has: names of the working tree first, then those of older ones."""
    for choice in choices:
        module, _, name = choice.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"this tree has none of {', '.join(choices)}")


def bench_module(name: str, old: str) -> Any:
    """A benchmark of this tree: bench/decode/cpu.py, in older trees decode_cpu.py."""
    found = importlib.util.find_spec("bench")
    return importlib.import_module(f"bench.{name}" if found and found.origin else old)


def wait_for_native_code() -> None:
    """Both sides compile their CPU kernels in the background; measure only when they are ready."""
    first_of("allyouneed.kernels.cpu.build:wait_for_build", "allyouneed.kernels.native:wait")()


def decode_int8(folder: Path, shape: str, rows: int, beam: int) -> tuple[Call, float]:
    bench = bench_module("decode.cpu", "decode_cpu")
    return bench.ours(folder / shape, shape, rows, beam), rows * LENGTH


def decode_fp32(folder: Path, shape: str, rows: int, beam: int) -> tuple[Call, float]:
    import torch

    import allyouneed

    bench = bench_module("decode.cpu", "decode_cpu")
    wait_for_native_code()
    model = allyouneed.build(bench.tree(bench.SHAPES[shape])).eval()
    model.load_state_dict(torch.load(folder / shape / "weights.pt"))
    first_of("allyouneed.nn.models.weights:widen_half_for_cpu", "allyouneed.nn.filling:suit_cpu")(model)
    engine = first_of("allyouneed.infer.engine:Engine")(model, bos=1, eos=2, pad=0, budget=10**9)
    options = first_of("allyouneed.infer.decoding.options:Decoding", "allyouneed.infer.decoding:Decoding")
    method = {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy"}
    decoding = options(**method, min_length=LENGTH, max_length=LENGTH, loops=None)
    given = bench.prompts(bench.SHAPES[shape], rows)
    run = engine.generate if bench.SHAPES[shape].encoder else getattr(engine, "complete", None) or engine.go_on
    return lambda: run(given, decoding), rows * LENGTH


def translate(folder: Path, rows: int) -> tuple[Call, float]:
    """The shipped translator through its predictor: tokenization, search and detokenization."""
    import allyouneed

    wait_for_native_code()
    model = allyouneed.load()
    texts = [f"{SENTENCE} This is sentence number {n}." for n in range(rows)]
    return lambda: model.translate(texts, to="de" if "de" in model.languages else None), rows


def train_cpu(folder: Path) -> tuple[Call, float]:
    """One update of transformer-small on packed rows: forward, loss, backward, clipping, Adam."""
    import torch

    import allyouneed

    translation = first_of(
        "allyouneed.tasks.translation.translation:Translation", "allyouneed.tasks.translation:Translation"
    )
    torch.manual_seed(0)
    model = allyouneed.build("transformer-small", vocab=8000, dropout=0.1).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    batch, task, tokens = packed_pairs(rows=4, length=512, vocab=8000), translation(smoothing=0.1), 4 * 512

    def step() -> None:
        optimiser.zero_grad()
        (task.loss(model, batch).total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return step, tokens


def packed_pairs(rows: int, length: int, vocab: int, sentence: int = 32) -> Any:
    """Random sentence pairs of `sentence` tokens, packed without padding."""
    import torch

    from allyouneed.nn.batch import Batch, Rows

    generator = torch.Generator().manual_seed(0)
    segments = (torch.arange(length) // sentence + 1).expand(rows, length).contiguous()
    source, target, labels = torch.randint(3, vocab, (3, rows, length), generator=generator)
    return Batch(Rows(target, segments=segments), source=Rows(source, segments=segments), labels=labels)


def decode_gpu(folder: Path, name: str) -> tuple[Call, float]:
    import torch

    bench = bench_module("decode.gpu", "decode_gpu")
    job = bench.JOBS[name]
    run = bench.ours(job)

    def call() -> None:
        run()
        torch.cuda.synchronize()

    return call, sum(wanted for _, wanted in bench.lengths(job))


def train_gpu(folder: Path, name: str) -> tuple[Call, float]:
    """Updates as the trainer runs them: bf16, compiled, captured as a CUDA graph."""
    import torch

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    bench = bench_module("train.gpu", "train_gpu")
    if name == "gpt2":
        rows, length, task = 32, 1024, bench.CausalLM()
        changes = ["vocab=50304", "dropout=0.0", "decoder[0].mixer.dropout=0.0"]
        tree = bench.override(bench.preset_tree("gpt2"), changes)
        tokens, labels = torch.randint(0, 50257, (2, rows, length))
        batch = bench.Batch(bench.Rows(tokens), labels=labels)
    else:
        rows, length, task = 192, 128, bench.Translation(smoothing=0.1)
        tree = bench.override(bench.preset_tree("transformer-base"), ["vocab=32000", "dropout=0.1"])
        batch = packed_pairs(rows, length, 32000)
    position = list(get_type_hints(bench.Update).values())[-1]  # the class of its last field, under either name
    batch, ours = batch.to("cuda"), bench.Ours(tree, task, True)
    update = bench.Update([batch], [position(0, 0)], rows * length, position(0, 0))
    steps = 10

    def call() -> None:
        for _ in range(steps):
            ours.step(update)
        torch.cuda.synchronize()

    return call, steps * rows * length


def command(folder: Path, *arguments: str) -> tuple[Call, float]:
    """A fresh Python process with these arguments."""
    line = [sys.executable, *arguments]
    return lambda: subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), 1


def work(tree: Path, name: str, folder: Path) -> None:
    """The main loop of a side's process: one round per input line, its seconds per call as output."""
    sys.path[:0] = [str(tree), str(tree / "bench")]
    import allyouneed

    if tree / "src" not in Path(allyouneed.__file__ or "").resolve().parents:
        raise SystemExit(f"{allyouneed.__file__} is not in {tree}")
    job = JOBS[name]
    call, units = job.make(folder, *job.args)
    for _ in range(2):  # compile, capture, fill caches
        call()
    print(json.dumps(units), flush=True)
    for _ in sys.stdin:
        start, calls, taken = time.perf_counter(), 0, 0.0
        while not calls or taken < ROUND:
            call()
            calls, taken = calls + 1, time.perf_counter() - start
        print(taken / calls, flush=True)


def write_weights(tree: Path, folder: Path, shapes: list[str]) -> None:
    """Random weights that both sides load."""
    import torch

    import allyouneed

    sys.path[:0] = [str(tree), str(tree / "bench")]
    bench = bench_module("decode.cpu", "decode_cpu")
    for shape in shapes:
        torch.manual_seed(0)
        (folder / shape).mkdir()
        weights = allyouneed.build(bench.tree(bench.SHAPES[shape])).state_dict()
        torch.save(weights, folder / shape / "weights.pt")


CPU_JOBS = {
    "base-b1": Job(decode_int8, ("base", 1, 1)),
    "base-b32": Job(decode_int8, ("base", 32, 1)),
    "base-b1-beam4": Job(decode_int8, ("base", 1, 4)),
    "base-b32-beam4": Job(decode_int8, ("base", 32, 4)),
    "small-b1": Job(decode_int8, ("small", 1, 1)),
    "small-b32": Job(decode_int8, ("small", 32, 1)),
    "gpt2-b1": Job(decode_int8, ("gpt2", 1, 1)),
    "base-b1-fp32": Job(decode_fp32, ("base", 1, 1)),
    "base-b32-fp32": Job(decode_fp32, ("base", 32, 1)),
    "base-b1-beam4-fp32": Job(decode_fp32, ("base", 1, 4)),
    "small-b1-fp32": Job(decode_fp32, ("small", 1, 1)),
    "gpt2-b1-fp32": Job(decode_fp32, ("gpt2", 1, 1)),
    "translate-1": Job(translate, (1,), "texts"),
    "translate-32": Job(translate, (32,), "texts"),
    "train-step": Job(train_cpu, ()),
    "start": Job(command, ("-m", "allyouneed", "translate", SENTENCE), "starts"),
    "import": Job(command, ("-c", "import allyouneed"), "starts"),
}
GPU_JOBS = {
    f"gpu-{name}": Job(decode_gpu, (name,))
    for name in ("llama-b1", "llama-b64", "base-b64", "base-b512", "base-b64-beam4", "base-load", "llama-load")
} | {f"gpu-train-{name}": Job(train_gpu, (name,)) for name in ("gpt2", "translation")}
JOBS = CPU_JOBS | GPU_JOBS


# --- in the parent process --------------------------------------------------------------------------------------------


def find_tree(old: str) -> Path:
    """A tree at this path, or the commit checked out under build/."""
    path = Path(old).resolve()
    if (path / "src" / "allyouneed").is_dir():
        return path
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--verify", f"{old}^{{commit}}"], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{old}: neither a tree with src/allyouneed nor a commit")
    commit = found.stdout.strip()
    path = ROOT / "build" / "against" / commit[:12]
    if not (path / "src" / "allyouneed").is_dir():
        subprocess.run([*git, "worktree", "add", "--force", "--detach", str(path), commit], check=True)
    return path


class Side:
    """The process of one tree, stopped unless it runs a round."""

    def __init__(self, tree: Path, job: str, folder: Path, threads: int, log: Path) -> None:
        line = [sys.executable, "-W", "ignore", __file__, str(tree), "--work", job, "--folder", str(folder)]
        self.errors = log.open("w")
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=folder,
            env=environment(tree, threads),
        )  # fmt: skip
        try:
            self.units = float(self.read())
        except ValueError:
            self.end()
            raise RuntimeError(f"{tree} cannot run {job}:\n{log.read_text()[-3000:]}") from None
        self.process.send_signal(signal.SIGSTOP)

    def read(self) -> str:
        return str(self.process.stdout.readline()).strip()  # type: ignore[union-attr]

    def round(self) -> float:
        """Seconds per call."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write("\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        seconds = float(self.read())
        self.process.send_signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


def environment(tree: Path, threads: int) -> dict[str, str]:
    path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "active", "PYTHONPATH": path}


def measure(trees: dict[str, Path], job: str, folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    sides: dict[str, Side] = {}
    try:
        for name, tree in trees.items():
            sides[name] = Side(tree, job, folder, threads, folder / f"{job}.{name}.log")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in sides if number % 2 else reversed(sides):  # neither side always goes first
                seconds[name].append(sides[name].round())
    finally:
        for side in sides.values():
            side.end()
    ratios = [old / new for new, old in zip(seconds["new"], seconds["old"], strict=True)]
    units = {name: side.units for name, side in sides.items()}
    assert units["new"] == units["old"], f"{job}: the trees do different work: {units}"
    return {
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "best": min(seconds["old"]) / min(seconds["new"]),
        "per_second": {name: units[name] / min(found) for name, found in seconds.items()},
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or the path of its tree")
    parser.add_argument("--new", default=str(ROOT), help="the other tree; the working tree by default")
    parser.add_argument("--jobs", help=f"separated by commas: {', '.join(JOBS)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: also the GPU jobs")
    parser.add_argument("--only-gpu", action="store_true", help="with --device cuda: leave the CPU jobs out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(Path(options.old), options.work, options.folder)
    if options.write:
        return write_weights(Path(options.old), options.folder, options.write.split(","))
    chosen = ({} if options.only_gpu else CPU_JOBS) | (GPU_JOBS if options.device == "cuda" else {})
    names = options.jobs.split(",") if options.jobs else list(chosen)
    if unknown := [name for name in names if name not in JOBS]:
        raise SystemExit(f"unknown job {unknown[0]!r} (allowed: {', '.join(JOBS)})")
    trees = {"new": Path(options.new).resolve(), "old": find_tree(options.old)}
    print(f"new: {trees['new']}\nold: {trees['old']}\n{options.rounds} rounds, {options.threads} threads\n")
    print("| job | new / old | range | of best rounds | new, per s | old, per s | unit | load |")
    print("|---|---:|---|---:|---:|---:|---|---:|", flush=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shapes = {JOBS[name].args[0] for name in names if JOBS[name].make in (decode_int8, decode_fp32)}
        if shapes:
            line = [sys.executable, "-W", "ignore", __file__, str(trees["new"]), "--write", ",".join(sorted(shapes))]
            subprocess.run(
                [*line, "--folder", place], check=True, cwd=place, env=environment(trees["new"], options.threads)
            )
        for name in names:
            try:
                figures = found[name] = measure(trees, name, folder, options.rounds, options.threads)
            except RuntimeError as error:
                print(f"| {name} | failed | | | | | | |", flush=True)
                print(error, file=sys.stderr, flush=True)
                found[name] = {"error": str(error)}
                continue
            low, high = figures["range"]
            speeds = " | ".join(f"{figures['per_second'][side]:,.4g}" for side in ("new", "old"))
            print(
                f"| {name} | **{figures['ratio']:.3f}** | {low:.3f} – {high:.3f} | {figures['best']:.3f} | {speeds} "
                f"| {JOBS[name].unit} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if any("error" in figures for figures in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
