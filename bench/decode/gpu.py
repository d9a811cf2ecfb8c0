"""Decoding on one GPU in bf16: tokens per second of ours and of Hugging Face, alternating in the same run.

    python bench/decode/gpu.py                       # all jobs
    python bench/decode/gpu.py llama-b1 base-b64     # some of them
    python bench/decode/gpu.py --peers ours --profile llama-b1

llama: the shape of TinyLlama (1.1 billion parameters, 22 layers, 32 heads sharing 4 key-value heads), 128 prompt tokens
and 256 new ones; the peer generates with a static cache and its compiled step. base: transformer-base (512, 6 + 6,
vocabulary 32k), 32 tokens in and 32 forced tokens out; the peer is Marian. load: 1,000 requests of mixed lengths; the
peer gets them sorted by length in padded batches of its best size among those tried, and only requested tokens count.
Random weights, the same sizes.

Ours is the public `Engine.generate` and `Engine.complete`. The ceiling of a step is the time of copying as many bytes
as the step has to read: its weights once, keys and values as far as they are filled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from allyouneed.config import override, parse, preset_tree
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.nn.models.base import Model

VOCAB, EOS = 32000, 2
LEAST = 0.3  # seconds of a run: short calls are repeated
LAYERS, HIDDEN, WIDTH, HEADS, KV = 22, 5632, 2048, 32, 4
Turn = Callable[[], Any]


@dataclass(frozen=True)
class Job:
    model: str  # llama or base
    rows: int
    given: int
    new: int
    beam: int = 1
    least: float = 0.0  # required ratio ours / peer
    mixed: bool = False


JOBS = {
    "llama-b1": Job("llama", 1, 128, 256, least=3.5),
    "llama-b64": Job("llama", 64, 128, 256, least=5),
    "base-b64": Job("base", 64, 32, 32, least=12),
    "base-b512": Job("base", 512, 32, 32, least=5),
    "base-b64-beam4": Job("base", 64, 32, 32, beam=4, least=8),
    "base-load": Job("base", 1000, 64, 64, least=3, mixed=True),
    "llama-load": Job("llama", 1000, 128, 128, least=3, mixed=True),
}


def tree(name: str) -> dict[str, Any]:
    if name == "base":
        return override(preset_tree("transformer-base"), [f"vocab={VOCAB}", "dropout=0"])
    mixer = f"heads={HEADS}", f"kv_heads={KV}"
    sizes = [f"vocab={VOCAB}", f"width={WIDTH}", "embed.tied=false", f"decoder[0].repeat={LAYERS}"]
    sizes += [f"decoder[0].mixer.{size}" for size in mixer] + [f"decoder[0].channel.hidden={HIDDEN}"]
    return override(preset_tree("llama-15m"), sizes)


def lengths(job: Job) -> list[tuple[int, int]]:
    """(prompt tokens, new tokens) of each request."""
    random = Random(0)
    if not job.mixed:
        return [(job.given, job.new)] * job.rows
    if job.model == "base":  # a translation is about as long as its source
        given = [random.randint(4, job.given) for _ in range(job.rows)]
        return [(n, max(4, min(job.new, round(n * random.uniform(0.7, 1.3))))) for n in given]
    return [(random.randint(8, job.given), random.randint(8, job.new)) for _ in range(job.rows)]


def texts(job: Job) -> list[list[int]]:
    random = Random(1)
    return [[random.randrange(3, VOCAB) for _ in range(given)] for given, _ in lengths(job)]


# --- ours and theirs: each gives a function that decodes all rows once ------------------------------------------------


def ours(job: Job) -> Turn:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = parse(Model, tree(job.model)).build().to(torch.bfloat16).eval()  # type: ignore[type-abstract]
    engine = Engine(model, bos=1, eos=EOS, pad=0, budget=64 * 1024)
    method: dict[str, Any] = {"method": "beam", "beam": job.beam} if job.beam > 1 else {"method": "greedy"}
    decoding = Decoding(**method, min_length=job.new, max_length=job.new)
    given = texts(job)
    if not job.mixed:
        return lambda: (engine.generate if job.model == "base" else engine.complete)(given, decoding)
    requests = [
        Request([1], new, (n,), text) if job.model == "base" else Request(text, new, (n,))
        for n, (text, (_, new)) in enumerate(zip(given, lengths(job), strict=True))
    ]
    return lambda: engine.decode(requests, decoding)


def theirs(job: Job, size: int) -> Turn:
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": EOS}
    with torch.device("cuda"):
        if job.model == "base":
            config = transformers.MarianConfig(
                d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
                encoder_ffn_dim=2048, decoder_ffn_dim=2048, decoder_start_token_id=1, forced_eos_token_id=None,
                scale_embedding=True, activation_function="relu", **common,
            )  # fmt: skip
            model: Any = transformers.MarianMTModel(config)
        else:
            config = transformers.LlamaConfig(
                hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
                intermediate_size=HIDDEN, max_position_embeddings=2048, bos_token_id=1, **common,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    options: dict[str, Any] = {"num_beams": job.beam, "do_sample": False}
    if job.model == "llama" and not job.mixed:
        options["cache_implementation"] = "static"  # which also compiles the step
    requests = sorted(zip(texts(job), lengths(job), strict=True), key=lambda one: len(one[0]))

    def batch(some: list[Any]) -> None:
        longest, new = max(len(text) for text, _ in some), max(wanted for _, (_, wanted) in some)
        pads = [[0] * (longest - len(text)) for text, _ in some]
        left = job.model == "llama"  # prompts are padded on the left
        rows = [pad + text if left else text + pad for pad, (text, _) in zip(pads, some, strict=True)]
        tokens = torch.tensor(rows, device="cuda")
        model.generate(tokens, attention_mask=(tokens != 0).long(), min_new_tokens=new, max_new_tokens=new, **options)

    def turn() -> None:
        for start in range(0, len(requests), size):
            batch(requests[start : start + size])

    return turn


def bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    a, b = torch.empty(2, 1 << 32, dtype=torch.uint8, device="cuda").random_()
    for _ in range(3):
        b.copy_(a)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        b.copy_(a)
    torch.cuda.synchronize()
    return 20 * 2 * a.numel() / (time.perf_counter() - start)


def ceiling(job: Job, copied: float) -> float:
    """Tokens per second if memory traffic were the only cost."""
    config = parse(Model, tree(job.model))  # type: ignore[type-abstract]
    width = WIDTH if job.model == "llama" else 512
    written = config.cost(1)
    weights = written.parameters - VOCAB * width * (job.model == "llama")  # one embedding row is read
    if job.model == "base":
        layer = 4 * 512 * 512 + 2 * 512 * 2048
        weights -= 6 * layer  # the encoder runs once, not in every step
    kept = 2 * KV * (WIDTH // HEADS) * LAYERS if job.model == "llama" else 2 * 512 * 6
    seen = job.given + job.new / 2
    return copied * job.rows / (2 * (weights + job.rows * job.beam * kept * seen))


def timed(turn: Turn, least: float = 0.0) -> float:
    """Seconds per call, over calls that take at least `least` seconds together."""
    torch.cuda.synchronize()
    start, calls, taken = time.perf_counter(), 0, 0.0
    while not calls or taken < least:
        turn()
        torch.cuda.synchronize()
        calls, taken = calls + 1, time.perf_counter() - start
    return taken / calls


def profile(turn: Turn) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watched

    with watched(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        turn()
    print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=", ".join(JOBS))
    parser.add_argument("--peers", default="ours,theirs", help="peers to measure, separated by commas")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="profile ours")
    options = parser.parse_args()
    peers, copied = options.peers.split(","), bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copied / 1e12:.2f} TB/s\n")
    print("| job | ours, tokens/s | Hugging Face | ratio | required | ceiling | share |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.jobs or JOBS:
        job = JOBS[name]
        count = sum(new for _, new in lengths(job))
        turns: dict[str, Turn] = {"ours": ours(job)} if "ours" in peers else {}
        if "theirs" in peers:
            sizes = [job.rows] if not job.mixed else [256] if job.model == "llama" else [64, 256, 512]
            turns |= {f"theirs, batches of {size}": theirs(job, size) for size in sizes}
        seconds: dict[str, list[float]] = {}
        for peer, turn in turns.items():  # the first runs compile and capture
            first = timed(turn)
            if not (peer.startswith("theirs") and job.mixed and job.model == "llama"):
                timed(turn)
                seconds[peer] = []
            else:
                seconds[peer] = [first]  # eager, and long enough to need no warm-up
        for _ in range(options.turns):
            for peer, turn in turns.items():
                if peer == "ours" or not (job.mixed and job.model == "llama"):
                    seconds[peer].append(timed(turn, LEAST))
        speeds = {peer: count / statistics.median(found) for peer, found in seconds.items()}
        own = speeds.pop("ours", 0.0)
        best = max(speeds.values(), default=0.0)
        top = 0.0 if job.mixed else ceiling(job, copied)
        ratio = f"{own / best:.2f}" if best else "-"
        shown = f"{top:,.0f} | {own / top:.0%}" if top else "- | -"
        print(f"| {name} | {own:,.0f} | {best:,.0f} | {ratio} | {job.least:g} | {shown} |", flush=True)
        if len(speeds) > 1:
            print("   ", {peer: round(speed) for peer, speed in speeds.items()})
        if options.profile:
            profile(turns["ours"])
        del turns
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
