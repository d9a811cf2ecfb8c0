"""How fast a model is, beside itself in fewer bits and beside other people's programs: each lives in a process of its
own that stands still while another has its turn, all do the same work, and the best turn of each counts.

A process is asked for a job by name and says how many seconds it took (`serve`); `Turns` asks all of them in turn.
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

from allyouneed.errors import UserError
from allyouneed.runtime.process import set_threads, worker_environment

READ = 512  # tokens of a prompt that is read at once
LOOKS = 12  # how often memory is read to know how fast that goes
Jobs = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Load:
    """What everybody is asked to do: rows of tokens in, `length` tokens out, so many rows at a time."""

    rows: tuple[int, ...] = (1, 8, 32)
    beam: int = 4
    length: int = 32
    given: list[list[int]] = field(default_factory=list)  # what is read, as many as the most rows
    long: list[int] = field(default_factory=list)  # a prompt that is read at once
    reads: bool = False  # a source, and writes something else
    unit: str = "tokens"  # what is counted: tokens that are written; of others texts, images, or windows of sound
    device: str = "cpu"
    threads: int = 1

    def work(self, job: str) -> int:
        """How many of what is counted a job makes."""
        if job == "reading":
            return len(self.long)
        count = int(job.rsplit(" ", 1)[1]) if " " in job else 1
        return count * self.length if self.writes and job != "first" else count

    @property
    def writes(self) -> bool:
        return self.unit == "tokens"


@dataclass(frozen=True)
class Peer:
    """`kind`: ours, hf or ctranslate2; `manner`: how its weights are kept; `folder`: what it loads."""

    kind: str
    manner: str
    folder: str

    @property
    def name(self) -> str:
        return {"ours": "", "hf": "transformers ", "ctranslate2": "CTranslate2 "}[self.kind] + self.manner


# --- in a peer's process ----------------------------------------------------------------------------------------------


def ours(peer: Peer, load: Load) -> tuple[Jobs, dict[str, float]]:
    import torch

    from allyouneed.infer.decoding.options import Decoding
    from allyouneed.infer.engine import Engine
    from allyouneed.infer.predictors.registry import predictor
    from allyouneed.infer.request import Request
    from allyouneed.infer.translation.frames import never_said
    from allyouneed.interop import load as folders
    from allyouneed.kernels.cpu import build as native
    from allyouneed.nn.models.precision import quantize
    from allyouneed.nn.models.weights import named_tensors, widen_half_for_cpu

    start = time.perf_counter()
    folder = folders.load(Path(peer.folder), load.device)
    loaded = time.perf_counter() - start
    model: Any = folder.model
    if peer.manner in ("int8", "bf16", "ternary"):
        model = folder.model = quantize(model, peer.manner)
    elif load.device == "cpu":
        widen_half_for_cpu(model)
    model.eval()
    if load.device == "cpu":
        native.wait_for_build()
    weights = {name: tensor.nbytes for name, tensor in named_tensors(model).items()}
    facts = {"load, s": loaded, "weights, MB": sum(weights.values()) / 1e6}
    if not load.writes:
        answer = reader(predictor(folder), load)
        return {f"{load.unit} {count}": partial(answer, count) for count in load.rows}, facts
    cost, size = model.config.cost(2 * load.length), next(model.parameters()).itemsize
    facts["state of a row, KB"] = (cost.state_per_token * 2 * load.length + cost.state_constant) * size / 1e3
    met = [
        bytes_
        for name, bytes_ in weights.items()
        if not name.startswith("encoder.") and (model.config.embed.tied or not name.startswith("embed."))
    ]
    facts["ceiling"] = 1 / seconds_to_read(sum(met), load.device)
    words = None if folder.vocabularies is None else folder.vocabularies.target
    begin = 1 if words is None else words.opening[0] if words.opening else words.bos
    eos, pad = (2, 0) if words is None else (words.eos, words.pad)
    limit = model.config.limit
    engine = Engine(model, begin, eos, pad, [] if words is None else never_said(words), limit, budget=10**9)

    def decode(count: int, beam: int, length: int) -> Any:
        way: dict[str, Any] = {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy"}
        decoding = Decoding(**way, min_length=length, max_length=length, loops=None)
        return (engine.generate if load.reads else engine.complete)(load.given[:count], decoding)

    @torch.inference_mode()
    def read() -> Any:
        long = load.long
        request = Request([begin], 1, (0,), long) if load.reads else Request(long, 1, (0,))
        return engine.prefill([request])[1].sum().item()

    return {"reading": read} | decoding_jobs(load, decode), facts


def reader(able: Any, load: Load) -> Callable[[int], Any]:
    """What so many texts, images or sounds of noise are asked for."""
    import torch

    dice, most = torch.Generator().manual_seed(0), max(load.rows)
    if load.unit == "windows":
        from allyouneed.data.media.sound import RATE

        sounds = [sound.numpy() for sound in torch.randn(most, round(able.speech.seconds * RATE), generator=dice) * 0.1]
        plain = {"beam": 1, "temperatures": (0.0,), "silence": None}
        language = next(iter(able.speech.languages), None)
        return lambda count: able.transcribe_full(sounds[:count], language, **plain)
    if load.unit == "images":
        patches = able.model.config.embed
        sides = [patches.image] * 2 if isinstance(patches.image, int) else list(patches.image)
        images = torch.randn(most, patches.channels, *sides, generator=dice)
        return lambda count: able.logits(pixels=images[:count])
    return lambda count: able.logits(tokens=load.given[:count])


def decoding_jobs(load: Load, decode: Callable[[int, int, int], Any]) -> Jobs:
    jobs: Jobs = {"first": partial(decode, 1, 1, 1)}
    for count in load.rows:
        jobs[f"greedy {count}"] = partial(decode, count, 1, load.length)
    for count in load.rows if load.reads and load.beam > 1 else ():
        jobs[f"beam {count}"] = partial(decode, count, load.beam, load.length)
    return jobs


def hf(peer: Peer, load: Load) -> tuple[Jobs, dict[str, float]]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = transformers.AutoModelForSeq2SeqLM if load.reads else transformers.AutoModelForCausalLM
    start = time.perf_counter()
    dtype = torch.bfloat16 if peer.manner == "bf16" else torch.float32
    model = made.from_pretrained(peer.folder, dtype=dtype, local_files_only=True).eval().to(load.device)
    facts = {"load, s": time.perf_counter() - start}
    facts["weights, MB"] = sum(p.nbytes for p in model.parameters()) / 1e6
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in load.given], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)).long() for row in load.given], batch_first=True)
    if not load.reads:  # prompts of unequal lengths end together
        rows, mask = (
            torch.stack([r.roll(int((m == 0).sum())) for r, m in zip(x, mask, strict=True)]) for x in (rows, mask)
        )
    rows, mask, long = rows.to(load.device), mask.to(load.device), torch.tensor([load.long]).to(load.device)

    @torch.inference_mode()
    def decode(count: int, beam: int, length: int) -> Any:
        forced = {"min_new_tokens": length, "max_new_tokens": length, "num_beams": beam, "do_sample": False}
        return model.generate(rows[:count], attention_mask=mask[:count], **forced).cpu()

    @torch.inference_mode()
    def read() -> Any:
        part = model.get_encoder() if load.reads else model
        return part(long)[0].sum().item()

    return {"reading": read} | decoding_jobs(load, decode), facts


def ctranslate2(peer: Peer, load: Load) -> tuple[Jobs, dict[str, float]]:
    import ctranslate2 as library

    from allyouneed.lab.selfcheck_ctranslate2 import _vocabulary

    options: dict[str, Any] = {"compute_type": peer.manner, "inter_threads": 1, "intra_threads": load.threads}
    start = time.perf_counter()
    model = (library.Translator if load.reads else library.Generator)(peer.folder, device=load.device, **options)
    facts = {"load, s": time.perf_counter() - start}
    given = _vocabulary(Path(peer.folder), "source" if load.reads else "target")(load.given)

    def decode(count: int, beam: int, length: int) -> Any:
        if load.reads:
            forced = {"max_decoding_length": length, "min_decoding_length": length}
            return model.translate_batch(given[:count], beam_size=beam, max_batch_size=0, **forced)
        forced = {"max_length": length, "min_length": length}
        return model.generate_batch(given[:count], beam_size=beam, include_prompt_in_result=False, **forced)

    return decoding_jobs(load, decode), facts


def seconds_to_read(size: int, device: str) -> float:
    """How long it takes to read so many bytes once."""
    import torch

    room = torch.zeros(max(1, size // 8), dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(LOOKS):
        start = time.perf_counter()
        room.sum().item()
        best = min(best, time.perf_counter() - start)
    return best


def serve() -> None:
    """A peer's process. In comes who it is and what the work is, then jobs by name; out come their names, then the
    seconds that each took."""
    tree = json.loads(sys.stdin.readline())
    peer, load = Peer(**tree["peer"]), Load(**tree["load"])
    try:
        if peer.kind != "ctranslate2":
            set_threads(load.threads)
        jobs, facts = {"ours": ours, "hf": hf, "ctranslate2": ctranslate2}[peer.kind](peer, load)
    except Exception as error:  # whatever it is, the one who asks has to say it
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        print(json.dumps({"error": said}), flush=True)
        return
    print(json.dumps({"jobs": list(jobs), "facts": facts}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        start = time.perf_counter()
        try:
            jobs[line.strip()]()
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            return
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


# --- who asks them ----------------------------------------------------------------------------------------------------


class Worker:
    """A peer's process, which stands still unless it is asked."""

    def __init__(self, peer: Peer, load: Load) -> None:
        self.peer = peer
        order = json.dumps({"peer": asdict(peer), "load": asdict(load)})
        program = "from allyouneed.lab.benchmark import serve; serve()"
        environment = worker_environment(load.threads)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            self._tell(order)
            told = self._hear()
        except BaseException:
            self.end()
            raise
        self.jobs: list[str] = told["jobs"]
        self.facts: dict[str, float] = told["facts"]
        self._stand("SIGSTOP")

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": f"its process ended with {self.process.wait()}"}
        if "error" in found:
            raise UserError(f"{self.peer.name}: cannot be measured: {found['error']}")
        return found

    def _stand(self, name: str) -> None:
        if hasattr(signal, name):
            self.process.send_signal(getattr(signal, name))

    def turn(self, job: str) -> float:
        self._stand("SIGCONT")
        self._tell(job)
        seconds: float = self._hear()["seconds"]
        self._stand("SIGSTOP")
        return seconds

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Turns:
    """Peers that do the same work in turn; `best`: seconds of the quickest turn, by peer and job."""

    workers: list[Worker]
    best: dict[tuple[str, str], float] = field(default_factory=dict)

    def take(self, turns: int) -> Iterator[str]:
        """Turn after turn; the first of each job only warms up. What comes is the job that was done."""
        jobs = list(dict.fromkeys(job for worker in self.workers for job in worker.jobs))
        for job in jobs:
            for turn in range(turns + 1):
                for worker in self.workers:
                    if job not in worker.jobs:
                        continue
                    seconds, key = worker.turn(job), (worker.peer.name, job)
                    if turn:
                        self.best[key] = min(seconds, self.best.get(key, seconds))
                yield job

    @property
    def count(self) -> int:
        """Of jobs."""
        return len({job for worker in self.workers for job in worker.jobs})

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


def loaded(folder: Any, rows: Sequence[int], beam: int, length: int, texts: Sequence[str] | None) -> Load:
    """Work for this folder: random tokens, or those of texts, as far as the model has places for them."""
    import torch

    from allyouneed.infer.predictors.forward import takes

    config: Any = folder.model.config
    able = takes(config)
    if config.kind != "two-towers" and ("features" in able or "pixels" in able) and "tokens" not in able:
        if texts is not None:
            raise UserError(f"{folder.path}: reads no texts; leave out --data")
        return Load(tuple(rows), unit="images" if "pixels" in able else "windows")
    if "tokens" not in able or config.kind == "two-towers" or config.vocabs is None:
        raise UserError(f"{folder.path}: reads both texts and images, which is not measured here")
    reads, words = config.kind == "encoder-decoder", folder.vocabularies
    special = set() if words is None else {*words.source.specials, *words.target.specials}
    known = [n for n in range(config.vocabs.source) if n not in special] or [0]
    places = min(limit for limit in (config.limit, getattr(config, "source_limit", None), 10**9) if limit is not None)
    length = max(1, min(length, places // 2 - 1))
    dice = torch.Generator().manual_seed(0)

    def random(count: int) -> list[int]:
        return [known[pick] for pick in torch.randint(len(known), (count,), generator=dice).tolist()]

    if texts is None:
        given = [random(length) for _ in range(max(rows))]
    elif words is None:
        raise UserError(f"{folder.path}: has no tokenizer, so it cannot read texts; leave out --data")
    else:
        encoded = [ids[: max(1, places // 2)] for ids in words.source.encode_batch(list(texts)) if ids]
        given = [encoded[n % len(encoded)] for n in range(max(rows))] if encoded else []
    if not given:
        raise UserError("there is no text to measure with; name another --data")
    long = random(max(1, min(READ, places - 1)))
    return Load(tuple(rows), beam, length, given, long, reads, "tokens" if config.generates else "texts")
