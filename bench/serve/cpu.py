"""Translation over HTTP on a CPU: our server and peers under the same open-loop load, in turns.

    python bench/serve/cpu.py --quick                 # about two minutes
    python bench/serve/cpu.py --page docs/results/serving.md --picture docs/pictures/serving-load.svg
    python bench/serve/cpu.py --pairs pairs.tsv       # sentences from a file, first column, in English

Requests arrive at random (Poisson), whether or not earlier ones have been answered, so a server that is too slow gets
a queue. For each server a bisection finds the highest rate at which 95 % of the requests are answered within a second,
counted from the moment a request was due. The servers run one after the other at each turn of the bisection, all with
the bundled translator's weights, beam search of width 4, LibreTranslate's route and two cores; the load generator is
a process of its own (on other cores if there are any). Peers: peers.py. Sentences have 3 to 60 words.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from bench.serve.http_load import Call, Job, LoadProcess, Result, percentile

HERE = Path(__file__).parent
LIMIT = 1.0  # seconds for 95 % of the requests
CORES = 2
PEERS = ("ct2", "hf")  # the two that people run today; the ratio is to the better one
BATCHING = ("ct2-pool", "ct2-batched")
OURS = ("ours", "ours-workers")
NAMES = {
    "ours": "allyouneed serve",
    "ours-workers": "allyouneed serve --workers 2",
    "ct2": "CTranslate2 int8, one by one",
    "hf": "Hugging Face, one by one",
    "ct2-pool": "CTranslate2 int8, two workers",
    "ct2-batched": "CTranslate2 int8, dynamic batches",
}

WHO = (
    "I",
    "We",
    "They",
    "My brother",
    "The new teacher",
    "Our neighbours",
    "The doctor",
    "Her friends",
    "The children",
)
DID = ("saw", "found", "forgot", "bought", "lost", "wanted", "liked", "opened", "needed", "remembered")
WHAT = (
    "the book", "a red car", "the old house", "an interesting letter", "the keys", "two tickets", "a glass of water",
    "the answer", "some bread and cheese", "a small dog", "the wrong train", "a picture of the city",
)  # fmt: skip
WHEN = ("yesterday", "this morning", "last week", "in the evening", "before dinner", "on Monday", "after the concert")
WHERE = ("at the station", "in the garden", "near the river", "in a small shop", "at school", "behind the church")
LINKS = (", and", ", but", ", because", ", so", ", although", ", while", ", when", ", as")
SHORT = (
    "Come in.", "Thank you very much.", "Where is the station?", "I don't know.", "What time is it now?", "He is late.",
    "It is cold today.", "Can you help me?", "She speaks three languages.", "I am tired.", "That is a good idea.",
    "Please close the window.", "We need more time.", "How much does it cost?", "Tom is not here.", "I like music.",
)  # fmt: skip
SHARES = ((0.30, 1, 6), (0.45, 6, 12), (0.17, 13, 25), (0.08, 26, 60))  # share of requests, fewest and most words


def sentence(random: Random) -> str:
    """3 to 60 words, mostly short, as in Tatoeba."""
    least, most = random.choices([(least, most) for _, least, most in SHARES], [share for share, *_ in SHARES])[0]
    if most <= 6:
        return random.choice(SHORT)
    words = random.randint(least, most)
    text = ""
    while len(text.split()) < words:
        clause = [random.choice(WHO), random.choice(DID), random.choice(WHAT)]
        clause += random.sample([random.choice(WHEN), random.choice(WHERE)], random.randint(0, 2))
        joined = " ".join(clause)
        if text:
            joined = joined if joined.startswith("I ") else joined[0].lower() + joined[1:]
            text += f"{random.choice(LINKS)} {joined}"
        else:
            text = joined
    return " ".join(text.split()[:60]) + "."


def calls(texts: Sequence[str], rate: float, seconds: float, seed: int) -> list[Call]:
    """Poisson arrivals: exponential gaps."""
    random, at, found = Random(seed), 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        body = {"q": random.choice(texts), "source": "en", "target": random.choice(("de", "fr", "zh"))}
        found.append(Call("/translate", body, at))
    return found


@dataclass
class Point:
    """Measured at one offered rate."""

    rate: float
    answered: float  # requests per second
    tokens: float  # output tokens per second
    p50: float
    p95: float
    p99: float
    cpu: float  # seconds of processor time per request
    held: bool  # the latency limit


@dataclass
class Server:
    name: str
    command: list[str]
    port: int
    points: list[Point] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    low: float = 0.0
    high: float = math.inf
    guess: float = 1.0

    def start(self, cores: Sequence[int]) -> float:
        """Seconds until the first answer."""
        began = time.perf_counter()
        # sleeping threads: on two cores that others use as well, spinning ones slow all processes down
        environment = os.environ | {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL, env=environment)
        os.sched_setaffinity(self.process.pid, cores)
        while True:
            try:
                self.ask("Good morning.")
                return time.perf_counter() - began
            except OSError:
                if self.process.poll() is not None or time.perf_counter() - began > 120:
                    raise SystemExit(f"{' '.join(self.command)}: does not start") from None
                time.sleep(0.05)

    def ask(self, text: str) -> str:
        body = json.dumps({"q": text, "source": "en", "target": "de"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/translate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["translatedText"])

    def processes(self) -> list[int]:
        """The process and its children."""
        assert self.process is not None
        found = [self.process.pid]
        for pid in found:
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    def memory(self) -> int:
        """The most bytes so far, of all processes."""
        lines = [line for pid in self.processes() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        rests = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self.processes()]
        return sum(int(rest[11]) + int(rest[12]) for rest in rests) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()

    @property
    def best(self) -> Point | None:
        """At the highest rate that held."""
        return max((one for one in self.points if one.held), key=lambda one: one.rate, default=None)

    def next_rate(self) -> float:
        if self.high is math.inf:
            return self.guess if not self.low else self.low * 1.6
        return self.high / 1.6 if not self.low else math.sqrt(self.low * self.high)


class Counter:
    """Output tokens, counted alike for all servers."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self.words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def __call__(self, result: Result) -> int:
        texts = [json.loads(one.body)["translatedText"] for one in result.answers if one.status == 200]
        return sum(len(one) for one in self.words.encode_batch(texts, add_special_tokens=False))


def measure(
    server: Server, load: LoadProcess, texts: Sequence[str], rate: float, seconds: float, count: Counter, seed: int
) -> Point:
    warm = 0.15 * seconds
    arrivals = calls(texts, rate, seconds + warm, seed)
    give_up = max(20, int(3 * rate))  # three seconds behind: this rate is missed
    before = server.cpu()
    result = load.run(Job(server.port, arrivals, give_up=give_up, keep=True, drain=20))
    cpu = (server.cpu() - before) / max(1, len(result.answers))
    skip = sum(call.at < warm for call in arrivals[: len(result.answers)])
    ordered = result.latencies(skip=skip)
    good = sum(one.status == 200 for one in result.answers)
    p95 = math.inf if result.gave_up else percentile(ordered, 0.95)
    return Point(
        rate, good / result.seconds, count(result) / result.seconds, percentile(ordered, 0.5), p95,
        percentile(ordered, 0.99), cpu, p95 <= LIMIT,
    )  # fmt: skip


def search(
    servers: Sequence[Server], load: LoadProcess, texts: Sequence[str], given: argparse.Namespace, count: Counter
) -> None:
    """Bisection of each, in turns."""
    for turn in range(given.turns):
        for server in servers:
            rate = server.next_rate()
            point = measure(server, load, texts, rate, given.seconds, count, seed=turn)
            if not point.held and not given.quick:
                again = measure(
                    server, load, texts, rate, given.seconds, count, seed=turn
                )  # another process may have been in the way
                point = min(point, again, key=lambda one: one.p95)
            server.points.append(point)
            if point.held:
                server.low = max(server.low, rate)
            else:
                server.high = min(server.high, rate)
            print(
                f"  {server.name:12} {rate:7.2f}/s  p50 {point.p50:6.3f}  p95 {point.p95:6.3f}  p99 {point.p99:6.3f}"
                f"  {1000 * point.cpu:5.1f} ms of processor time  {'held' if point.held else 'missed'}",
                flush=True,
            )


def first_tokens(server: Server, load: LoadProcess, texts: Sequence[str], rate: float, seconds: float) -> list[float]:
    """Seconds until the first token of streams at this rate, greedy: a beam search has none before its end."""
    found = calls(texts, rate, seconds, seed=99)
    for call in found:
        call.path = "/v1/completions"
        call.body = {
            "prompt": call.body["q"], "target_lang": call.body["target"], "source_lang": "en", "stream": True,
            "temperature": 0, "max_tokens": 90,
        }  # fmt: skip
    return load.run(Job(server.port, found)).latencies("first")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def export(folder: Path, to: str) -> Path:
    out = folder / to
    if not out.exists():
        command = [sys.executable, "-m", "allyouneed", "export", "translator", str(out), "--to", to, "--no-check"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return out


def table(servers: Sequence[Server], started: dict[str, float], ttft: Sequence[float]) -> str:
    lines = [
        f"| server | requests/s at p95 < {LIMIT:g} s | tokens/s | p50 | p95 | p99 | CPU time per request | start | "
        "peak memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for server in servers:
        best = server.best
        shown = "- | - | - | - | - | -"
        if best is not None:
            shown = f"{best.rate:.1f} | {best.tokens:,.0f} | {best.p50:.2f} s | {best.p95:.2f} s | {best.p99:.2f} s"
            shown += f" | {1000 * best.cpu:.0f} ms"
        lines.append(
            f"| {NAMES[server.name]} | {shown} | {started[server.name]:.1f} s | {server.memory() / 2**20:,.0f} MiB |"
        )
    by_name = {server.name: server.best.rate for server in servers if server.best is not None}
    for what, names in (("better peer", PEERS), ("better peer with parallel or batched requests", BATCHING)):
        rates = [by_name[name] for name in names if name in by_name]
        for own in OURS if rates else ():
            if own in by_name:
                lines += ["", f"`{NAMES[own]}` to the {what}: **{by_name[own] / max(rates):.2f}**."]
    if ttft:
        shown = ", ".join(f"p{round(100 * q)} {percentile(ttft, q) * 1000:.0f} ms" for q in (0.5, 0.95, 0.99))
        lines += ["", f"First token of ours, streaming at half its rate: {shown}."]
    return "\n".join(lines)


def draw(servers: Sequence[Server], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "allyouneed"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for server in servers:
        points = sorted((one for one in server.points if math.isfinite(one.p95)), key=lambda one: one.rate)
        (line,) = axes.plot([p.rate for p in points], [p.p95 for p in points], "o-", ms=4, label=NAMES[server.name])
        axes.plot([p.rate for p in points], [p.p50 for p in points], "--", lw=1, color=line.get_color())
    axes.axhline(LIMIT, color="grey", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="offered requests per second", ylabel="seconds; p95 solid, p50 dashed")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter and fewer turns, without the batching peers")
    parser.add_argument("--servers", help=f"some of {', '.join(NAMES)}, separated by commas")
    parser.add_argument("--turns", type=int, help="of the bisection")
    parser.add_argument("--seconds", type=float, help="of a measurement")
    parser.add_argument("--pairs", type=Path, help="tab-separated; English sentences in the first column")
    parser.add_argument("--exports", type=Path, help="folder for the exported models, to reuse them")
    parser.add_argument("--page", type=Path, help="write the table into this file, between its `load` marks")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    given.turns = given.turns or (4 if given.quick else 8)
    given.seconds = given.seconds or (5.0 if given.quick else 12.0)
    names = given.servers.split(",") if given.servers else ["ours", *PEERS] if given.quick else list(NAMES)
    random = Random(0)
    texts = [sentence(random) for _ in range(2000)]
    if given.pairs is not None:
        texts = [line.split("\t")[0] for line in given.pairs.read_text(encoding="utf-8").splitlines() if line]
    cores = sorted(os.sched_getaffinity(0))
    own, other = cores[:CORES], cores[CORES:] or cores
    with tempfile.TemporaryDirectory() as scratch:
        exports = given.exports or Path(scratch)
        folders = {"ct2": export(exports, "ctranslate2"), "hf": export(exports, "hf")}
        servers = []
        for name in names:
            port = free_port()
            if name in OURS:
                command = ["-m", "allyouneed", "serve", "--port", str(port), "--rows", "128"]
                command += ["--workers", str(CORES)] if name == "ours-workers" else []
            else:
                folder = folders[name.partition("-")[0]]
                command = [str(HERE / "peers.py"), name, str(folder), "--port", str(port)]
            guess = {"ours": 30.0, "ours-workers": 40.0, "hf": 3.0, "ct2": 10.0}.get(name, 16.0)
            servers.append(Server(name, [sys.executable, *command], port, guess=guess))
        load, count = LoadProcess(other), Counter(folders["hf"])
        try:
            started = {server.name: server.start(own) for server in servers}
            answers = {server.name: [server.ask(text) for text in texts[:40]] for server in servers}
            for name, found in answers.items():
                same = statistics.mean(a == b for a, b in zip(found, answers[names[0]], strict=True))
                print(f"  {name:12} ready after {started[name]:.1f} s, {same:.0%} of 40 answers as {names[0]}")
            search(servers, load, texts, given, count)
            ttft: list[float] = []
            if servers[0].name == "ours" and servers[0].best is not None:
                ttft = first_tokens(servers[0], load, texts, servers[0].best.rate / 2, given.seconds)
            shown = table(servers, started, ttft)
        finally:
            load.close()
            for server in servers:
                server.stop()
    packages = ("torch", "ctranslate2", "transformers", "fastapi", "uvicorn")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    shown += f"\n\n{CORES} cores, {platform.machine()}; Python {platform.python_version()}, {versions}."
    print(f"\n{shown}")
    if given.picture is not None:
        draw(servers, given.picture)
    if given.page is not None:
        text = given.page.read_text(encoding="utf-8")
        before, mark, rest = text.partition("<!-- load -->\n")
        _, end, after = rest.partition("<!-- end of load -->")
        given.page.write_text(f"{before}{mark}{shown}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
