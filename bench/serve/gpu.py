"""Tokens per second over HTTP and of `Engine` alone, on one GPU in the same run.

    python bench/serve/gpu.py                             # the shape of TinyLlama in bf16; 64, 256 and 512 clients
    python bench/serve/gpu.py --clients 512               # fewer of them
    python bench/serve/gpu.py --fake-step-ms 3            # anywhere: a tiny model whose steps take so long
    python bench/serve/gpu.py --fake-step-ms 3 --profile  # and CPU time by function

Random weights, 128 prompt tokens, 256 forced new ones, greedy. `Engine.decode` gets as many requests at once as there
are clients. Over HTTP each client sends its next request when it has the answer to the last one; whole answers and
streams are measured separately, of a server in one process and of one with API processes. The load generator
(http_load.py) is a process of its own. Required: 0.85 of `Engine`.

Prompts are new in every request, or the same in every round ("cached": all but their last tokens are in the prefix
cache).

The last columns of a row say what it loses to `Engine`: prefills, the prompts and captured passes of one, and how many
milliseconds in all the device prefilled and had nothing to do (or waited for the host between two prefills of one
step). Without a device, the engine's thread prefilled so long.

After each row, where the time goes (probe.py). Shares of the time: what the device does (decode, prefill; idle:
the rest), and what the engine's thread does: waits for the device, prefills (admission included), launches, collects
(reads tokens), reports (metrics, deliveries), waits for further requests of a wave (gather), has no request (idle).
Then milliseconds per scheduler step, which is a run of up to 8 decode steps, and per prefill; graphs captured meanwhile
(0 after a warm-up); CPU microseconds per request of the engine process: its event loop, which receives requests and
sends answers, the engine's thread, and collecting garbage, which either does; and CPU seconds per second of all
processes.

A machine without network needs these wheels besides torch (its own CPU is Linux on x86-64 as well):

    pip download --python-version 3.12 --only-binary=:all: -c constraints.txt -d wheels \\
      fastapi uvicorn python-multipart prometheus-client jinja2 uvloop httptools
    pip install --no-index --find-links wheels \\
      fastapi uvicorn python-multipart prometheus-client jinja2 uvloop httptools

which bring annotated-doc, annotated-types, anyio, click, h11, idna, markupsafe, opentelemetry-api, pydantic,
pydantic-core, starlette, typing-extensions and typing-inspection. Where our own dependencies are missing as well, add
numpy, pyyaml, typer, rich, tokenizers, safetensors, sacrebleu, zstandard and (from its source archive)
opencc-python-reimplemented to both commands. uvloop and httptools are optional.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.apps.serve.workers.supervisor import default_api_processes
from allyouneed.config import override, parse
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.nn.models.base import Model
from bench.decode.gpu import tree
from bench.serve import probe
from bench.serve.cpu import free_port
from bench.serve.http_load import Call, Job, LoadProcess, Result, percentile

PREFILL = {
    "admit": "admit",
    "prefill": "prefill",
    "read": "of that captured passes",
    "plain": "of that plain passes",
    "keep": "prefix cache",
    "fill": "into slots",
    "load": "of that copies",
    "stage": "all copies of inputs",
    "replay": "all launches",
}
GIVEN, NEW, REQUIRED = 128, 256, 0.85
TINY = ["width=16", "decoder[0].repeat=1", "decoder[0].mixer.heads=1", "decoder[0].mixer.kv_heads=1"]
TINY += ["decoder[0].channel.hidden=16"]


def tokenizer_of(vocab: int) -> Any:
    """A tokenizer of made-up words: detokenizing costs what it costs with a real one."""
    random = Random(0)
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(2, 9))) for _ in range(2 * vocab)]
    lines = [" ".join(words[n : n + 50] * 2) for n in range(0, len(words), 50)]
    return train(TokenizerConfig(vocab=vocab), lines)


def build(given: argparse.Namespace, path: Path) -> Folder:
    vocab = 1000 if given.tiny else 32000
    tokenizer = tokenizer_of(vocab)
    config = override(tree("llama"), [*(TINY if given.tiny else []), f"vocab={tokenizer.size}"])
    torch.manual_seed(0)
    with torch.device(given.device):
        model = parse(Model, config).build().eval()  # type: ignore[type-abstract]
    if given.device != "cpu":
        model = model.to(torch.bfloat16)
    folder = Folder(model, Vocabularies(tokenizer, tokenizer), {"kind": "causal-lm"}, {}, max_tokens=1024)
    folder.save(path)
    return folder


def prompts(count: int, vocab: int, seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(10, vocab) for _ in range(GIVEN)] for _ in range(count)]


def engine_speed(folder: Folder, clients: int, rounds: int) -> float:
    """Tokens per second of `Engine.decode` with as many requests as clients."""
    tokenizer = folder.tokenizers.target
    engine = Engine(folder.model, bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad, budget=64 * 1024)
    decoding = Decoding(method="greedy", min_length=NEW, max_length=NEW, loops=None)
    requests = [Request(one, NEW, (n,)) for n, one in enumerate(prompts(clients, tokenizer.size))]
    engine.decode(requests, decoding)  # captures graphs
    engine.decode(requests, decoding)
    started = time.perf_counter()
    for _ in range(rounds):
        engine.decode(requests, decoding)
    return rounds * clients * NEW / (time.perf_counter() - started)


class Server:
    """`allyouneed serve` with `api` API processes; 0: all in one process."""

    def __init__(self, folder: Path, rows: int, api: int, given: argparse.Namespace) -> None:
        self.port, self.api, self.rows = free_port(), api, rows
        self.probe = Path(tempfile.mkdtemp(prefix="serve-probe-"))
        command = [sys.executable, "-m", "allyouneed", "serve", f"llama={folder}", "--port", str(self.port)]
        command += ["--rows", str(rows), "--device", given.device, "--api-processes", str(api)]
        environment = probe.environment(self.probe, given.fake_step_ms, given.profile)
        with open(self.probe / "log.txt", "w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    def wait(self) -> None:
        while not self.ready():
            if self.process.poll() is not None:
                raise SystemExit("the server does not start:\n" + (self.probe / "log.txt").read_text()[-3000:])
            time.sleep(0.1)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def processes(self) -> list[int]:
        """The server's own, or those of its supervisor."""
        found = [self.process.pid]
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                found.append(int(file.parent.name))
        return found

    def snapshot(self) -> Snapshot:
        totals = probe.read_totals(self.probe)
        cpu = {pid: cpu_seconds(pid) for pid in self.processes()}
        return Snapshot(totals, cpu)

    def stop(self) -> None:
        self.process.terminate()

    def wait_for_end(self) -> None:
        self.process.wait(60)


class Snapshot(NamedTuple):
    totals: dict[int, dict[str, float]]
    cpu: dict[int, float]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Totals(NamedTuple):
    """What the engine's process did between two snapshots, in calls and seconds, and its number."""

    engine: int
    values: dict[str, float]

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Totals:
        engine, found = next(((pid, one) for pid, one in after.totals.items() if one.get("steps")), (0, {}))
        old = before.totals.get(engine, {})
        return cls(engine, {name: value - old.get(name, 0.0) for name, value in found.items()})

    def columns(self, answers: int, seconds: float) -> str:
        """The last ones of the table."""
        found = self.values
        prefills, passes = found.get("prefill calls", 0.0), found.get("pass calls", 0.0)
        device = found.get("device decode", 0.0), found.get("device prefill", 0.0)
        lost = device[1] if any(device) else found.get("prefill", 0.0)
        idle = f"{1000 * (seconds - sum(device)):.0f}" if any(device) else ""
        each = max(1.0, prefills)
        return f"{prefills:.0f} | {answers / each:.0f} | {passes / each:.1f} | {1000 * lost:.0f} | {idle}"


def breakdown(totals: Totals, before: Snapshot, after: Snapshot, seconds: float, tokens: int) -> str:
    engine, new = totals
    steps = max(1.0, new.get("steps", 0.0))

    def ms(name: str) -> str:
        return f"{name} {1000 * new.get(name, 0.0) / steps:.2f}"

    prefills = new.get("prefill calls", 0.0)

    def per_prefill(name: str) -> str:
        return f"{PREFILL[name]} {1000 * new.get(name, 0.0) / max(1.0, prefills):.1f}"

    def share(name: str, *less: str) -> float:
        return 100 * (new.get(name, 0.0) - sum(new.get(one, 0.0) for one in less)) / seconds

    def each(name: str) -> str:
        return f"{1e6 * new.get(name, 0.0) * NEW / tokens:.0f}"

    device = {"decode": share("device decode"), "prefill": share("device prefill")}
    thread = {
        "waits": share("wait"),
        "prefills": share("prefill") + share("admit"),
        "launches": share("launch"),
        "collects": share("collect", "wait"),
        "reports": share("report") + share("deliver"),
        "gathers": share("gather"),
    }
    busy = share("step") + share("gap") + share("gather")
    thread["other"] = busy - sum(thread.values())
    cpu = {pid: after.cpu[pid] - before.cpu.get(pid, 0.0) for pid in after.cpu}
    others = sorted((value for pid, value in cpu.items() if pid != engine), reverse=True)
    shown = ", ".join(f"{value / seconds:.2f}" for value in others if value / seconds >= 0.01)
    names = ("step", "wait", "launch", "collect", "prefill", "gap", "report", "deliver", "step cpu")

    def shares(of: dict[str, float], rest: str, whole: float) -> str:
        return ", ".join(f"{name} {value:.0f} %" for name, value in (of | {rest: whole}).items())

    on_device = shares(device, "idle", 100 - sum(device.values())) if any(device.values()) else "not measured"
    passes, plain = new.get("pass calls", 0.0), new.get("plain calls", 0.0)
    return (
        f"  device: {on_device}\n  engine thread: {shares(thread, 'idle', 100 - busy)}\n"
        f"  ms per scheduler step: {', '.join(map(ms, names))} ({new.get('steps', 0):.0f} steps, "
        f"{new.get('rows', 0) / steps:.0f} rows)\n"
        f"  ms per prefill: {', '.join(map(per_prefill, PREFILL))} ({prefills:.0f} prefills, {passes:.0f} "
        f"captured passes, {plain:.0f} plain ones; {new.get('capture calls', 0):.0f} captures, "
        f"{new.get('capture', 0.0):.2f} s)\n"
        f"  CPU us per request in the engine process: event loop {each('event loop cpu')}, engine's thread "
        f"{each('engine cpu')}; of both, collecting garbage {each('gc')} ({new.get('gc calls', 0.0):.0f} times)\n"
        f"  CPU/s: engine process {cpu.get(engine, 0.0) / seconds:.2f}; others {shown or '-'}; all "
        f"{1e6 * sum(cpu.values()) / tokens:.1f} us per token"
    )


def over_http(server: Server, load: LoadProcess, asked: list[list[int]], stream: bool) -> Result:
    body = {"model": "llama", "max_tokens": NEW, "min_tokens": NEW, "temperature": 0, "stream": stream}
    calls = [Call("/v1/completions", body | {"prompt": one}) for one in asked]
    result = load.run(Job(server.port, calls, clients=server.rows, drain=120))
    bad = [one.status for one in result.answers if one.status != 200]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(result.answers)} requests failed, status {bad[0]}")
    return result


def measure(server: Server, load: LoadProcess, given: argparse.Namespace, alone: float, vocab: int) -> list[float]:
    ratios, clients = [], server.rows
    same = prompts(clients, vocab)
    for stream in (False, True):  # captures graphs of this size
        over_http(server, load, same, stream)
    rows = [(stream, cached) for cached in (False, True) for stream in (False, True)]
    after = server.snapshot()
    for number, (stream, cached) in enumerate(rows):
        asked = same * given.rounds if cached else prompts(clients * given.rounds, vocab, seed=2 + number)
        before = after
        result = over_http(server, load, asked, stream)
        after = server.snapshot()
        totals, tokens = Totals.between(before, after), len(result.answers) * NEW
        speed = tokens / result.seconds
        first, end = result.latencies("first"), result.latencies("end")
        events = sum(one.events for one in result.answers) / tokens
        shown = f"{percentile(first, 0.5):.3f} s | {percentile(first, 0.95):.3f} s" if stream else "|"
        ratios.append(speed / alone)
        what = ("streams" if stream else "whole answers") + (", cached prompts" if cached else "")
        print(
            f"| | {server.api} | {what} | {speed:,.0f} | {ratios[-1]:.2f} | {shown} | "
            f"{percentile(end, 0.5):.2f} s | {percentile(end, 0.95):.2f} s | "
            f"{f'{events:.2f}' if stream else ''} | {totals.columns(len(result.answers), result.seconds)} |\n"
            f"{breakdown(totals, before, after, result.seconds, tokens)}",
            flush=True,
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument(
        "--api-processes", type=int, nargs="+", help="default: what a GPU gets; for the first number of clients also 0"
    )
    parser.add_argument("--fake-step-ms", type=float, help="decode steps compute nothing and take so long")
    parser.add_argument("--profile", action="store_true", help="print CPU time by function")
    given = parser.parse_args()
    given.tiny = given.tiny or given.fake_step_ms is not None
    modes = [0, default_api_processes(["cuda"])] if given.api_processes is None else given.api_processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.perf_counter()
    if given.fake_step_ms is not None:
        probe.fake_steps(given.fake_step_ms / 1000)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        folder = build(given, path)
        vocab = folder.tokenizers.target.size
        print(f"model built and saved after {time.perf_counter() - began:.0f} s", flush=True)
        alone = {clients: engine_speed(folder, clients, given.rounds) for clients in given.clients}
        print(f"Engine measured after {time.perf_counter() - began:.0f} s", flush=True)
        del folder
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        load, ratios, shown = LoadProcess(), list[float](), set[int]()
        pairs = [(clients, api) for clients in given.clients for api in modes]
        if given.api_processes is None:  # one process is measured once, for comparison: it is slow
            pairs = [(clients, api) for clients, api in pairs if api or clients == given.clients[0]]
        servers = [Server(path, clients, api, given) for clients, api in pairs]
        for server in servers:
            server.wait()
        print(f"servers ready after {time.perf_counter() - began:.0f} s", flush=True)
        head = (
            "clients | API processes | | tokens/s | of Engine | first token p50 | p95 | answer p50 | p95 | events/token"
            " | prefills | prompts each | passes each | ms prefilling | ms idle"
        )
        print(f"\n| {head} |\n|---:|---:|---|{'---:|' * 12}", flush=True)
        for server in servers:
            if server.rows not in shown:
                shown.add(server.rows)
                print(f"| {server.rows} | | `Engine` | {alone[server.rows]:,.0f} |{' |' * 11}", flush=True)
            found = measure(server, load, given, alone[server.rows], vocab)
            ratios += found if server.api or modes == [0] else []
            for line in (server.probe / "log.txt").read_text().splitlines():
                if "CUDA graphs, since" in line or "warming up" in line:
                    print(f"  {line}")
            server.stop()
            if given.profile:
                server.wait_for_end()
                for file in sorted(server.probe.glob("profile-*")):
                    print(f"{file.name}, {server.api} API processes\n{file.read_text()[:6000]}")
        load.close()
        for server in servers:
            server.wait_for_end()
            shutil.rmtree(server.probe, ignore_errors=True)
    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    what = "with API processes" if any(modes) else "in one process"
    print(f"\n{where}, torch {torch.__version__}; least ratio {what} {min(ratios):.2f} (required {REQUIRED}); ", end="")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
