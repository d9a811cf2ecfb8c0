"""Soak test of `allyouneed serve`: many clients, some leaving or killed; then SIGTERM under load.

    python bench/serve/soak.py                          # 200 clients, 2 minutes
    python bench/serve/soak.py --write                  # and write the section "Soak" of docs/results/serving.md
    python bench/serve/soak.py --clients 12 --seconds 10

The server has the bundled translator and a tiny language model with random weights. Every request is one of a list of
cases on several routes, with the answer that it got alone, before the load. One request in ten is abandoned midway; one
process of clients is killed with SIGKILL halfway. Afterwards nothing may be running or waiting, no block and no file
descriptor be in use that was not before, and memory must not have grown since the first quarter. At last every client
starts a stream, and once all streams have begun the server gets SIGTERM: each must still end with the right answer,
and new requests must be refused. The exit status is 1 if anything of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

PAGE = Path(__file__).parents[2] / "docs" / "results" / "serving.md"
CHINESE = ["你好，世界。", "今天天气很好，我们去公园散步吧。", "这本书是谁写的？", "他在北京工作了三年。"]
ENGLISH = ["The cat sat on the mat.", "Where is the railway station?", "We will meet again tomorrow morning."]
START = "The quick brown fox jumps over the lazy dog, and then the dog "
LEAVING = 0.1  # of the requests
KILLED = 0.05  # of the clients: in the process that is killed
GROWTH = 1.05  # of the memory between the first quarter and the end

INTRODUCTION = """\
`python bench/serve/soak.py --write`: the bundled translator and a tiny language model, mixed routes (`/translate`,
`/v1/completions` greedy, sampled, `n`, streamed, exact; `/tokenize`, `/detect`), on 2 CPU cores that other jobs used as
well.
"""


@dataclass(frozen=True)
class Case:
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def cases() -> list[Case]:
    found = [Case("/translate", {"q": text, "source": "zh", "target": "en"}) for text in CHINESE]
    found += [Case("/translate", {"q": [text, CHINESE[0]], "source": "auto", "target": "en"}) for text in CHINESE]
    found += [Case("/translate", {"q": text, "source": "en", "target": "zh"}) for text in ENGLISH]
    completion = {"model": "tiny", "max_tokens": 24, "temperature": 0}
    for number, end in enumerate(("", "sleeps", "runs away", "barks")):
        text = START + end
        found.append(Case("/v1/completions", completion | {"prompt": text}))
        found.append(Case("/v1/completions", completion | {"prompt": text, "stream": True}))
        sample = {"temperature": 1, "seed": number, "n": 3}
        found.append(Case("/v1/completions", completion | sample | {"prompt": text}))
        found.append(Case("/v1/completions", completion | sample | {"prompt": text, "exact": True, "logprobs": 2}))
        found.append(Case("/v1/completions", {"model": "translator", "prompt": CHINESE[number], "stream": True}))
    found.append(Case("/tokenize", {"model": "tiny", "prompt": START}))
    found.append(Case("/detect", {"q": ENGLISH[0]}))
    return found


STREAM = Case(
    "/v1/completions", {"model": "tiny", "prompt": START, "max_tokens": 200, "temperature": 0, "stream": True}
)


def write_tiny_model(folder: Path) -> None:
    """A language model with random weights, and a tokenizer trained on the texts above."""
    import torch

    import allyouneed as ayn
    from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
    from allyouneed.folder import Folder

    tokenizer = train(TokenizerConfig(vocab=400), [START, *ENGLISH] * 4)
    layer = {
        "repeat": 2,
        "mixer": {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "rotary"},
        "channel": {"kind": "ffn", "hidden": 128},
    }
    torch.manual_seed(0)
    model = ayn.build({"kind": "decoder", "vocab": tokenizer.size, "width": 64, "decoder": [layer]})
    with torch.no_grad():  # decisive: no two tokens are nearly equal
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
    both = Vocabularies(tokenizer, tokenizer)
    Folder(model.eval(), both, {"kind": "causal-lm"}, {}, max_tokens=512).save(folder)


class Server:
    """The server process."""

    def __init__(self, folder: Path, workers: int) -> None:
        from allyouneed.models import shipped

        command = [sys.executable, "-m", "allyouneed", "serve", f"translator={shipped()}", f"tiny={folder}"]
        command += ["--port", "0", "--device", "cpu", "--workers", str(workers)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = self.process.stderr.readline().split()[3]
        self.errors: list[str] = []
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.errors += [line for line in self.process.stderr if "Error" in line or "Traceback" in line]

    @property
    def pids(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in self.pids)

    @property
    def descriptors(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)

    def metric(self, name: str) -> float:
        lines = httpx.get(self.url + "/metrics", timeout=60).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def wait_until_ready(self) -> None:
        while httpx.get(self.url + "/readyz", timeout=60).status_code != 200:
            time.sleep(0.1)


def answer_of(case: Case, text: str) -> Any:
    """What must be the same every time."""
    if not case.streams:
        found = json.loads(text)
        return found.get("choices", found) if isinstance(found, dict) else found
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if not parts or "data: [DONE]" not in text or any("error" in part for part in parts):
        return f"incomplete stream of {len(parts)} events"
    return "".join(choice["text"] for part in parts for choice in part["choices"])


@dataclass
class Load:
    """Clients of one process, until `seconds` are over."""

    url: str
    answers: dict[int, Any]
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, clients: int, seed: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as http:
            await asyncio.gather(*(self._client(http, Random(seed * 10_000 + n)) for n in range(clients)))

    async def _client(self, http: httpx.AsyncClient, dice: Random) -> None:
        known, end = cases(), time.monotonic() + self.seconds
        while time.monotonic() < end:
            number = dice.randrange(len(known))
            if dice.random() < LEAVING:
                await self._leave(http, known[number], dice)
                continue
            try:
                answer = await http.post(known[number].path, json=known[number].body)
            except httpx.HTTPError as error:
                self.counts["no answer"] += 1
                self.wrong.append(f"{known[number].path}: {error!r}")
                continue
            if answer.status_code == 429:
                self.counts["429"] += 1
                await asyncio.sleep(float(answer.headers["retry-after"]))
            elif answer.status_code != 200:
                self.counts["wrong"] += 1
                self.wrong.append(f"{known[number].path}: status {answer.status_code}: {answer.text[:200]}")
            elif (found := answer_of(known[number], answer.text)) != self.answers[number]:
                self.counts["wrong"] += 1
                self.wrong.append(f"{known[number].body}: {found} instead of {self.answers[number]}")
            else:
                self.counts["right"] += 1

    async def _leave(self, http: httpx.AsyncClient, case: Case, dice: Random) -> None:
        """Disconnect after some milliseconds, or in the middle of a stream."""
        try:
            async with asyncio.timeout(dice.uniform(0.001, 0.3)), http.stream("POST", case.path, json=case.body) as one:
                async for _ in one.aiter_lines():
                    break
        except (TimeoutError, httpx.HTTPError):
            pass
        self.counts["left"] += 1


async def ask_alone(url: str) -> dict[int, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        found = {}
        for number, case in enumerate(cases()):
            answer = await http.post(case.path, json=case.body)
            assert answer.status_code == 200, (case, answer.text)
            found[number] = answer_of(case, answer.text)
        return found


@dataclass
class Stop:
    """What became of the streams that had begun before SIGTERM, and of requests after it."""

    begun: int = 0
    lost: int = 0
    refused: int = 0
    answered_late: int = 0


async def stop_under_load(server: Server, clients: int) -> Stop:
    found, begun = Stop(), asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        alone = await http.post(STREAM.path, json=STREAM.body)
        expected = answer_of(STREAM, alone.text)

        async def stream() -> bool:
            lines = []
            try:
                async with http.stream("POST", STREAM.path, json=STREAM.body) as answer:
                    async for line in answer.aiter_lines():
                        lines.append(line)
                        if len(lines) == 1:
                            begun.release()
            except httpx.HTTPError:
                pass
            return answer_of(STREAM, "\n".join(lines)) == expected

        streams = [asyncio.create_task(stream()) for _ in range(clients)]
        for _ in streams:
            await begun.acquire()
        found.begun = len(streams)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        while server.process.poll() is None and not all(one.done() for one in streams):
            try:
                late = await http.post(STREAM.path, json=STREAM.body | {"stream": False, "max_tokens": 1})
                found.refused += late.status_code == 503
                found.answered_late += late.status_code != 503
            except httpx.TransportError:
                found.refused += 1
            await asyncio.sleep(0.05)
        found.lost = [await one for one in streams].count(False)
    return found


@dataclass
class Watch:
    """Memory of the server, every half second."""

    server: Server
    memory: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.memory.append(self.server.memory)

    @property
    def early(self) -> int:
        """The most in the second eighth of the time: all models are loaded, and batches were full."""
        count = len(self.memory)
        return max(self.memory[count // 8 : count // 4 + 1])

    @property
    def late(self) -> int:
        return max(self.memory[-(len(self.memory) // 8 + 1) :])


def run_clients(arguments: argparse.Namespace) -> None:
    """The process of clients that is killed."""
    answers = {int(number): answer for number, answer in json.load(sys.stdin).items()}
    asyncio.run(Load(arguments.url, answers, arguments.seconds).run(arguments.clients, seed=1))


def soak(clients: int, seconds: float, workers: int) -> tuple[list[tuple[str, Any]], bool]:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "tiny")
        server = Server(Path(folder) / "tiny", workers)
        try:
            return _soak(server, clients, seconds, workers)
        finally:
            if server.process.poll() is None:
                server.process.kill()


def _soak(server: Server, clients: int, seconds: float, workers: int) -> tuple[list[tuple[str, Any]], bool]:
    server.wait_until_ready()
    answers = asyncio.run(ask_alone(server.url))
    for _ in range(4 * workers if workers > 1 else 0):  # connections to all workers: each has loaded the models
        assert asyncio.run(ask_alone(server.url)) == answers
    descriptors, start = server.descriptors, time.monotonic()
    watch = Watch(server)
    thread = threading.Thread(target=watch.run)
    thread.start()
    doomed_clients = max(1, round(clients * KILLED))
    command = [sys.executable, __file__, "--url", server.url, "--clients", str(doomed_clients)]
    doomed = subprocess.Popen([*command, "--seconds", str(seconds)], stdin=subprocess.PIPE, text=True)
    assert doomed.stdin is not None
    doomed.stdin.write(json.dumps(answers))
    doomed.stdin.close()
    timer = threading.Timer(seconds / 2, doomed.kill)
    timer.start()
    load = Load(server.url, answers, seconds)
    asyncio.run(load.run(clients - doomed_clients, seed=0))
    wall = time.monotonic() - start
    doomed.wait()
    end = time.monotonic() + 30
    busy = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        'allyouneed:kv_cache_blocks{model_name="tiny",state="used"',
    )
    while (left := {name: server.metric(name) for name in busy}) and any(left.values()) and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(0.5)
    watch.over.set()
    thread.join()
    leaked = max(0, server.descriptors - descriptors)
    steps = server.metric("vllm:generation_tokens_total")
    hits = server.metric("vllm:prefix_cache_hits_total") / max(1, server.metric("vllm:prefix_cache_queries_total"))
    stop = asyncio.run(stop_under_load(server, clients))
    status = server.process.wait(120)
    for line in load.wrong[:10]:
        print(line, file=sys.stderr)
    for line in server.errors[:10]:
        print("server:", line.rstrip(), file=sys.stderr)
    counts = load.counts
    table = [
        ("clients, of which killed with SIGKILL", f"{clients}, {doomed_clients}"),
        ("seconds", f"{wall:.0f}"),
        ("answers compared with the one alone", f"{counts['right'] + counts['wrong']:,}"),
        ("wrong answers", counts["wrong"]),
        ("requests without an answer", counts["no answer"]),
        ("requests abandoned midway", f"{counts['left']:,}"),
        ("status 429", counts["429"]),
        ("tokens generated", f"{steps:,.0f}"),
        ("prompt tokens found in the prefix cache", f"{hits:.0%}"),
        ("sequences left running or waiting", f"{left[busy[0]] + left[busy[1]]:.0f}"),
        ("blocks left in use", f"{left[busy[2]]:.0f}"),
        ("file descriptors left open", leaked),
        (
            "memory after an eighth of the time, at the end",
            f"{watch.early / 2**20:.0f} MiB, {watch.late / 2**20:.0f} MiB",
        ),
        ("errors in the server's log", len(server.errors)),
        ("SIGTERM: streams begun before it", stop.begun),
        ("SIGTERM: of these lost or wrong", stop.lost),
        ("SIGTERM: new requests refused, answered", f"{stop.refused}, {stop.answered_late}"),
        ("SIGTERM: exit status", status),
    ]
    nothing = (counts["wrong"], counts["no answer"], *left.values(), leaked, len(server.errors), stop.lost, status)
    return table, not any(nothing) and not stop.answered_late and watch.late <= GROWTH * watch.early


def write_section(table: list[tuple[str, Any]]) -> None:
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Serving\n"
    text = re.sub(r"\n## Soak\n.*?(?=\n## |\Z)", "", text, flags=re.S).rstrip() + "\n"
    lines = "\n".join(f"| {name} | {value} |" for name, value in table)
    PAGE.write_text(f"{text}\n## Soak\n\n{INTRODUCTION}\n| | |\n|---|---|\n{lines}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.url:
        run_clients(chosen)
        return
    table, passed = soak(chosen.clients, chosen.seconds, chosen.workers)
    for name, value in table:
        print(f"{name:48} {value}")
    if chosen.write:
        write_section(table)
    if not passed:
        raise SystemExit("failed")


if __name__ == "__main__":
    main()
