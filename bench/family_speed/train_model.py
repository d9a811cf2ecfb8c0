"""What one process of train_gpu.py does: it compiles a model for one length, and measures its training step."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.lab.mixer_sizes import TINY, SkeletonSizes, latent_sizes, mixers, tree, variants
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.tasks.language.causal_lm import CausalLM
from allyouneed.training.backend import Backend
from allyouneed.training.cuda.capture import CapturedUpdates
from allyouneed.training.optim.optimiser import Adam
from allyouneed.training.prefetch import DataPosition, Update
from allyouneed.training.step import fetch_results

TOKENS = 16384  # of a batch, at least
DOCUMENTS = (64, 512)  # lengths in packed rows
# in the order of their importance; LINEAR: faster than attention at 16k tokens
ORDER = (
    "attention", "experts", "mla", "hf mla", "retention", "rwkv", "gated-retention", "performer", "longnet", "infini",
    "alibi", "bigbird", "window", "mamba2", "mamba", "sparse", "t5", "dilated",
)  # fmt: skip
MORE = (  # only by name
    "convolution", "lightweight-convolution", "dynamic-convolution", "lsra", "mixed-chunk", "gau", "mssa", "branches",
    "lsh", "shaw", "transformer-xl", "grouped-queries", "lstm", "gru", "s4",
)  # fmt: skip
LINEAR = (
    "retention", "gated-retention", "rwkv", "performer", "infini", "mamba", "mamba2", "window", "longnet", "bigbird",
    "sparse", "dilated",
)  # fmt: skip


def models(s: SkeletonSizes, length: int) -> dict[str, dict[str, Any]]:
    known, root = mixers(s), max(2, round(math.sqrt(length)))
    attention, block = known["attention"], s.head
    patterns = {
        "bigbird": f"causal & (block-window({block}, 2) | global-prefix({block}) | random-blocks({block}, 3, 0))",
        "sparse": f"causal & (window({root}) | strided({root}))",
        "dilated": f"causal & dilated({4 * s.head}, 8)",
    }
    known |= {name: attention | {"pattern": pattern} for name, pattern in patterns.items()}
    found = {name: tree(s, known[name]) for name in (*ORDER, *MORE) if name in known}
    found["experts"] = variants(s)["experts"]
    found["hf mla"] = found["mla"]
    return {name: found[name] for name in (*ORDER, *MORE)}


class Trained:
    """What `allyouneed train` does."""

    def __init__(self, keys: dict[str, Any], backend: Backend, batches: list[Batch]) -> None:
        config = parse(Model, keys)  # type: ignore[type-abstract]
        self.model = config.build().to(backend.device).train()
        backend.compile_model(self.model)
        self.updates = CapturedUpdates(self.model, CausalLM(), Adam().build(self.model), 1.0, backend)
        at = DataPosition(0, 0)
        self.steps = [Update([batch], [at], batch.rows.tokens.numel(), at) for batch in batches]
        self.number = 0

    def step(self) -> None:
        self.number += 1
        pending = self.updates.run(self.steps[self.number % len(self.steps)], self.number, 1e-4)
        if self.number in (1, 8):
            (now,) = fetch_results([pending])
            assert now.finite, now

    @property
    def captured(self) -> bool:
        return self.updates.update is not None

    @property
    def obstacle(self) -> str | None:
        return self.updates.obstacle


class HuggingFace:
    """Their model of the same sizes; every layer and the loss compiled."""

    captured, obstacle = False, None

    def __init__(self, s: SkeletonSizes, backend: Backend, batch: Batch) -> None:
        import transformers

        heads = {"num_attention_heads": s.heads, "num_key_value_heads": s.heads}
        config = transformers.DeepseekV3Config(
            vocab_size=s.vocab, hidden_size=s.width, num_hidden_layers=s.layers, tie_word_embeddings=True, **heads,
            intermediate_size=s.hidden, **latent_sizes(s), q_lora_rank=None, first_k_dense_replace=s.layers,
            n_routed_experts=2,
            num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8, use_cache=False,
            max_position_embeddings=max(1024, batch.rows.tokens.shape[1]), pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
        self.model = transformers.DeepseekV3ForCausalLM(config).to(backend.device).train()
        self.backend, self.batch, cuda = backend, batch, backend.cuda
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=cuda)
        self.loss: Callable[..., Any] = self.cross_entropy
        if backend.compiled:
            self.loss = torch.compile(self.cross_entropy)
            for layer in self.model.model.layers:
                layer.compile()

    def cross_entropy(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model.lm_head(hidden).float().flatten(0, 1), labels.flatten())

    def step(self) -> None:
        assert self.batch.labels is not None
        with torch.autocast(self.backend.device.type, torch.bfloat16):
            hidden = self.model.model(self.batch.rows.tokens).last_hidden_state
            loss = self.loss(hidden, self.batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


def batch_of(s: SkeletonSizes, rows: int, length: int, given: argparse.Namespace, device: torch.device) -> Batch:
    """Whole rows, or packed ones, whose last document is cut off."""
    text = torch.randint(1, s.vocab, (rows, length + 1), device=device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if not given.packed:
        return Batch(Rows(tokens), labels=labels)
    least, most = (4, 16) if given.tiny else DOCUMENTS
    ends = torch.randint(least, most + 1, (rows, -(-length // least))).cumsum(1)
    segments = torch.searchsorted(ends, torch.arange(length).expand(rows, -1).contiguous(), right=True) + 1
    last = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (0, 1))
    labels[last.to(device)] = IGNORE
    return Batch(Rows(tokens, segments=segments.to(device)), labels=labels)


def batch_tokens(length: int, tiny: bool) -> int:
    return max(length, 64 if tiny else TOKENS)


def child(name: str, length: int, given: argparse.Namespace) -> None:
    """Compile, print a line of JSON, and measure once for each line of seconds read from standard input."""
    begun, s = time.perf_counter(), TINY if given.tiny else SkeletonSizes()
    cuda = given.device == "cuda"
    backend = Backend(torch.device(given.device), bf16=cuda, compiled=cuda, summary="")
    total, keys = batch_tokens(length, given.tiny), models(s, length)[name]
    torch.manual_seed(0)
    batches = [batch_of(s, total // length, length, given, backend.device) for _ in range(4 if given.packed else 1)]

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    try:
        net: Any = HuggingFace(s, backend, batches[0]) if name == "hf mla" else Trained(keys, backend, batches)
        net.step()
        wait()
        compiled = time.perf_counter() - begun
        for _ in range(7):  # warms up and captures
            net.step()
            wait()  # nothing is left for the GPU to do when this process is stopped
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        torch.cuda.empty_cache()
        together = 4 if total <= TOKENS else 1
        say(
            ready=time.perf_counter() - begun,
            compiled=compiled,
            captured=net.captured,
            peak=peak,
            obstacle=net.obstacle,
        )
        for line in sys.stdin:
            steps, start = 0, time.perf_counter()
            while not steps or time.perf_counter() - start < float(line):
                for _ in range(together):
                    net.step()
                wait()
                steps += together
            say(speed=steps * total / (time.perf_counter() - start))
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        text_of = f"{type(failure).__name__}: {str(failure)[:300]} ({Path(where.filename).name}:{where.lineno})"
        say(failed=text_of)
