"""Decoding speed of every mixer in one skeleton on a GPU, bf16: tokens per second alone and at 64 rows against
attention in the same run, at 32k tokens of context, and against other libraries.

    python bench/family_gpu.py                                    # all that fits into 150 seconds
    python bench/family_gpu.py --only mixers,long --seconds 90
    python bench/family_gpu.py --only retention,rwkv,mla          # some mixers
    python bench/family_gpu.py --only peers --seconds 400         # Hugging Face and flash-linear-attention
    python bench/family_gpu.py --device cpu --tiny                # rehearsal

The skeleton: 12 layers of width 768, 12 heads, a gated channel of 2048, vocabulary 32k, rotary positions where a mixer
takes them; mixers of about equal parameters. A run decodes through the engine's graph runner: 32 prompt tokens, 128 new
ones. Tokens per second count decode steps alone, replayed at the middle of that text; `with prompt` is the whole run,
prefill included, and so are peers and ours beside them, in turns. `long`: steps at 1k to 32k tokens of context, which
are not prefilled: what a step costs depends on its shapes only.

Declared bytes are those of the cost functions (`allyouneed describe`): the weights that the tokens use, once, and each
row's state. `share` is what they say of the measured time, at the speed of copying memory. States are compared with the
bytes that were allocated. Results are written as JSON into $OUT, if set.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.infer.cuda_graph.runner import GraphRunner
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.nn.linear.ternary import pack_model
from allyouneed.nn.models.base import Model
from allyouneed.nn.sublayer import Mixer
from allyouneed.runtime.report import cuda_choice

ROTARY = {"kind": "rotary"}


@dataclass(frozen=True)
class Sizes:
    width: int = 768
    heads: int = 12
    layers: int = 12
    hidden: int = 2048
    vocab: int = 32000
    rows: tuple[int, ...] = (1, 64)
    given: int = 32
    new: int = 128
    long: int = 32768

    @property
    def head(self) -> int:
        return self.width // self.heads


TINY = Sizes(width=32, heads=4, layers=2, hidden=48, vocab=99, rows=(1, 3), given=5, new=9, long=200)


def mixers(s: Sizes) -> dict[str, dict[str, Any]]:
    """A setting of every mixer that decodes, by name; further settings of attention behind them."""
    heads, causal, past = {"heads": s.heads}, {"pattern": "causal"}, {"sees": "past"}
    latent = {"kv_rank": 4 * s.head, "nope_width": s.head, "rope_width": s.head // 2, "value_width": s.head}
    branches = {"left": {"kind": "attention"} | heads | causal, "right": {"kind": "convolution", "size": 3} | past}
    found: dict[str, dict[str, Any]] = {
        "attention": heads | causal | {"positions": ROTARY},
        "infini": heads | {"segment": 16 * s.head},
        "longnet": heads | {"segments": [8 * s.head, 32 * s.head], "dilations": [1, 4]} | past,
        "lsh": heads | {"buckets": 32},
        "mla": heads | causal | latent,
        "synthesizer": heads | causal | {"length": 512},
        "convolution": {"size": 3} | past,
        "branches": branches | {"join": "sum"},
        "mssa": heads | causal,
        "tensorized": causal | {"length": s.given + s.new},  # weights for each pair of positions: far more than others
        "gau": causal,
        "mixed-chunk": {"chunk": 128},
        "lightweight-convolution": heads | {"size": 7} | past,
        "dynamic-convolution": heads | {"size": 7} | past,
        "lsra": heads | causal | {"size": 7},
        "performer": heads,
        "retention": heads | {"value_width": s.head},
        "gated-retention": heads,
        "mamba": {},
        "mamba2": {"heads": 2 * s.heads},
        "rwkv": {}, "lstm": {}, "gru": {}, "s4": {}, "identity": {},
    }  # fmt: skip
    found = {name: {"kind": name} | keys for name, keys in found.items()}
    attention = found["attention"]
    found |= {
        "grouped-queries": attention | {"kv_heads": max(1, s.heads // 3)},
        "window": attention | {"pattern": f"causal & window({4 * s.head})"},
        "alibi": attention | {"positions": "alibi"},
        "transformer-xl": attention | {"positions": "transformer-xl"},
        "shaw": attention | {"positions": {"kind": "shaw", "distance": 16}},
    }
    return found


# mixers that the registry has and that do not decode by themselves (they see later tokens, or need a source)
OTHERS = {"big-bird", "longformer", "linformer", "chunked-cross", "multi-step", "synchronous", "attentive-gru",
          "pooling", "spatial-mlp", "context-attention"}  # fmt: skip
CONSTANT = ("retention", "gated-retention", "rwkv", "performer", "infini", "mamba", "mamba2", "lstm", "gru", "s4")


def tree(s: Sizes, mixer: dict[str, Any], channel: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    channel = channel or {"kind": "glu", "hidden": s.hidden, "bias": False}
    layer = {"repeat": s.layers, "wiring": "pre-norm", "mixer": mixer, "channel": channel}
    common = {"kind": "decoder", "vocab": s.vocab, "width": s.width, "norm": "rms", "embed": {"tied": True}}
    return common | {"decoder": [layer]} | keys


def variants(s: Sizes) -> dict[str, dict[str, Any]]:
    """All models by name: mixers, then channels, linear maps and stacks."""
    found = {name: tree(s, mixer) for name, mixer in mixers(s).items()}
    attention = mixers(s)["attention"]
    expert = {"kind": "glu", "hidden": s.hidden // 2, "bias": False}
    found["experts"] = tree(s, attention, {"kind": "moe", "experts": 8, "top": 2, "expert": expert})
    found["rwkv-both"] = tree(s, {"kind": "rwkv"}, {"kind": "rwkv-channel", "hidden": 3 * s.width})
    found["yoco"] = yoco(s)
    found["bitnet-packed"] = tree(s, attention, linear="bit")
    return found


def yoco(s: Sizes) -> dict[str, Any]:
    layer = tree(s, {"kind": "gated-retention", "heads": s.heads})["decoder"][0] | {"repeat": s.layers // 2}
    cross = {"kind": "attention", "heads": s.heads, "pattern": "causal", "positions": ROTARY}
    second = {key: value for key, value in layer.items() if key != "mixer"} | {"cross": cross}
    plain = {key: value for key, value in tree(s, {}).items() if key != "decoder"}
    return plain | {"kind": "decoder-decoder", "first": [layer], "second": [second]}


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    device: torch.device
    sizes: Sizes
    seconds: float
    begun: float = field(default_factory=time.perf_counter)
    results: dict[str, Any] = field(default_factory=dict)
    copied: float = 0.0  # bytes per second of a copy
    locked: Any = None

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, turn: Callable[[], Any], least: float) -> float:
        """Seconds per call: the median of calls that take at least `least` seconds together."""
        found: list[float] = []
        while not found or sum(found) < least:
            start = time.perf_counter()
            turn()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def lock(self) -> None:
        """Others that compile beside this one wait until it has measured."""
        if self.locked is not None:
            fcntl.flock(self.locked, fcntl.LOCK_EX)

    def unlock(self) -> None:
        if self.locked is not None:
            fcntl.flock(self.locked, fcntl.LOCK_UN)

    def build(self, keys: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            model: Any = parse(Model, keys).build().to(torch.bfloat16).eval()  # type: ignore[type-abstract]
        if keys.get("linear") == "bit":
            pack_model(model)
        return model

    def note(self, name: str, **values: Any) -> None:
        self.results.setdefault(name, {}).update(values)
        if os.environ.get("OUT"):
            path = Path(os.environ["OUT"], "family_gpu.json")
            path.write_text(json.dumps({"sizes": asdict(self.sizes), "results": self.results}, indent=1))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def reported(bench: Bench, name: str) -> Iterator[None]:
    """One failure does not end the others."""
    try:
        yield
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        text = f"{type(failure).__name__}: {str(failure)[:200]} ({Path(where.filename).name}:{where.lineno})"
        bench.note(name, failed=text)
        print(f"{name:26s} FAILED {text}", flush=True)
    finally:
        bench.free()


def requests(bench: Bench, rows: int) -> list[Request]:
    s = bench.sizes
    return [Request([3 + (7 * row + n) % (s.vocab - 3) for n in range(s.given)], s.new, (row,)) for row in range(rows)]


def decode(bench: Bench, engine: Engine, rows: int) -> None:
    """Through the graph runner, as the engine does on a GPU."""
    s = bench.sizes
    decoding = Decoding(method="greedy", min_length=s.new, max_length=s.new)
    spec, given = engine.spec(decoding), requests(bench, rows)
    states = [RequestState(request, spec, s.new) for request in given]
    batch = engine.graphs.batch(states)
    with torch.inference_mode():
        while batch.active:
            batch.step()
    batch.close()


def decode_plain(bench: Bench, engine: Engine, rows: int) -> None:
    s = bench.sizes
    engine.decode(requests(bench, rows), Decoding(method="greedy", min_length=s.new, max_length=s.new))


def declared(model: Any, keys: dict[str, Any], rows: int, context: float) -> tuple[float, float]:
    """Bytes that a step has to read, and those of the states, by the cost functions. A token reads as many weights as
    it has multiply-adds; `rows` of them read no weight twice."""
    config = parse(Model, keys)  # type: ignore[type-abstract]
    cost, alone = config.cost(max(1, int(context))), config.cost(1)
    weights = [*model.parameters(), *model.buffers()]
    stored = sum(weight.numel() * weight.itemsize for weight in weights)
    states = rows * cost.state_bytes(max(1, int(context)), next(model.parameters()).itemsize, captured=True)
    return stored * min(1.0, rows * alone.flops / 2 / alone.parameters) + states, states


def measure(bench: Bench, name: str, keys: dict[str, Any]) -> None:
    s = bench.sizes
    model = bench.build(keys)
    choice = cuda_choice(model)
    captured = not choice.blockers
    engine = Engine(model, bos=1, eos=2, pad=0, budget=64 * 1024)
    run = decode if captured else decode_plain
    bench.note(name, captured=captured, executor=str(choice), parameters=sum(p.numel() for p in model.parameters()))
    for rows in s.rows:
        first = bench.timed(lambda rows=rows: run(bench, engine, rows), 0)  # compiles and captures
        slow = first > 4 and not captured
        taken = first if slow else bench.timed(lambda rows=rows: run(bench, engine, rows), 0.2)
        step, context = taken / s.new, s.given + s.new / 2
        bench.note(name, **{f"b{rows} with prompt": rows * s.new / taken, f"b{rows} first": first})
        if captured:
            runner = next(reversed(engine.graphs.kept.values()))
            step = time_steps(bench, runner, int(context), 0.15)
        reads, _ = declared(model, keys, rows, context)
        share = reads / step / bench.copied if bench.copied else 0.0
        bench.note(name, **{f"b{rows}": rows / step, f"b{rows} share": share})
        if captured:
            states = declared(model, keys, runner.states.rows, runner.states.capacity)[1]
            bench.note(name, **{f"b{rows} state bytes": runner.states.bytes, f"b{rows} state declared": states})
    found = bench.results[name]
    shown = "  ".join(f"b{n} {found[f'b{n}']:>9,.0f} ({found[f'b{n} with prompt']:,.0f} with prompt)" for n in s.rows)
    first = " + ".join(f"{found[f'b{n} first']:.1f}" for n in s.rows)
    how = f"captured, first run {first} s" if captured else "PLAIN: " + str(choice)[:120]
    print(f"{name:26s} {shown}  {how}", flush=True)


def time_steps(bench: Bench, runner: GraphRunner, context: int, least: float) -> float:
    """Seconds of a step of all rows at so many tokens of context, in runs of eight as the engine launches them."""

    def turn() -> None:
        for _ in range(2):
            runner.launch(8)
        runner.states.device_lengths.fill_(context)

    with torch.inference_mode():
        runner.states.device_lengths.fill_(context)
        turn()
        bench.wait()
        return bench.timed(turn, least) / 16


def measure_long(bench: Bench, name: str, keys: dict[str, Any]) -> None:
    """Steps at a long context, of as many rows as fit, at most the largest number."""
    s = bench.sizes
    model = bench.build(keys)
    if cuda_choice(model).blockers:
        return
    rows, capacity = s.rows[-1], s.long + 64
    reads = declared(model, keys, 1, s.long)[1]
    if bench.device.type == "cuda":
        rows = max(1, min(rows, int(0.8 * torch.cuda.mem_get_info()[0] // max(reads, 1))))
    spec = Engine(model, bos=1, eos=2, pad=0).spec(Decoding(method="greedy", max_length=s.new))
    with torch.inference_mode():
        runner = GraphRunner(model, spec, rows, capacity, 0)
    contexts = [s.long >> halvings for halvings in range(5, -1, -1)]
    speeds = [rows / time_steps(bench, runner, context, 0.1) for context in contexts]
    share = declared(model, keys, rows, s.long)[0] * speeds[-1] / rows / bench.copied if bench.copied else 0.0
    curve = dict(zip(contexts, speeds, strict=True))
    bench.note(name, **{"long rows": rows, "long": speeds[-1], "long share": share, "by context": curve})
    shown = ", ".join(f"{context}: {speed:,.0f}" for context, speed in curve.items())
    print(f"{name:26s} {rows} rows, tokens/s by context: {shown}", flush=True)


def copy_speed(bench: Bench) -> float:
    """Bytes read and written per second by a large copy."""
    size = 1 << (31 if bench.device.type == "cuda" else 22)
    a, b = torch.zeros(2, size, dtype=torch.uint8, device=bench.device)
    bench.timed(lambda: b.copy_(a), 0)
    return 2 * size / bench.timed(lambda: b.copy_(a), 0.05)


# --- other libraries --------------------------------------------------------------------------------------------------


def hugging_face(bench: Bench, name: str) -> Any:
    """A model of the same sizes: (module, whether a static cache can be compiled)."""
    import transformers

    s = bench.sizes
    common = {"vocab_size": s.vocab, "hidden_size": s.width, "num_hidden_layers": s.layers, "tie_word_embeddings": True,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    heads = {"num_attention_heads": s.heads, "num_key_value_heads": s.heads, "max_position_embeddings": 1024}
    if name == "mla":
        config: Any = transformers.DeepseekV2Config(
            **common, **heads, intermediate_size=s.hidden, kv_lora_rank=4 * s.head, q_lora_rank=None,
            qk_nope_head_dim=s.head, qk_rope_head_dim=s.head // 2, v_head_dim=s.head, first_k_dense_replace=s.layers,
            n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8,
        )  # fmt: skip
        return transformers.DeepseekV2ForCausalLM(config), True
    if name == "experts":
        config = transformers.MixtralConfig(
            **common, **heads, intermediate_size=s.hidden // 2, num_local_experts=8, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(config), True
    if name == "rwkv":
        config = transformers.RwkvConfig(**common, context_length=1024, intermediate_size=3 * s.width)
        return transformers.RwkvForCausalLM(config), False
    from fla.models import GLAConfig, GLAForCausalLM, RetNetConfig, RetNetForCausalLM

    kinds = {"retention": (RetNetConfig, RetNetForCausalLM), "gated-retention": (GLAConfig, GLAForCausalLM)}
    make, cls = kinds[name]
    sizes = {"num_heads": s.heads, "intermediate_size": s.hidden, "expand_v": 1, "use_cache": True}
    return cls(make(**common, **sizes)), False


# the peer's model, and ours
PEERS = {"mla": "mla", "experts": "experts", "rwkv": "rwkv-both", "retention": "retention",
         "gated-retention": "gated-retention"}  # fmt: skip
PEER_SECONDS = 45  # what one needs to compile and run


def measure_peer(bench: Bench, name: str, keys: dict[str, Any]) -> None:
    """The peer and ours in turns: whole runs, prefill included."""
    s = bench.sizes
    torch.manual_seed(0)
    with torch.device(bench.device):
        model, static = hugging_face(bench, name)
    model = model.to(torch.bfloat16).eval()
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": s.new, "max_new_tokens": s.new}
    if static and bench.device.type == "cuda":
        options["cache_implementation"] = "static"  # which also compiles the step
    engine = Engine(bench.build(keys), bos=1, eos=2, pad=0, budget=64 * 1024)
    for rows in s.rows:
        tokens = torch.tensor([request.prompt for request in requests(bench, rows)], device=bench.device)
        mask = torch.ones_like(tokens)

        def theirs(tokens: Any = tokens, mask: Any = mask) -> None:
            with torch.inference_mode():
                model.generate(tokens, attention_mask=mask, **options)

        first = bench.timed(theirs, 0)
        bench.timed(lambda rows=rows: decode(bench, engine, rows), 0)  # compiles and captures
        bench.lock()
        turns = 3 if 3 * first < bench.left / 2 or static else 1
        both: list[Callable[[], Any]] = [theirs, lambda rows=rows: decode(bench, engine, rows)]
        taken = [[bench.timed(one, 0) for one in both] for _ in range(turns)]
        bench.unlock()
        peer, ours = (rows * s.new / statistics.median(one) for one in zip(*taken, strict=True))
        bench.note(f"peer {name}", **{f"b{rows}": peer, f"b{rows} first": first, f"b{rows} ours": ours})
        print(f"peer {name:21s} b{rows} {peer:>9,.0f} tokens/s, ours {ours:,.0f}: {ours / peer:.1f}× "
              f"(first call {first:.0f} s)", flush=True)  # fmt: skip


def plot(results: Path, path: Path) -> None:
    """Tokens per second against the context, of a run that was written as JSON."""
    from family_cpu import plot as curves

    found = json.loads(results.read_text())["results"]
    by = {name: one["by context"] for name, one in found.items() if "by context" in one}
    contexts = [int(context) for context in next(iter(by.values()))]
    curves({name: list(one.values()) for name, one in by.items()}, contexts, path, "tokens/s of all rows, bf16")


# --- the report -------------------------------------------------------------------------------------------------------


def ratio(found: float | None, other: float | None) -> str:
    return f"{found / other:.2f}" if found and other else "–"


def table(bench: Bench) -> None:
    s, results = bench.sizes, bench.results
    base = results.get("attention", {})
    one, many = (f"b{rows}" for rows in s.rows)
    print(f"\n| model | {one} | of attention | {many} | of attention | {s.long // 1024}k | of attention "
          f"| share of copying | state: allocated / declared | peer {one} | peer {many} |")  # fmt: skip
    print("|" + "---|" * 11)
    peers = {ours: f"peer {name}" for name, ours in PEERS.items()}
    for name, found in results.items():
        if name.startswith("peer"):
            continue
        if "failed" in found and many not in found:
            print(f"| {name} | failed: {found['failed'][:90]} |")
            continue
        peer = results.get(peers.get(name, ""), {})
        numbers = [f"{found.get(key, 0):,.0f} | {ratio(found.get(key), base.get(key))}" for key in (one, many, "long")]
        share = " / ".join(f"{found.get(f'{key} share', 0):.0%}" for key in (one, many, "long"))
        states = ratio(found.get(f"{many} state bytes"), found.get(f"{many} state declared"))
        theirs = [f"{ratio(peer.get(f'{key} ours'), peer.get(key))}×" if peer.get(key) else "–" for key in (one, many)]
        plain = "" if found.get("captured", True) else " (plain)"
        print(f"| {name}{plain} | {' | '.join(numbers)} | {share} | {states} | {' | '.join(theirs)} |")
    used = time.perf_counter() - bench.begun
    print(f"\ncopy {bench.copied / 1e12:.2f} TB/s, {used:.0f} s, torch {torch.__version__}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="mixers,long,peers", help="mixers, long, peers, peer-NAME, or names of models"
    )
    parser.add_argument("--seconds", type=float, default=140, help="start nothing that would end later")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--lock", help="a file: runs that share it compile peers side by side, and measure in turn")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "SVG"), help="draw a run instead")
    given = parser.parse_args()
    if given.plot:
        plot(*given.plot)
        return 0
    bench = Bench(torch.device(given.device), TINY if given.tiny else Sizes(), given.seconds)
    bench.locked = open(given.lock, "w") if given.lock else None  # noqa: SIM115
    bench.copied = copy_speed(bench)
    models, only = variants(bench.sizes), given.only.split(",")
    for unknown in set(Mixer.registry) - set(models) - OTHERS:
        print(f"{unknown:26s} has no sizes here: add it to mixers()", flush=True)
    for wrong in set(only) - set(models) - {"mixers", "long", "peers", *(f"peer-{name}" for name in PEERS)}:
        parser.error(f"unknown model {wrong!r} (known: mixers, long, peers, {', '.join(models)})")
    chosen = [name for name in models if "mixers" in only or name in only]
    chosen = ["attention", *(name for name in chosen if name != "attention")] if chosen else []
    first = [
        name for name in ("attention", "mla", "retention", "gated-retention", "rwkv", "rwkv-both") if name in chosen
    ]
    for name in [*first, *(one for one in chosen if one not in first)]:
        if bench.left < 8:
            print(f"{name:26s} no time left", flush=True)
            continue
        with reported(bench, name):
            measure(bench, name, models[name])
    if "long" in only:
        for name in ("attention", "grouped-queries", "mla", *CONSTANT, "yoco", "window"):
            if bench.left > 6:
                with reported(bench, name):
                    measure_long(bench, name, models[name])
    for name in (name for name in PEERS if "peers" in only or f"peer-{name}" in only):
        if bench.left > (PEER_SECONDS if bench.device.type == "cuda" else 0):
            with reported(bench, f"peer {name}"):
                measure_peer(bench, name, models[PEERS[name]])
    table(bench)
    return int(any("failed" in found for name, found in bench.results.items() if not name.startswith("peer")))


if __name__ == "__main__":
    sys.exit(main())
