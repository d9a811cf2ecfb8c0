"""Decoding on CPU: tokens per second of ours (int8), of CTranslate2 (int8) and of Hugging Face (bf16).

    python bench/decode_cpu.py                      # all jobs
    python bench/decode_cpu.py base-b1 small-b32    # some of them

The same sizes with random weights, 32 tokens in, 32 forced tokens out, two threads, OMP_WAIT_POLICY=active for all
(CTranslate2 is several times slower without it). Each peer lives in a process of its own that stands still (SIGSTOP)
while another has its turn; the best turn of each counts, and the load of the machine is printed, for other people's
work falls on everybody's turns. `--processor` is for a machine that others use: one thread each, and the seconds that
the processor worked for it, whoever else it worked for. Models are converted in another process again: conversion
leaves threads behind.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = 32
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))  # of a peer's process
OURS, CTRANSLATE2, HF = "ours int8", "CTranslate2 int8", "HF bf16"
PEERS = ("ours", "ctranslate2", "hf")
NAMES = dict(zip(PEERS, (OURS, CTRANSLATE2, HF), strict=True))


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
JOBS = {  # name -> (shape, rows, beam, what is asked of ours: at least so many times CTranslate2)
    "base-b1": ("base", 1, 1, 1.2),
    "base-b32": ("base", 32, 1, 1.0),
    "small-b1": ("small", 1, 1, 0.7),
    "small-b32": ("small", 32, 1, 0.8),
    "gpt2-b1": ("gpt2", 1, 1, 1.2),
    "base-b1-beam4": ("base", 1, 4, 1.0),
    "base-b32-beam4": ("base", 32, 4, 1.0),
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
    """Our folder, and CTranslate2's made of it."""
    import torch
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Inner

    from allyouneed.config import parse
    from allyouneed.data.tokenizers import BOS, EOS, PAD, Tokenizer, Vocabularies
    from allyouneed.folder import Folder
    from allyouneed.interop import ctranslate2
    from allyouneed.nn.model import Model

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
    ctranslate2.write(folder, out / "ctranslate2")
    torch.save(model.state_dict(), out / "weights.pt")


def prompts(shape: Shape, rows: int) -> list[list[int]]:
    from random import Random

    dice = Random(0)
    return [[dice.randrange(3, shape.vocab) for _ in range(LENGTH)] for _ in range(rows)]


# --- peers: each gives a function that decodes all rows once ----------------------------------------------------------


def ours(folder: Path, name: str, rows: int, beam: int) -> Callable[[], Any]:
    import torch

    from allyouneed.config import parse
    from allyouneed.infer.decoding import Decoding
    from allyouneed.infer.engine import Engine
    from allyouneed.nn.model import Model
    from allyouneed.nn.quantized import to_int8

    torch.set_num_threads(THREADS)
    shape = SHAPES[name]
    model = parse(Model, tree(shape)).build()  # type: ignore[type-abstract]
    model.load_state_dict(torch.load(folder / "weights.pt"))
    engine = Engine(to_int8(model), bos=1, eos=2, pad=0, budget=10**9)
    way: dict[str, Any] = {"method": "beam", "beam": beam} if beam > 1 else {"method": "greedy"}
    decoding = Decoding(**way, min_length=LENGTH, max_length=LENGTH)
    given = prompts(shape, rows)
    return lambda: (engine.generate if shape.encoder else engine.go_on)(given, decoding)


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
    """A peer's process: a turn for every line that comes in, its seconds out."""
    name, rows, beam, _ = JOBS[job]
    decode = {"ours": ours, "ctranslate2": ctranslate2, "hf": hf}[peer](folder, name, rows, beam)
    decode()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = clock()
        decode()
        print(clock() - start, flush=True)


# --- turns ------------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, peer: str, folder: Path, job: str, processor: bool) -> None:
        threads = 1 if processor else 2
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "active"}
        command = [sys.executable, "-W", "ignore", __file__, "--work", peer, "--folder", str(folder), job]
        command += ["--processor"] if processor else []
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, **pipes)
        if self.line() != "ready":
            raise RuntimeError(f"{peer} cannot do {job}; run {' '.join(command)} to see why")
        self.process.send_signal(signal.SIGSTOP)

    def line(self) -> str:
        return str(self.process.stdout.readline()).strip()  # type: ignore[union-attr]

    def turn(self, times: int) -> list[float]:
        self.process.send_signal(signal.SIGCONT)
        found = []
        for _ in range(times):
            self.process.stdin.write("go\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
            found.append(float(self.line()))
        self.process.send_signal(signal.SIGSTOP)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measured(folder: Path, job: str, peers: list[str], rounds: int, processor: bool) -> dict[str, list[float]]:
    """Seconds of each peer's turns."""
    workers: dict[str, Worker] = {}
    found: dict[str, list[float]] = {peer: [] for peer in peers}
    try:
        for peer in peers:
            workers[peer] = Worker(peer, folder, job, processor)
        for _ in range(rounds):
            for peer, worker in workers.items():
                found[peer] += worker.turn(3)
    finally:
        for worker in workers.values():
            worker.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=", ".join(JOBS))
    parser.add_argument("--peers", default=",".join(PEERS), help="those to measure, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="one thread each, seconds of processor time")
    parser.add_argument("--json", type=Path, help="keep the seconds of all turns here")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write:
        return write(asked.write, asked.folder)
    if asked.work:
        return work(
            asked.work, asked.folder, asked.jobs[0], time.process_time if asked.processor else time.perf_counter
        )
    peers, kept = asked.peers.split(","), {}
    print(f"{'tokens/s, best turn (median)':30}", *(f"{NAMES[peer]:>22}" for peer in peers), "ours/CT2  asked  ours/HF")
    with tempfile.TemporaryDirectory() as place:
        for job in asked.jobs or JOBS:
            name, rows, _, wanted = JOBS[job]
            folder = Path(place) / name
            if not folder.exists():
                command = [sys.executable, "-W", "ignore", __file__, "--write", name, "--folder", str(folder)]
                subprocess.run(command, check=True)
            seconds = kept[job] = measured(folder, job, peers, asked.rounds, asked.processor)
            speeds = {
                peer: (rows * LENGTH / min(s), rows * LENGTH / statistics.median(s)) for peer, s in seconds.items()
            }
            cells = [f"{f'{best:,.0f} ({usual:,.0f})':>22}" for best, usual in speeds.values()]
            ratios = [speeds["ours"][0] / speeds[p][0] if {"ours", p} <= set(speeds) else 0 for p in PEERS[1:]]
            load = os.getloadavg()[0]
            print(
                f"{job:30}", *cells, f"{ratios[0]:8.2f}  {wanted:5.1f}  {ratios[1]:7.2f}  load {load:.1f}", flush=True
            )
    if asked.json:
        asked.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
