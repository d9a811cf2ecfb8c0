"""Tokens per second over HTTP and of `Engine` alone, on one GPU in the same run.

    python bench/serve_gpu.py                        # the shape of TinyLlama in bf16; 64, 256 and 512 clients
    python bench/serve_gpu.py --tiny --clients 8     # anywhere, to see that it runs
    python bench/serve_gpu.py --tiny --profile       # host time of the server by function

Random weights, 128 prompt tokens, 256 forced new ones, greedy. `Engine.decode` gets as many requests at once as there
are clients. Over HTTP each client sends its next request when it has the answer to the last one; whole answers and
streams are measured separately. The load generator (http_load.py) is a process of its own. Required: 0.85 of `Engine`.

A machine without network needs these wheels besides torch (its own CPU is Linux on x86-64 as well):

    pip download --python-version 3.12 --only-binary=:all: -c constraints.txt -d wheels \\
      fastapi uvicorn python-multipart prometheus-client jinja2 uvloop
    pip install --no-index --find-links wheels fastapi uvicorn python-multipart prometheus-client jinja2 uvloop

which bring annotated-doc, annotated-types, anyio, click, h11, idna, markupsafe, opentelemetry-api, pydantic,
pydantic-core, starlette, typing-extensions and typing-inspection. Where our own dependencies are missing as well, add
numpy, pyyaml, typer, rich, tokenizers, safetensors, sacrebleu, zstandard and (from its source archive)
opencc-python-reimplemented to both commands. uvloop is optional.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import torch

from allyouneed.config import override, parse
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.nn.models.base import Model
from decode_gpu import tree
from http_load import Call, Job, LoadProcess, Result, percentile
from serve import free_port

GIVEN, NEW, REQUIRED = 128, 256, 0.85
TINY = ["width=64", "decoder[0].repeat=2", "decoder[0].mixer.heads=4", "decoder[0].mixer.kv_heads=2"]
TINY += ["decoder[0].channel.hidden=128"]


def tokenizer_of(vocab: int) -> Any:
    """Of made-up words: detokenizing costs what it costs with a real one."""
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


def prompts(count: int, vocab: int) -> list[list[int]]:
    random = Random(1)
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
    def __init__(self, folder: Path, rows: int, device: str, profile: Path | None = None) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "allyouneed", "serve", f"llama={folder}", "--port", str(self.port)]
        command += ["--rows", str(rows), "--device", device]
        if profile is not None:
            command[1:3] = ["-c", PROFILED.format(str(profile))]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not self.ready():
            if self.process.poll() is not None:
                raise SystemExit(f"{' '.join(command)}: does not start")
            time.sleep(0.1)

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return int(answer.status) == 200
        except OSError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


PROFILED = """
import cProfile, pstats, sys, threading, time
from allyouneed.serve.engine import loop
profiles = [cProfile.Profile(time.thread_time), cProfile.Profile(time.thread_time)]
run = loop.EngineLoop._run
loop.EngineLoop._run = lambda self: profiles[0].runcall(run, self)
from allyouneed.cli import main
try:
    profiles[1].runcall(main, sys.argv[1:])
except SystemExit:
    pass
with open({!r}, "w") as file:
    for name, profile in zip(("engine loop", "event loop"), profiles):
        print(name, file=file)
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)
"""


def over_http(server: Server, load: LoadProcess, clients: int, rounds: int, vocab: int, stream: bool) -> Result:
    body = {"model": "llama", "max_tokens": NEW, "min_tokens": NEW, "temperature": 0, "stream": stream}
    calls = [Call("/v1/completions", body | {"prompt": one}) for one in prompts(clients, vocab)]
    result = load.run(Job(server.port, calls * rounds, clients=clients, drain=120))
    bad = [one.status for one in result.answers if one.status != 200]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(result.answers)} requests failed, status {bad[0]}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--profile", action="store_true", help="print the server's host time by function")
    given = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        path, profile = Path(scratch) / "model", Path(scratch) / "profile.txt"
        folder = build(given, path)
        vocab = folder.tokenizers.target.size
        print(f"model built and saved after {time.perf_counter() - began:.0f} s", flush=True)
        alone = {clients: engine_speed(folder, clients, given.rounds) for clients in given.clients}
        print(f"Engine measured after {time.perf_counter() - began:.0f} s", flush=True)
        del folder
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print("\n| clients | | tokens/s | of Engine | first token p50 | p95 | answer p50 | p95 | events/token |")
        print("|---:|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
        load, ratios = LoadProcess(), []
        for clients in given.clients:
            print(f"| {clients} | `Engine` | {alone[clients]:,.0f} | | | | | | |", flush=True)
            server = Server(path, clients, given.device, profile if given.profile else None)
            try:
                over_http(server, load, clients, 1, vocab, False)  # captures graphs
                for stream in (False, True):
                    result = over_http(server, load, clients, given.rounds, vocab, stream)
                    speed = len(result.answers) * NEW / result.seconds
                    first, end = result.latencies("first"), result.latencies("end")
                    events = sum(one.events for one in result.answers) / len(result.answers) / NEW
                    shown = f"{percentile(first, 0.5):.3f} s | {percentile(first, 0.95):.3f} s" if stream else "|"
                    ratios.append(speed / alone[clients])
                    print(
                        f"| | {'streams' if stream else 'whole answers'} | {speed:,.0f} | {ratios[-1]:.2f} | {shown} | "
                        f"{percentile(end, 0.5):.2f} s | {percentile(end, 0.95):.2f} s | "
                        f"{f'{events:.2f}' if stream else ''} |",
                        flush=True,
                    )
            finally:
                server.stop()
            if given.profile:
                print(profile.read_text())
        load.close()
    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"\n{where}, torch {torch.__version__}; least ratio {min(ratios):.2f} (required {REQUIRED}); ", end="")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
