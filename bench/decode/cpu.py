"""Decoding on CPU: tokens per second of ours (int8), CTranslate2 (int8) and Hugging Face (bf16).

    python bench/decode/cpu.py                      # all jobs, a table in markdown at the end
    python bench/decode/cpu.py base-b1 small-b32    # some of them
    python bench/decode/cpu.py --page docs/results/decode-cpu.md
    python bench/decode/cpu.py base-b32 base-b1-beam4 base-b32-beam4 --busy --peers ours,ctranslate2

The same sizes with random weights, 32 tokens in, 32 forced tokens out, two threads. CTranslate2 runs with one thread,
with two active ones (OMP_WAIT_POLICY) and with two passive ones, since its best setting varies; its fastest counts.
"torch" is ours without the native CPU executor, as on a machine without a compiler (kernels/cpu/build.py).
Each peer runs in its own process, which is stopped (SIGSTOP) while another one runs; the best run of each counts, and
the load of the machine is printed, since other processes slow all peers down. `--processor` is for a shared machine:
one thread each, and processor time instead of wall-clock time. `--busy`: another process keeps one core busy all the
time, and the median turn counts, since the best one may have had both cores for itself. Models are converted in yet
another process, since conversion leaves threads behind.

`--isa`: all peers are held to an instruction set (CT2_FORCE_CPU_ISA and the like, see PEERS_SETS).

The ceiling: a token needs every weight of the decoder read once for all rows, at the measured memory bandwidth, and
multiplied at the measured speed of the best int8 matrix product; both are measured in a separate process with as many
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = 32
# what holds each peer to an instruction set: ours, CTranslate2 with the libraries of its products, torch
PEERS_SETS = {
    "sse2": ("GENERIC", "SSE41", "SSE4_2", "default"),
    "avx2": ("AVX2", "AVX2", "AVX2", "avx2"),
    "avx-vnni": ("AVX2", "AVX2_VNNI", "AVX2_E1", "avx2"),
    "avx512": ("AVX512", "AVX512_CORE", "AVX512", "avx512"),
    "avx512-vnni": ("AVX512", "AVX512_CORE_VNNI", "AVX512_E1", "avx512"),
}
SET_VARIABLES = ("CT2_FORCE_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))  # of a peer's process
NAMES = {"ours": "ours int8", "torch": "ours int8, torch", "ctranslate2": "CTranslate2 int8", "hf": "HF bf16"}
TURN = 0.4  # seconds, about, before the next peer runs


class Shape(NamedTuple):
    width: int
    encoder: int
    decoder: int
    heads: int
    hidden: int
    vocab: int


SHAPES = {
    "base": Shape(512, 6, 6, 8, 2048, 32000),
    "small": Shape(256, 6, 2, 4, 1024, 16000),
    "gpt2": Shape(768, 0, 12, 12, 3072, 50257),
}


class Job(NamedTuple):
    """`target`: required ratio ours / CTranslate2; `hf`: required ratio ours / HF, measured only where set."""

    shape: str
    rows: int
    beam: int
    target: float
    hf: float | None = None


JOBS = {
    "base-b1": Job("base", 1, 1, 1.2, 3.0),
    "base-b32": Job("base", 32, 1, 1.0),
    "small-b1": Job("small", 1, 1, 0.7),
    "small-b32": Job("small", 32, 1, 0.8),
    "gpt2-b1": Job("gpt2", 1, 1, 1.2, 1.0),
    "base-b1-beam4": Job("base", 1, 4, 1.0, 1.0),
    "base-b32-beam4": Job("base", 32, 4, 1.0),
}


# --- models -----------------------------------------------------------------------------------------------------------


def tree(shape: Shape) -> dict[str, Any]:
    from allyouneed.config import override, preset_tree

    if not shape.encoder:
        return preset_tree("gpt2")
    sizes = [f"vocab={shape.vocab}", f"width={shape.width}"]
    for side, count in (("encoder", shape.encoder), ("decoder", shape.decoder)):
        for part in ("mixer",) if side == "encoder" else ("mixer", "cross"):
            sizes.append(f"{side}[0].{part}.heads={shape.heads}")
        sizes += [f"{side}[0].repeat={count}", f"{side}[0].channel.hidden={shape.hidden}"]
    return override(preset_tree("transformer-base"), sizes)


def write(name: str, out: Path) -> None:
    """Random weights for ours, and the CTranslate2 folder made from them."""
    import torch
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Inner

    from allyouneed.config import parse
    from allyouneed.data.tokenizers.base import BOS, EOS, PAD, Tokenizer, Vocabularies
    from allyouneed.folder import Folder
    from allyouneed.interop.ctranslate2.write import write as write_ctranslate2
    from allyouneed.nn.models.base import Model

    torch.manual_seed(0)
    shape = SHAPES[name]
    model = parse(Model, tree(shape)).build().eval()  # type: ignore[type-abstract]
    words = {PAD: 0, BOS: 1, EOS: 2, **{f"t{n}": n for n in range(3, shape.vocab)}}
    inner = Inner(models.WordLevel(words, unk_token="t3"))
    inner.add_special_tokens([AddedToken(word, special=True) for word in (PAD, BOS, EOS)])
    tokenizer = Tokenizer(inner)
    kind = "translation" if shape.encoder else "causal-lm"
    folder = Folder(model, Vocabularies(tokenizer, tokenizer), {"kind": kind})
    (out / "ctranslate2").mkdir(parents=True)
    write_ctranslate2(folder, out / "ctranslate2")
    torch.save(model.state_dict(), out / "weights.pt")


def prompts(shape: Shape, rows: int) -> list[list[int]]:
    from random import Random

    random = Random(0)
    return [[random.randrange(3, shape.vocab) for _ in range(LENGTH)] for _ in range(rows)]


# --- peers: each gives a function that decodes all rows once ----------------------------------------------------------


def ours(folder: Path, name: str, rows: int, beam: int) -> Callable[[], Any]:
    import torch

    from allyouneed.config import parse
    from allyouneed.infer.decoding.options import Decoding
    from allyouneed.infer.engine import Engine
    from allyouneed.kernels.cpu import build as native
    from allyouneed.nn.models.base import Model
    from allyouneed.nn.models.precision import to_int8

    torch.set_num_threads(THREADS)
    native.wait_for_build()
    shape = SHAPES[name]
    model = parse(Model, tree(shape)).build()  # type: ignore[type-abstract]
    model.load_state_dict(torch.load(folder / "weights.pt"))
    engine = Engine(to_int8(model), bos=1, eos=2, pad=0, budget=10**9)
    method: dict[str, Any] = {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy"}
    decoding = Decoding(**method, min_length=LENGTH, max_length=LENGTH, loops=None)  # the peers have no loop detection
    given = prompts(shape, rows)
    return lambda: (engine.generate if shape.encoder else engine.complete)(given, decoding)


def ctranslate2(folder: Path, name: str, rows: int, beam: int) -> Callable[[], Any]:
    import ctranslate2

    shape = SHAPES[name]
    given = [[f"t{n}" for n in row] for row in prompts(shape, rows)]
    options: dict[str, Any] = {"compute_type": "int8", "inter_threads": 1, "intra_threads": THREADS}
    where = str(folder / "ctranslate2")
    if shape.encoder:
        model = ctranslate2.Translator(where, **options)
        length = {"max_decoding_length": LENGTH, "min_decoding_length": LENGTH}
        return lambda: model.translate_batch(given, beam_size=beam, max_batch_size=0, **length)
    writer = ctranslate2.Generator(where, **options)
    length = {"max_length": LENGTH, "min_length": LENGTH}
    return lambda: writer.generate_batch(given, beam_size=beam, include_prompt_in_result=False, **length)


def hf(folder: Path, name: str, rows: int, beam: int) -> Callable[[], Any]:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    shape = SHAPES[name]
    if shape.encoder:
        config = transformers.MarianConfig(
            vocab_size=shape.vocab, d_model=shape.width, encoder_layers=shape.encoder, decoder_layers=shape.decoder,
            encoder_attention_heads=shape.heads, decoder_attention_heads=shape.heads, encoder_ffn_dim=shape.hidden,
            decoder_ffn_dim=shape.hidden, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1,
            forced_eos_token_id=None, scale_embedding=True, activation_function="relu",
        )  # fmt: skip
        model: Any = transformers.MarianMTModel(config)
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=1, eos_token_id=2, pad_token_id=0))
    model = model.to(torch.bfloat16).eval()
    given = torch.tensor(prompts(shape, rows))
    length = {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH}
    mask = torch.ones_like(given)
    return lambda: model.generate(given, attention_mask=mask, num_beams=beam, do_sample=False, **length)


def work(peer: str, folder: Path, job: str, clock: Callable[[], float]) -> None:
    """The main loop of a peer's process: one run per input line, its seconds as output."""
    makers = {"ours": ours, "torch": ours, "ctranslate2": ctranslate2, "hf": hf}
    decode = makers[peer](folder, *JOBS[job][:3])
    decode()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = clock()
        decode()
        print(clock() - start, flush=True)


# --- ceilings ---------------------------------------------------------------------------------------------------------


class Ceilings(NamedTuple):
    read: dict[str, float]  # bytes per second, for as many bytes as the decoder of a shape has
    products: float  # operations per second, counting additions and multiplications


def decoder_bytes(shape: Shape) -> int:
    """Bytes of the weights that every target token uses."""
    square, wide = shape.width**2, shape.width * shape.hidden
    crosses = 2 * square if shape.encoder else 0  # queries and output
    return shape.decoder * (4 * square + crosses + 2 * wide) + shape.width * shape.vocab


def ceilings(clock: Callable[[], float]) -> Ceilings:
    import ctypes

    import torch

    from allyouneed.kernels.cpu import build as native
    from allyouneed.nn.linear.int8 import FbgemmLinear, Int8Linear, Int8Weight

    torch.set_num_threads(THREADS)
    native.wait_for_build()
    codes = Int8Weight.of(torch.randn(2048, 2048))
    product, x = FbgemmLinear(codes.codes, codes.step, None), torch.randn(256, 2048)
    interpreter = native_product(Int8Linear(codes, None), x)

    def best(work: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(12):
            start = clock()
            work()
            seconds.append(clock() - start)
        return min(seconds)

    def read(size: int) -> float:
        """In huge pages, where the native library is loaded."""
        library = native.native_library()
        place = None if library is None else library.allocate(size)
        room = bytearray(size) if place is None else (ctypes.c_char * size).from_address(place)
        numbers = torch.frombuffer(room, dtype=torch.int64).zero_()
        return size / best(numbers.sum)

    with torch.inference_mode():
        products = [lambda: product.dynamic(x, product.biased_weight, False), *([interpreter] if interpreter else [])]
        speeds = {name: read(decoder_bytes(shape) // 8 * 8) for name, shape in SHAPES.items()}
        return Ceilings(speeds, 2 * x.numel() * 2048 / min(map(best, products)))


def native_product(linear: Any, x: Any) -> Callable[[], Any] | None:
    from allyouneed.kernels.cpu import build as native
    from allyouneed.runtime.cpu.instructions import Instructions
    from allyouneed.runtime.cpu.lower import lower
    from allyouneed.runtime.cpu.native_program import NativeProgram, PassInputs, arena_for

    library = native.native_library()
    if library is None:
        return None
    code = Instructions()
    code.outputs.append(lower(linear, code.register(x.shape[1]), code))
    program = NativeProgram(code, library, arena_for(library, code))
    ones = [1] * len(x)
    return lambda: program.run(PassInputs(len(x), 1, None, ones, ones), x=x)


def ceiling(job: Job, most: Ceilings) -> float:
    """Tokens per second."""
    shape = SHAPES[job.shape]
    square, wide, decoder = shape.width**2, shape.width * shape.hidden, decoder_bytes(shape)
    source = shape.encoder * (4 * square + 2 * wide) + (shape.decoder * 2 * square if shape.encoder else 0)
    given = job.rows * LENGTH * (source if shape.encoder else decoder - shape.width * shape.vocab)
    step = max(decoder / most.read[job.shape], 2 * job.rows * job.beam * decoder / most.products)
    return job.rows * LENGTH / (2 * given / most.products + LENGTH * step)


# --- turns ------------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, peer: str, folder: Path, job: str, processor: bool, setting: ThreadSetting) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--work", peer, "--folder", str(folder), job]
        command += ["--processor"] if processor else []
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        own = environment(peer, setting)
        self.process = subprocess.Popen(command, env=own, stderr=subprocess.DEVNULL, **pipes)
        if self.line() != "ready":
            raise RuntimeError(f"{peer} cannot do {job}; run {' '.join(command)} to see why")
        self.times = 1
        self.times = max(1, min(20, round(TURN / min(self.turn()))))

    def line(self) -> str:
        return str(self.process.stdout.readline()).strip()  # type: ignore[union-attr]

    def turn(self) -> list[float]:
        self.process.send_signal(signal.SIGCONT)
        found = []
        for _ in range(self.times):
            self.process.stdin.write("go\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
            found.append(float(self.line()))
        self.process.send_signal(signal.SIGSTOP)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class ThreadSetting(NamedTuple):
    """Threads of a peer. CTranslate2 is sometimes fastest with one, sometimes with two active ones."""

    threads: int
    wait: str = "active"


def thread_settings(peer: str, processor: bool) -> list[ThreadSetting]:
    if processor:
        return [ThreadSetting(1)]
    return (
        [ThreadSetting(1), ThreadSetting(2), ThreadSetting(2, "passive")]
        if peer == "ctranslate2"
        else [ThreadSetting(2, "active" if peer == "hf" else "passive")]
    )


def environment(peer: str, setting: ThreadSetting) -> dict[str, str]:
    own = {"ALLYOUNEED_NATIVE": "off"} if peer == "torch" else {}
    return os.environ | own | {"OMP_NUM_THREADS": str(setting.threads), "OMP_WAIT_POLICY": setting.wait}


def measured(
    folder: Path, job: str, peers: list[str], rounds: int, processor: bool, count: Callable[[list[float]], float]
) -> dict[str, list[float]]:
    """Seconds of each peer's runs, with its fastest thread setting by what `count`s of the runs."""
    workers: dict[tuple[str, ThreadSetting], Worker] = {}
    found: dict[tuple[str, ThreadSetting], list[float]] = {
        (peer, setting): [] for peer in peers for setting in thread_settings(peer, processor)
    }
    try:
        for peer, setting in found:
            workers[peer, setting] = Worker(peer, folder, job, processor, setting)
        for _ in range(rounds):
            for key, worker in workers.items():
                found[key] += worker.turn()
    finally:
        for worker in workers.values():
            worker.end()
    return {
        peer: min((found[peer, setting] for setting in thread_settings(peer, processor)), key=count) for peer in peers
    }


@contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Another process keeps one core busy, where `wanted`."""
    if not wanted:
        yield
        return
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def line(name: str, seconds: dict[str, list[float]], most: Ceilings, count: Callable[[list[float]], float]) -> str:
    """One row of the table; ratios are of what `count`s."""
    job = JOBS[name]
    best = {peer: job.rows * LENGTH / min(turns) for peer, turns in seconds.items()}
    usual = {peer: job.rows * LENGTH / statistics.median(turns) for peer, turns in seconds.items()}
    cells = [f"{best[peer]:,.0f} ({usual[peer]:,.0f})" if peer in best else "" for peer in NAMES]

    def ratio(peer: str, target: float | None) -> str:
        if not {"ours", peer} <= set(best):
            return ""
        return f"**{count(seconds[peer]) / count(seconds['ours']):.2f}** (≥ {target})"

    top = ceiling(job, most)
    share = f"{best['ours'] / top:.0%}" if "ours" in best else ""
    cells += [ratio("ctranslate2", job.target), ratio("hf", job.hf), f"{top:,.0f}", share, f"{os.getloadavg()[0]:.1f}"]
    return f"| {name} | {' | '.join(cells)} |"


def versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "ctranslate2", "transformers"))


BUSY, EXECUTION = "## Beside a busy core\n", "## Execution\n"  # sections of the page
PAGE = """# Decoding on CPU

```sh
python bench/decode/cpu.py --page docs/results/decode-cpu.md
```

Random weights, 32 input tokens, 32 forced output tokens, greedy or beam 4. base: width 512, 6 + 6 layers, vocabulary
32,000; small: 256, 6 + 2, 16,000; gpt2: 124M. *b1* and *b32* are batch sizes. Tokens per second of the best turn, and
of the median turn in brackets. CTranslate2 runs with one thread, with two spinning and with two sleeping threads, on
models converted in another process; its best setting counts. Target ratios are in brackets. *ours int8, torch* is the
speed without a compiler (see below).

{ran}. {versions}.

{table}

The ceiling is a lower bound on work: every decoder weight is read once per token of the longest row, at the bandwidth
this machine reaches for that many bytes (in large pages; the base and small decoders partly stay in cache), or
multiplied with every row at the speed of its best int8 matrix product, whichever takes longer; the source is read once.
Bandwidth is measured once per run; other load on the machine lowers it, which explains shares above 100%.

## Execution

A decode step of these models is short: two layers of width 256 need 60 µs of matrix products, and torch spends as much
on twenty calls. An int8 model is therefore lowered once to a flat program
([runtime/cpu/lower.py](../../src/allyouneed/runtime/cpu/lower.py)), which a C++ interpreter runs in one call
([kernels/cpu/interpreter.cpp](../../src/allyouneed/kernels/cpu/interpreter.cpp)): int8 matrix products, attention over
the KV cache, norms, activations and top-k token selection. A wheel has it for every instruction set; elsewhere `g++`
compiles it once, in the background ([kernels/cpu/build.py](../../src/allyouneed/kernels/cpu/build.py)), and torch
computes the same values until it is ready. Parts without a lowering are called by torch.

Time per component, one thread:

| job | decoder layers | vocabulary head | token selection, state updates, Python | encoder |
|---|---:|---:|---:|---:|
| base-b1 | 49% | 29% | 12% | 10% |
| base-b32 | 49% | 20% | 6% | 25% |
| small-b1 | 27% | 28% | 30% | 15% |
| small-b32 | 27% | 25% | 14% | 34% |
| gpt2-b1 | 68% | 25% | 7% | |
| base-b32-beam4 | 44% | 21% | 28% | 7% |

A single row is bound by weight bandwidth; large pages double it. Many rows are bound by matrix products (390 of 430 G
operations/s in the inner loop) and by reading keys and values, which are fp32. Torch alone matches the peer only where
matrix products dominate (base and GPT-2, one row): an FBGEMM product has 12 µs of overhead, attention of one query
takes 27 µs, and each small call 2 to 5.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=", ".join(JOBS))
    parser.add_argument("--peers", default=",".join(NAMES), help="peers to measure, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processor", action="store_true", help="one thread each, processor time")
    parser.add_argument("--isa", choices=PEERS_SETS, help="hold all peers to this instruction set")
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--page", type=Path, help="write the result page to this file")
    parser.add_argument("--json", type=Path, help="write the seconds of all runs to this file")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.isa:  # inherited by the peers' processes
        names = ("ALLYOUNEED_ISA", *SET_VARIABLES)
        os.environ |= dict(zip(names, (options.isa, *PEERS_SETS[options.isa]), strict=True))
    clock = time.process_time if options.processor else time.perf_counter
    if options.write:
        return write(options.write, options.folder)
    if options.work:
        return work(options.work, options.folder, options.jobs[0], clock)
    if options.ceilings:
        return print(json.dumps(ceilings(clock)))
    own, began = [sys.executable, "-W", "ignore", __file__], time.perf_counter()
    command = [*own, "--ceilings", *(["--processor"] if options.processor else [])]
    output = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        env=environment("ours", thread_settings("ours", options.processor)[0]),
    )
    most = Ceilings(*json.loads(output.stdout))
    speeds = ", ".join(f"{name}'s decoder {speed / 1e9:.0f} GB/s" for name, speed in most.read.items())
    print(f"reading {speeds}; products {most.products / 1e9:.0f} G operations/s", flush=True)
    columns = [*NAMES.values(), "ours / CTranslate2", "ours / HF", "ceiling", "ours of it", "load"]
    table = [f"| tokens/s, best turn (median) | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    peers, kept = options.peers.split(","), {}
    count: Callable[[list[float]], float] = statistics.median if options.busy else min
    with tempfile.TemporaryDirectory() as place, busy_core(options.busy):
        for job in options.jobs or JOBS:
            folder = Path(place) / JOBS[job].shape
            if not folder.exists():
                subprocess.run([*own, "--write", JOBS[job].shape, "--folder", str(folder)], check=True)
            here = [peer for peer in peers if peer != "hf" or JOBS[job].hf is not None]
            kept[job] = measured(folder, job, here, options.rounds, options.processor, count)
            table.append(line(job, kept[job], most, count))
            print(table[-1], flush=True)
    how = "one thread, processor time" if options.processor else "two threads"
    how += f", held to {options.isa}" if options.isa else ""
    how += ", while another process keeps one core busy; ratios are of the median turns" if options.busy else ""
    ran = f"{how}; reading {speeds}; products {most.products / 1e9:.0f} G operations/s"
    print(f"\n{ran}; {time.perf_counter() - began:.0f} s in total\n", *table, sep="\n")
    if options.page:
        text = PAGE.format(ran=ran[0].upper() + ran[1:], table="\n".join(table), versions=versions())
        before = options.page.read_text("utf-8") if options.page.is_file() else ""
        if BUSY in before:  # measured by another call
            text = text.replace(EXECUTION, BUSY + before.partition(BUSY)[2].partition(EXECUTION)[0] + EXECUTION)
        options.page.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
