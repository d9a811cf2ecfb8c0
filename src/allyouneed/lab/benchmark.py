"""Speed of a model, as stored, quantized, and in other libraries. Each contender runs in its own process, which is
stopped while another one is measured; all do the same work, and the best run of each counts.

A process runs jobs by name and reports their seconds (`serve`); `Turns` alternates between the processes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from allyouneed import plugins
from allyouneed.errors import UserError
from allyouneed.runtime.process import set_threads, worker_environment

PREFILL = 512  # tokens of the prefilled prompt
MEMORY_READS = 12  # runs to measure memory bandwidth
Jobs = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Workload:
    """The workload: token rows in, `length` tokens out, for each batch size in `rows`."""

    rows: tuple[int, ...] = (1, 8, 32)
    beam: int = 4
    length: int = 32
    given: list[list[int]] = field(default_factory=list)  # inputs, as many as the largest batch
    long: list[int] = field(default_factory=list)  # the prefilled prompt
    has_source: bool = False  # an encoder-decoder
    unit: str = "tokens"  # generated tokens, or texts, images, windows of audio
    device: str = "cpu"
    threads: int = 1

    def work(self, job: str) -> int:
        """How many units a job processes."""
        if job == "reading":
            return len(self.long)
        count = int(job.rsplit(" ", 1)[1]) if " " in job else 1
        return count * self.length if self.generates and job != "first" else count

    @property
    def generates(self) -> bool:
        return self.unit == "tokens"


@dataclass(frozen=True)
class Peer:
    """A contender. `kind`: ours, hf or ctranslate2; `precision`: of its weights; `folder`: what it loads."""

    kind: str
    precision: str
    folder: str

    @property
    def name(self) -> str:
        return {"ours": "", "hf": "transformers ", "ctranslate2": "CTranslate2 "}[self.kind] + self.precision


# --- in a contender's process -----------------------------------------------------------------------------------------


def ours(peer: Peer, workload: Workload) -> tuple[Jobs, dict[str, float]]:
    import torch

    from allyouneed.infer.decoding.options import Decoding
    from allyouneed.infer.engine import Engine
    from allyouneed.infer.frames import forbidden_tokens
    from allyouneed.infer.predictors.registry import predictor
    from allyouneed.infer.request import Request
    from allyouneed.interop.load import load as load_folder
    from allyouneed.kernels.cpu import build as native
    from allyouneed.nn.models.precision import STORED, quantize
    from allyouneed.nn.models.weights import named_tensors, widen_half_for_cpu

    start = time.perf_counter()
    folder = load_folder(Path(peer.folder), workload.device)
    seconds = time.perf_counter() - start
    model: Any = folder.model
    if peer.precision in STORED:
        model = folder.model = quantize(model, peer.precision)
    elif workload.device == "cpu":
        widen_half_for_cpu(model)
    model.eval()
    if workload.device == "cpu":
        native.wait_for_build()
    weights = {name: tensor.nbytes for name, tensor in named_tensors(model).items()}
    figures = {"load, s": seconds, "weights, MB": sum(weights.values()) / 1e6}
    if not workload.generates:
        call = reading_call(predictor(folder), workload)
        return {f"{workload.unit} {count}": partial(call, count) for count in workload.rows}, figures
    cost, size = model.config.cost(2 * workload.length), next(model.parameters()).itemsize
    figures["state of a row, KB"] = cost.state_bytes(2 * workload.length, size, workload.device == "cuda") / 1e3
    read_per_token = [
        size_in_bytes
        for name, size_in_bytes in weights.items()
        if not name.startswith("encoder.") and (model.config.embed.tied or not name.startswith("embed."))
    ]
    figures["ceiling"] = 1 / seconds_to_read(sum(read_per_token), workload.device)
    target = None if folder.vocabularies is None else folder.vocabularies.target
    begin = 1 if target is None else target.opening[0] if target.opening else target.bos
    eos, pad = (2, 0) if target is None else (target.eos, target.pad)
    limit = model.config.limit
    engine = Engine(model, begin, eos, pad, [] if target is None else forbidden_tokens(target), limit, budget=10**9)

    def decode(count: int, beam: int, length: int) -> Any:
        method: dict[str, Any] = {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy"}
        decoding = Decoding(**method, min_length=length, max_length=length, loops=None)
        return (engine.generate if workload.has_source else engine.complete)(workload.given[:count], decoding)

    @torch.inference_mode()
    def read() -> Any:
        long = workload.long
        request = Request([begin], 1, (0,), long) if workload.has_source else Request(long, 1, (0,))
        return engine.runner.prefill([request])[1].sum().item()

    return {"reading": read} | decoding_jobs(workload, decode), figures


def reading_call(model: Any, workload: Workload) -> Callable[[int], Any]:
    """A call of the predictor on `count` random texts, images or sounds."""
    import torch

    generator, most = torch.Generator().manual_seed(0), max(workload.rows)
    if workload.unit == "windows":
        from allyouneed.data.media.sound import RATE

        sounds = [
            sound.numpy() for sound in torch.randn(most, round(model.speech.seconds * RATE), generator=generator) * 0.1
        ]
        plain = {"beam": 1, "temperatures": (0.0,), "silence": None}
        language = next(iter(model.speech.languages), None)
        return lambda count: model.transcribe_full(sounds[:count], language, **plain)
    if workload.unit == "images":
        patches = model.model.config.embed
        sides = [patches.image] * 2 if isinstance(patches.image, int) else list(patches.image)
        images = torch.randn(most, patches.channels, *sides, generator=generator)
        return lambda count: model.logits(pixels=images[:count])
    return lambda count: model.logits(tokens=workload.given[:count])


def decoding_jobs(workload: Workload, decode: Callable[[int, int, int], Any]) -> Jobs:
    jobs: Jobs = {"first": partial(decode, 1, 1, 1)}
    for count in workload.rows:
        jobs[f"greedy {count}"] = partial(decode, count, 1, workload.length)
    for count in workload.rows if workload.has_source and workload.beam > 1 else ():
        jobs[f"beam {count}"] = partial(decode, count, workload.beam, workload.length)
    return jobs


def hf(peer: Peer, workload: Workload) -> tuple[Jobs, dict[str, float]]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto_class = transformers.AutoModelForSeq2SeqLM if workload.has_source else transformers.AutoModelForCausalLM
    start = time.perf_counter()
    dtype = torch.bfloat16 if peer.precision == "bf16" else torch.float32
    model = auto_class.from_pretrained(peer.folder, dtype=dtype, local_files_only=True).eval().to(workload.device)
    figures = {"load, s": time.perf_counter() - start}
    figures["weights, MB"] = sum(p.nbytes for p in model.parameters()) / 1e6
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in workload.given], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in workload.given], batch_first=True)
    if not workload.has_source:  # pad prompts on the left
        rows, mask = (
            torch.stack([r.roll(int((m == 0).sum())) for r, m in zip(x, mask, strict=True)]) for x in (rows, mask)
        )
    rows, mask, long = (
        rows.to(workload.device),
        mask.to(workload.device),
        torch.tensor([workload.long]).to(workload.device),
    )

    @torch.inference_mode()
    def decode(count: int, beam: int, length: int) -> Any:
        forced = {"min_new_tokens": length, "max_new_tokens": length, "num_beams": beam, "do_sample": False}
        return model.generate(rows[:count], attention_mask=mask[:count], **forced).cpu()

    @torch.inference_mode()
    def read() -> Any:
        part = model.get_encoder() if workload.has_source else model
        return part(long)[0].sum().item()

    return {"reading": read} | decoding_jobs(workload, decode), figures


def ctranslate2(peer: Peer, workload: Workload) -> tuple[Jobs, dict[str, float]]:
    import ctranslate2 as library

    from allyouneed.lab.selfcheck_ctranslate2 import ids_to_tokens

    options: dict[str, Any] = {"compute_type": peer.precision, "inter_threads": 1, "intra_threads": workload.threads}
    start = time.perf_counter()
    model = (library.Translator if workload.has_source else library.Generator)(
        peer.folder, device=workload.device, **options
    )
    figures = {"load, s": time.perf_counter() - start}
    given = ids_to_tokens(Path(peer.folder), "source" if workload.has_source else "target")(workload.given)

    def decode(count: int, beam: int, length: int) -> Any:
        if workload.has_source:
            forced = {"max_decoding_length": length, "min_decoding_length": length}
            return model.translate_batch(given[:count], beam_size=beam, max_batch_size=0, **forced)
        forced = {"max_length": length, "min_length": length}
        return model.generate_batch(given[:count], beam_size=beam, include_prompt_in_result=False, **forced)

    return decoding_jobs(workload, decode), figures


def seconds_to_read(size: int, device: str) -> float:
    """Seconds to read `size` bytes of memory once."""
    import torch

    buffer = torch.zeros(max(1, size // 8), dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(MEMORY_READS):
        start = time.perf_counter()
        buffer.sum().item()
        best = min(best, time.perf_counter() - start)
    return best


def serve() -> None:
    """The main loop of a contender's process: reads the peer and the workload as JSON, prints its job names, then reads
    job names and prints the seconds of each."""
    tree = json.loads(sys.stdin.readline())
    peer, workload = Peer(**tree["peer"]), Workload(**tree["workload"])
    try:
        plugins.load_all(tree["plugins"])
        if peer.kind != "ctranslate2":
            set_threads(workload.threads)
        jobs, figures = {"ours": ours, "hf": hf, "ctranslate2": ctranslate2}[peer.kind](peer, workload)
    except Exception as error:  # the parent reports it
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        print(json.dumps({"error": message}), flush=True)
        return
    print(json.dumps({"jobs": list(jobs), "figures": figures}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        start = time.perf_counter()
        try:
            jobs[line.strip()]()
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


# --- in the parent process --------------------------------------------------------------------------------------------


class PeerProcess:
    """A contender's process, stopped unless it runs a job."""

    def __init__(self, peer: Peer, workload: Workload) -> None:
        self.peer = peer
        request = json.dumps({"peer": asdict(peer), "workload": asdict(workload), "plugins": plugins.sources()})
        program = "from allyouneed.lab.benchmark import serve; serve()"
        environment = worker_environment(workload.threads)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            self._send(request)
            reply = self._receive()
        except BaseException:
            self.end()
            raise
        self.jobs: list[str] = reply["jobs"]
        self.figures: dict[str, float] = reply["figures"]
        self._signal("SIGSTOP")

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": f"its process exited with {self.process.wait()}"}
        if "error" in found:
            raise UserError(f"{self.peer.name}: cannot be measured: {found['error']}")
        return found

    def _signal(self, name: str) -> None:
        if hasattr(signal, name):
            self.process.send_signal(getattr(signal, name))

    def run(self, job: str) -> float:
        self._signal("SIGCONT")
        self._send(job)
        seconds: float = self._receive()["seconds"]
        self._signal("SIGSTOP")
        return seconds

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Turns:
    """Alternate between processes that do the same work; `best`: seconds of the fastest run, by peer and job."""

    workers: list[PeerProcess]
    best: dict[tuple[str, str], float] = field(default_factory=dict)

    def take(self, turns: int) -> Iterator[str]:
        """Run all jobs, yielding each after its round; the first round of a job is a warm-up."""
        jobs = list(dict.fromkeys(job for worker in self.workers for job in worker.jobs))
        for job in jobs:
            for turn in range(turns + 1):
                for worker in self.workers:
                    if job not in worker.jobs:
                        continue
                    seconds, key = worker.run(job), (worker.peer.name, job)
                    if turn:
                        self.best[key] = min(seconds, self.best.get(key, seconds))
                yield job

    @property
    def count(self) -> int:
        """Number of jobs."""
        return len({job for worker in self.workers for job in worker.jobs})

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


def make_workload(folder: Any, rows: Sequence[int], beam: int, length: int, texts: Sequence[str] | None) -> Workload:
    """The workload for this folder: random tokens, or those of texts, within the model's limits."""
    import torch

    from allyouneed.infer.predictors.forward import model_inputs

    config: Any = folder.model.config
    inputs = model_inputs(config)
    if config.kind != "two-towers" and ("features" in inputs or "pixels" in inputs) and "tokens" not in inputs:
        if texts is not None:
            raise UserError(f"{folder.path}: takes no text; remove --data")
        return Workload(tuple(rows), unit="images" if "pixels" in inputs else "windows")
    if "tokens" not in inputs or config.kind == "two-towers" or config.vocabs is None:
        raise UserError(f"{folder.path}: models of text and images are not supported")
    has_source, vocabs = config.kind == "encoder-decoder", folder.vocabularies
    special = set() if vocabs is None else {*vocabs.source.specials, *vocabs.target.specials}
    known = [n for n in range(config.vocabs.source) if n not in special] or [0]
    most_tokens = min(
        limit for limit in (config.limit, getattr(config, "source_limit", None), 10**9) if limit is not None
    )
    length = max(1, min(length, most_tokens // 2 - 1))
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> list[int]:
        return [known[pick] for pick in torch.randint(len(known), (count,), generator=generator).tolist()]

    if texts is None:
        given = [random(length) for _ in range(max(rows))]
    elif vocabs is None:
        raise UserError(f"{folder.path}: no tokenizer, so texts cannot be read; remove --data")
    else:
        encoded = [ids[: max(1, most_tokens // 2)] for ids in vocabs.source.encode_batch(list(texts)) if ids]
        given = [encoded[n % len(encoded)] for n in range(max(rows))] if encoded else []
    if not given:
        raise UserError("no text to measure with; pass another --data")
    long = random(max(1, min(PREFILL, most_tokens - 1)))
    return Workload(tuple(rows), beam, length, given, long, has_source, "tokens" if config.generates else "texts")
