"""Mamba and Mamba-2 on one GPU in bf16: ours against flash-linear-attention's layers and models, in turns.

    python bench/family_speed/mamba_gpu.py --peer-path FOLDER [--selective-scan FOLDER]
    python bench/family_speed/mamba_gpu.py --tiny --peer-path FOLDER        a rehearsal on CPU

A layer of the 130M sizes (width 768; Mamba: 1,536 features of 16 states; Mamba-2: 24 heads of 64, 128 states): forward
and backward, and prefill with a state, of 16,384 tokens in rows of 2,048 and in one row. Then a whole model of 24 such
layers: tokens per second of greedy decoding, 1 and 64 rows, by our `Engine` and by the peer's `generate`.

Both layers get the same weights; their outputs are compared first. --peer-path: a folder with the packages fla, einops
and mamba_ssm (Python files alone: its kernels for Mamba-2 are Triton). The peer's fast path for Mamba needs mamba_ssm's
CUDA extension: --selective-scan, a folder with its sources (csrc/selective_scan), builds it first; without it the peer
runs its own plain loop over tokens. Which of the two ran is printed. The peer's short convolution is its Triton one.

Of the tile configurations of mamba_ssm's Triton kernels (about 200 in all), the first --configs of each are tried.
A peer that would take longer than LONGEST seconds for one pass, judged by a shorter one, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import override, parse, preset_tree
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.nn.norms import RMSNorm
from allyouneed.nn.sublayer import Mixer

LONGEST = 8.0
Turn = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    width: int = 768
    heads: int = 24
    states: int = 128  # of Mamba-2
    layers: int = 24
    vocab: int = 50280
    shapes: tuple[tuple[int, int], ...] = ((8, 2048), (1, 16384))
    rows: tuple[int, ...] = (1, 64)
    prompt: int = 32
    new: int = 64
    turns: int = 3
    least: float = 0.15  # seconds of a turn


TINY = Sizes("cpu", torch.float32, 32, 4, 16, 2, 100, ((2, 16), (1, 32)), (1, 3), 4, 4, 1, 0.0)


def build_selective_scan(source: Path) -> None:
    """The CUDA extension of mamba_ssm, for this GPU alone."""
    from torch.utils.cpp_extension import load

    start = time.perf_counter()
    folder = source / "csrc" / "selective_scan" if (source / "csrc").exists() else source
    major, minor = torch.cuda.get_device_capability()
    flags = ["-O3", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
    flags += [f"-U__CUDA_NO_{kind}__" for kind in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS",
              "BFLOAT16_CONVERSIONS", "BFLOAT162_OPERATORS", "BFLOAT162_CONVERSIONS")]  # fmt: skip
    flags += ["-gencode", f"arch=compute_{major}{minor},code=sm_{major}{minor}"]
    sources = [str(path) for path in sorted(folder.glob("*.c*")) if path.suffix in (".cpp", ".cu")]
    built = load("selective_scan_cuda", sources, extra_cuda_cflags=flags, extra_include_paths=[str(folder)])
    sys.modules["selective_scan_cuda"] = built
    print(f"mamba_ssm's selective scan built in {time.perf_counter() - start:.0f} s", flush=True)


def limit_configs(count: int) -> None:
    """Limit the peer's kernels to `count` of their tile configurations: each takes about a second to compile."""
    from fla.layers import mamba2  # noqa: F401  # imports them

    for name, module in list(sys.modules.items()):
        for part in vars(module).values() if name.startswith("mamba_ssm.ops.triton") else ():
            while part is not None:
                if isinstance(getattr(part, "configs", None), list):
                    part.configs = part.configs[:count]
                part = getattr(part, "fn", None)


# --- one layer --------------------------------------------------------------------------------------------------------


def our_layer(kind: str, sizes: Sizes) -> nn.Module:
    keys: dict[str, Any] = {"kind": kind}
    if kind == "mamba2":
        keys |= {"heads": sizes.heads, "state": sizes.states}
    torch.manual_seed(0)
    config = parse(Mixer, keys)  # type: ignore[type-abstract]
    return config.build(Common(width=sizes.width, norm=RMSNorm(eps=1e-5))).to(sizes.device, sizes.dtype)


def their_layer(kind: str, sizes: Sizes, own: nn.Module) -> nn.Module:
    """With the weights of ours."""
    from fla.layers import mamba, mamba2

    if kind == "mamba":
        mamba.is_fast_path_available = "selective_scan_cuda" in sys.modules
        layer: nn.Module = mamba.Mamba(sizes.width, intermediate_size=2 * sizes.width, layer_idx=0)
        names = {"in_proj": "up", "x_proj": "select", "out_proj": "out"}
        rest = {"dt_proj.weight": own.step_map, "dt_proj.bias": own.step_bias}
    else:
        mamba2.is_fast_path_available &= sizes.device == "cuda"
        width = 2 * sizes.width // sizes.heads
        layer = mamba2.Mamba2(sizes.heads, width, sizes.width, sizes.states, layer_idx=0)
        names = {"in_proj": "up", "out_proj": "out", "norm": "norm"}
        rest = {"dt_bias": own.step_bias}
    theirs = dict(layer.named_parameters())
    ours = dict(own.named_parameters())
    pairs = {f"{name}.weight": ours[f"{part}.weight"] for name, part in names.items()} | rest
    pairs |= {"A_log": own.a_log, "D": own.skip, "conv1d.bias": own.convolution.shift}
    pairs["conv1d.weight"] = own.convolution.taps[:, None]
    assert pairs.keys() == theirs.keys(), pairs.keys() ^ theirs.keys()
    with torch.no_grad():
        for name, value in pairs.items():
            theirs[name].copy_(value)
    if sizes.device == "cpu":
        without_triton(layer)
    return layer.to(sizes.device, sizes.dtype).train()


def without_triton(model: nn.Module) -> None:
    """For the rehearsal on CPU: the peer's activations and gated norms as torch has them."""
    for part in model.modules():
        if hasattr(part, "act"):
            part.act = nn.functional.silu
        if type(part).__name__ == "RMSNormGated":
            part.forward = (
                lambda y, z, weight=part.weight: nn.functional.rms_norm(  # type: ignore[method-assign]
                    y * nn.functional.silu(z), y.shape[-1:], weight, 1e-5
                )
            )


def context_of(x: Tensor) -> Context:
    return Context(TokenLayout.of(Rows(torch.ones(x.shape[:2], dtype=torch.long, device=x.device))))


def layer_jobs(kind: str, sizes: Sizes, rows: int, length: int) -> dict[str, dict[str, Turn]]:
    own = our_layer(kind, sizes)
    other = their_layer(kind, sizes, own)
    torch.manual_seed(1)
    x = torch.randn(rows, length, sizes.width, device=sizes.device).to(sizes.dtype).requires_grad_()
    gradient = torch.randn_like(x)
    context = context_of(x)

    def ours() -> Tensor:
        found: Tensor = own(x, context)
        return found

    def theirs() -> Tensor:  # with use_cache, since their fused form for training needs causal_conv1d's CUDA code
        found: Tensor = other(x, use_cache=True)[0]
        return found

    def trained(run: Callable[[], Tensor]) -> Turn:
        return lambda: run().backward(gradient)

    @torch.no_grad()
    def our_prefill() -> None:
        own(x, context, own.new_state())

    @torch.no_grad()
    def their_prefill() -> None:
        other(x, use_cache=True)

    with torch.no_grad():
        if rows * length <= sizes.shapes[0][0] * sizes.shapes[0][1]:
            some = slice(0, 1), slice(0, min(length, 512))
            short = x[some]
            a, b = own(short, context_of(short)), other(short, use_cache=True)[0]
            print(f"{kind}: outputs differ by {float((a - b).norm() / b.norm()):.1e} of their norm", flush=True)
    return {
        f"{kind}, forward and backward, {rows} × {length:,}": {"ours": trained(ours), "theirs": trained(theirs)},
        f"{kind}, prefill, {rows} × {length:,}": {"ours": our_prefill, "theirs": their_prefill},
    }


# --- a whole model ----------------------------------------------------------------------------------------------------


def decode_jobs(kind: str, sizes: Sizes, rows: int) -> dict[str, dict[str, Turn]]:
    torch.manual_seed(0)
    texts = torch.randint(3, sizes.vocab, (rows, sizes.prompt), device=sizes.device)

    changes = [f"vocab={sizes.vocab}", f"width={sizes.width}", f"decoder[0].repeat={sizes.layers}"]
    if kind == "mamba2":
        changes += [f"decoder[0].mixer.{key}" for key in (f"heads={sizes.heads}", f"state={sizes.states}")]
    with torch.device(sizes.device):
        model = parse(Model, override(preset_tree(f"{kind}-130m"), changes)).build().to(sizes.dtype)  # type: ignore[type-abstract]
    engine = Engine(model, bos=1, eos=2, pad=0, budget=64 * 1024)
    decoding = Decoding(method="greedy", min_length=sizes.new, max_length=sizes.new)
    given = texts.tolist()

    def theirs() -> Turn:
        common = {"hidden_size": sizes.width, "num_hidden_layers": sizes.layers, "vocab_size": sizes.vocab}
        common |= {"tie_word_embeddings": True, "fuse_norm": sizes.device == "cuda"}
        peer: Any
        with torch.device(sizes.device):
            if kind == "mamba":
                from fla.models.mamba import MambaConfig, MambaForCausalLM

                peer = MambaForCausalLM(MambaConfig(intermediate_size=2 * sizes.width, **common))
            else:
                from fla.models.mamba2 import Mamba2Config, Mamba2ForCausalLM

                shape = {"num_heads": sizes.heads, "head_dim": 2 * sizes.width // sizes.heads}
                peer = Mamba2ForCausalLM(Mamba2Config(state_size=sizes.states, **shape, **common))
        if sizes.device == "cpu":
            without_triton(peer)
        peer = peer.to(sizes.dtype).eval()
        options = {"min_new_tokens": sizes.new, "max_new_tokens": sizes.new, "do_sample": False}
        return lambda: peer.generate(texts, attention_mask=torch.ones_like(texts), **options)

    return {f"{kind}, decoding, {rows} rows": {"ours": lambda: engine.complete(given, decoding), "theirs": theirs()}}


# --- turns ------------------------------------------------------------------------------------------------------------


def timed(turn: Turn, sizes: Sizes, least: float = 0.0) -> float:
    """Seconds per call, over calls that take at least `least` seconds together."""
    wait = torch.cuda.synchronize if sizes.device == "cuda" else lambda: None
    wait()
    start, calls, taken = time.perf_counter(), 0, 0.0
    while not calls or taken < least:
        turn()
        wait()
        calls, taken = calls + 1, time.perf_counter() - start
    return taken / calls


def measure(name: str, turns: dict[str, Turn], tokens: int, sizes: Sizes) -> float:
    """Print a line; gives the peer's seconds."""
    found: dict[str, list[float]] = {}
    for peer, turn in turns.items():
        try:
            timed(turn, sizes)  # compiles, and tries tiles
            second = timed(turn, sizes)
            found[peer] = [second] if second > 1 else []
        except Exception as error:  # a peer may lack what its kernels need
            print(f"{name}: {peer} failed: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    for _ in range(sizes.turns):
        for peer, values in found.items():
            if peer == "ours" or not values or statistics.median(values) < 1:
                values.append(timed(turns[peer], sizes, sizes.least))
    seconds = {peer: min(values) if len(values) < 3 else statistics.median(values) for peer, values in found.items()}
    words = "   ".join(f"{peer} {tokens / value:12,.0f} tokens/s" for peer, value in seconds.items())
    ratio = f"   ratio {seconds['theirs'] / seconds['ours']:.2f}" if len(seconds) == 2 else ""
    print(f"{name:48s} {words}{ratio}", flush=True)
    return seconds.get("theirs", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-path", type=Path, help="a folder with the packages of the peer")
    parser.add_argument("--selective-scan", type=Path, help="sources of mamba_ssm's CUDA extension")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on CPU")
    parser.add_argument("--configs", type=int, default=2, help="tile configurations that the peer tries; 0: all")
    parser.add_argument("--only", choices=["mamba", "mamba2"], help="one of the two")
    given = parser.parse_args()
    sizes = TINY if given.tiny else Sizes()
    if given.peer_path is not None:
        sys.path.append(str(given.peer_path))
    if given.selective_scan is not None:
        build_selective_scan(given.selective_scan)
    start = time.perf_counter()
    import fla
    import triton

    if given.configs:
        limit_configs(given.configs)
    name = torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, fla {fla.__version__}")
    for kind in ("mamba", "mamba2") if given.only is None else (given.only,):
        plain = kind == "mamba" and "selective_scan_cuda" not in sys.modules
        path = "its plain loop over tokens" if plain else "the kernels of mamba_ssm"
        print(f"{kind}: the peer runs {path}", flush=True)
        taken: dict[str, float] = {}
        for rows, length in sizes.shapes:
            for job, turns in layer_jobs(kind, sizes, rows, length).items():
                what = job.split(",")[1]
                if plain and taken.get(what, 0.0) * length / sizes.shapes[0][1] > LONGEST:
                    print(f"{job}: the peer would take about {taken[what] * length / sizes.shapes[0][1]:.0f} s")
                    turns.pop("theirs")
                taken[what] = measure(job, turns, rows * length, sizes)
        for rows in sizes.rows:
            for job, turns in decode_jobs(kind, sizes, rows).items():
                measure(job, turns, rows * sizes.new, sizes)
        if sizes.device == "cuda":
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
