"""Engines of small random models of many kinds, requests for them, and ways to decode them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
import torch

from allyouneed.config import override, parse, preset_tree
from allyouneed.infer.cuda_graph import runner
from allyouneed.infer.cuda_graph.prefill import PrefillRunner, PrefillSize
from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import Draft, DraftModel, PromptLookup
from allyouneed.nn.models.base import Model
from toy_models import BOS, EOS, PAD, VOCAB, random_model

SMALL = [
    f"vocab={VOCAB}",
    "width=32",
    "decoder[0].repeat=2",
    "decoder[0].mixer.heads=4",
    "decoder[0].channel.hidden=48",
]
CROSS = ["encoder[0].repeat=1", "encoder[0].mixer.heads=4", "encoder[0].channel.hidden=48", "decoder[0].cross.heads=4"]
MODELS = {
    "gpt2": ("gpt2", [*SMALL, "embed.positions.length=40"]),
    "llama": ("llama-15m", SMALL),
    "grouped": ("llama-15m", [*SMALL, "decoder[0].mixer.kv_heads=2", "embed.tied=false"]),
    "interleaved": ("llama-15m", [*SMALL, "decoder[0].mixer.positions={kind: rotary, order: interleaved}"]),
    "parallel": ("gpt2", [*SMALL, "decoder[0].wiring=parallel"]),
    "qk-norm": ("llama-15m", [*SMALL, "decoder[0].mixer.qk_norm={kind: rms}"]),
    "alibi": ("bloom-560m", SMALL),
    "window": ("llama-15m", [*SMALL, "decoder[0].mixer.pattern=causal & window(5)"]),
    "wide-window": ("llama-15m", [*SMALL, "decoder[0].mixer.pattern=causal & window(999)"]),
    "prefix": ("llama-15m", [*SMALL, "decoder[0].mixer.pattern=causal & (window(4) | prefix(2))"]),
    "translation": ("transformer-tiny", []),
    "t5": ("t5-small", [*SMALL, *CROSS, "encoder[0].mixer.head_width=8", "decoder[0].mixer.head_width=8",
                        "decoder[0].cross.head_width=8"]),
    "retention": ("llama-15m", [*SMALL, "decoder[0].mixer={kind: retention, heads: 4}"]),
    "rwkv": ("rwkv-4-169m", [f"vocab={VOCAB}", "width=32", "decoder[0].repeat=2", "decoder[0].channel.hidden=48"]),
    "mla": ("llama-15m", [*SMALL, "decoder[0].mixer={kind: mla, heads: 4, kv_rank: 16, nope_width: 8, rope_width: 4, "
                          "value_width: 8, pattern: causal}"]),
    "infini": ("llama-15m", [*SMALL, "decoder[0].mixer={kind: infini, heads: 4, segment: 6}"]),
    "gau": ("llama-15m", [*SMALL, "decoder[0].mixer={kind: gau, key_width: 8, pattern: causal}"]),
}  # fmt: skip
SEEN_PROMPT = ("llama-15m", [*SMALL, "decoder[0].mixer.pattern=causal | prompt"])
DECODINGS = {
    "beam": Decoding(beam=3, best=3, max_length=13),
    "early": Decoding(beam=2, early=True, penalty="power", max_length=11),
    "greedy": Decoding(method="greedy", max_length=21),
    "draws": Decoding(method="sample", best=2, top_k=20, top_p=0.9, temperature=0.7, seed=5, max_length=12),
    "sample": Decoding(method="sample", min_p=0.1, seed=3, max_length=17),
    "least": Decoding(method="greedy", min_length=6, max_length=12),
    "least-beam": Decoding(beam=3, min_length=4, max_length=12),
    "penalties": Decoding(method="sample", repetition_penalty=1.4, no_repeat=2, min_p=0.05, seed=7, max_length=15),
    "penalties-beam": Decoding(beam=3, repetition_penalty=1.3, no_repeat=3, max_length=13),
}
DRAFTED = ("greedy", "draws", "sample", "least", "penalties")  # of these, with a draft


def engine_of(name: str, **more: Any) -> Engine:
    """Sharp random weights, so that no two tokens are nearly equal, and answers of many lengths."""
    if name == "translation":
        return with_graphs(Engine(random_model(ends=5.0), BOS, EOS, PAD, [PAD, BOS], **more))
    preset, changes = SEEN_PROMPT if name == "seen-prompt" else MODELS[name]
    torch.manual_seed(3)
    model: Any = parse(Model, override(preset_tree(preset), [*changes, "dropout=0"])).build().eval()  # type: ignore[type-abstract]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0 if name != "t5" else 1.5)
        model.embed.tokens.weight[EOS] *= 1.5
    limit = model.config.limit
    return with_graphs(Engine(model, BOS, EOS, PAD, [PAD, BOS], limit=limit, **more))


def with_graphs(engine: Engine) -> Engine:
    """The engine with a cache of graph runners, which it has by itself on a GPU only."""
    engine._graphs = GraphRunnerCache(engine.runner)
    return engine


def draft_engine(engine: Engine, noise: float = 0.02, limit: int | None = None) -> Engine:
    """An engine whose model differs a little."""
    model = deepcopy(engine.model)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    return Engine(model, BOS, EOS, PAD, [PAD, BOS], limit=engine.runner.limit if limit is None else limit)


def drafts_of(engine: Engine, ahead: int = 3) -> dict[str, Draft]:
    return {"lookup": PromptLookup(ahead), "model": DraftModel(draft_engine(engine).runner, ahead)}


class Stop:
    reach = 2

    def __call__(self, tokens: Any) -> bool:
        return sum(tokens[-2:]) % 7 == 3


class Processor:
    """Makes tokens that depend on the text less likely, and counts its calls. `cut`: columns at the end."""

    calls = cut = 0

    def __call__(self, logits: Any, tokens: Any) -> Any:
        assert logits.shape[0] == tokens.shape[0]
        self.calls += 1
        sums = tokens.sum(1, keepdim=True) + torch.arange(logits.shape[1], device=logits.device)
        return (logits - 5.0 * (sums % 3 == tokens.shape[1] % 3))[:, : logits.shape[1] - self.cut]


class Rules:
    """OpenAI's logit bias and penalties, as the server sets them (apps/serve/engine/logits_rules.py)."""

    bias: ClassVar[dict[int, float]] = {3: 4.0, 9: -100.0, 21: 2.5}
    presence, frequency, records = 0.7, 1.1, False

    def __call__(self, logits: Any, tokens: Any) -> Any:
        logits = logits.clone()
        for row, past in zip(logits, tokens.tolist(), strict=True):
            for token, value in self.bias.items():
                row[token] += value
            for token in set(past):
                row[token] -= self.presence + self.frequency * past.count(token)
        return logits


def ruled(engine: Engine, requests: list[Request]) -> dict[str, tuple[DecodingSpec, list[Request]]]:
    """Ways to decode in which the host takes part in every step, or rows have rules of their own."""
    spec, stopped = engine.runner.spec, [request._replace(stop=Stop()) for request in requests]
    return {
        "processor, beam": (replace(spec(DECODINGS["penalties-beam"]), logits_processor=Processor()), requests),
        "processor, draws": (replace(spec(DECODINGS["draws"]), logits_processor=Processor()), requests),
        "bias, beam": (replace(spec(DECODINGS["beam"]), logits_processor=Rules()), requests),
        "bias, draws": (replace(spec(DECODINGS["draws"]), logits_processor=Rules()), requests),
        "stop, beam": (spec(DECODINGS["beam"]), stopped),
        "stop, greedy": (spec(DECODINGS["greedy"]), stopped),
    }


def make_requests(engine: Engine, count: int = 11) -> list[Request]:
    dice = Random(2)
    texts = [[dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 9))] for _ in range(count)]
    if engine.model.config.kind == "encoder-decoder":
        return [Request([BOS], 20, (n,), [*text, EOS]) for n, text in enumerate(texts)]
    return [Request([BOS, *text] if n % 4 else [BOS], 20, (n,)) for n, text in enumerate(texts)]


def decode_in_slots(
    engine: Engine, requests: list[Request], decoding: Decoding | DecodingSpec
) -> list[list[Hypothesis]]:
    """By a graph runner, as on a GPU."""
    spec = engine.runner.spec(decoding) if isinstance(decoding, Decoding) else decoding
    assert engine.graphs.suits(spec, requests)
    states = [RequestState(request, spec, engine.runner.token_limit(request)) for request in requests]
    batch = engine.graphs.batch(sorted(states, key=lambda state: -state.request.size))
    with torch.inference_mode():
        while batch.active:
            batch.step()
    batch.close()
    return [state.hypotheses for state in states]


def cancel_second(
    engine: Engine, requests: list[Request], spec: DecodingSpec, received: dict[int, list[int]]
) -> list[RequestState]:
    """Decode up to 25 tokens of each in one batch; the second is cancelled as soon as it has received some."""
    states = [RequestState(request, spec, 25, streams=True) for request in requests]
    batch = engine.graphs.batch(states)
    with torch.inference_mode():
        while batch.active:
            batch.step()
            if received[1]:
                states[1].cancel()
    return states


def few_slots(patch: pytest.MonkeyPatch, rows: int = 8) -> None:
    """Runners of few rows, so that slots are reused, and of small caches."""
    patch.setattr(runner, "MAX_ROWS", rows)
    patch.setattr(runner, "MIN_CAPACITY", 32)


def admit_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Graph runners take every request that suits them, though the device is a CPU."""
    patch.setattr(ModelRunner, "captures", True)
    patch.setattr(
        GraphRunnerCache, "admits", lambda self, some: self.suits(some[0].spec, [state.request for state in some])
    )


def decode_alone(engine: Engine, request: Request, decoding: Decoding) -> list[list[tuple[list[int], bool]]]:
    """By the plain engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunnerCache, "admits", lambda *_: False)
        return token_lists(engine.decode([request], decoding))


def prefill_sizes(patch: pytest.MonkeyPatch) -> list[PrefillSize]:
    """The sizes of the prefills that run as one graph from now on."""
    found: list[PrefillSize] = []
    fill = PrefillRunner.fill_slots
    patch.setattr(
        PrefillRunner, "fill_slots", lambda self, inputs, size: (found.append(size), fill(self, inputs, size))[1]
    )
    return found


def token_lists(answers: list[list[Hypothesis]]) -> list[list[tuple[list[int], bool]]]:
    return [[(one.tokens, one.finished) for one in hypotheses] for hypotheses in answers]
