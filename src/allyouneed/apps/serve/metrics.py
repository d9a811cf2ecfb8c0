"""Metrics for Prometheus, under the names of vLLM's, so that its dashboards show this server too."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from allyouneed.apps.serve.workers.phases import FOLDER_VARIABLE

if TYPE_CHECKING:
    from allyouneed.infer.scheduler import Scheduler

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

Sum, Largest = partial(Gauge, multiprocess_mode="livesum"), partial(Gauge, multiprocess_mode="livemax")


# of a scheduler so far: preempted requests; prompt tokens looked up in the prefix cache, and found
BlockTotals = tuple[int, int, int]


class ModelMetrics(NamedTuple):
    """Those of one model, looked up once: its engine loop counts every sequence."""

    running: Gauge
    waiting: Gauge
    prompt_tokens: Counter
    generated_tokens: Counter
    finished: Callable[[str], Counter]  # by reason
    first_token: Histogram
    token: Histogram
    latency: Histogram


class Metrics:
    """One registry per server. Of several workers, each counts in files of a folder that all read
    (PROMETHEUS_MULTIPROC_DIR, set by the supervisor), and any of them reports the sums; the share of blocks in use is
    the largest of all."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        label = ["model_name"]
        counts, times = (
            partial(Counter, labelnames=label, registry=own),
            partial(Histogram, labelnames=label, registry=own),
        )
        sums, largest = partial(Sum, labelnames=label, registry=own), partial(Largest, labelnames=label, registry=own)
        self.running = sums("vllm:num_requests_running", "sequences being decoded")
        self.waiting = sums("vllm:num_requests_waiting", "sequences waiting to be decoded")
        self.prompt_tokens = counts("vllm:prompt_tokens", "prompt tokens read")
        self.generated_tokens = counts("vllm:generation_tokens", "tokens generated")
        self.preemptions = counts("vllm:num_preemptions", "requests preempted")
        self.cache_usage = largest("vllm:kv_cache_usage_perc", "share of the blocks that requests hold, 0 to 1")
        self.cache_config = Largest(
            "vllm:cache_config_info", "1", [*label, "block_size", "num_gpu_blocks"], registry=own
        )
        used = "blocks: used by requests, cached prefixes of prompts, free"
        self.blocks = Sum("allyouneed:kv_cache_blocks", used, [*label, "state"], registry=own)
        prefixes = "keys and values of cached prefixes that no request uses; limit: the most of them"
        self.prefix_bytes = Sum("allyouneed:prefix_cache_bytes", prefixes, [*label, "state"], registry=own)
        self.prefix_queries = counts("vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache")
        self.prefix_hits = counts("vllm:prefix_cache_hits", "prompt tokens found in the prefix cache")
        self.finished = Counter("vllm:request_success", "finished sequences", [*label, "finished_reason"], registry=own)
        self.first_token = times("vllm:time_to_first_token_seconds", "until the first token", buckets=LATENCIES)
        between = "between tokens, mean of a sequence"
        self.token = times("vllm:time_per_output_token_seconds", between, buckets=TOKEN_LATENCIES)
        self.latency = times("vllm:e2e_request_latency_seconds", "of whole sequences", buckets=LATENCIES)
        late = "of a step beyond the limit, or since the engine ended; else 0"
        self.stuck = largest("allyouneed:engine_stuck_seconds", late)
        self.loaded = sums("allyouneed:model_bytes", "weights of a loaded model")
        self.requests = Counter("allyouneed:http_requests", "HTTP requests", ["method", "status"], registry=own)
        self.request_seconds = Histogram(
            "allyouneed:http_request_seconds", "HTTP requests, all routes", buckets=LATENCIES, registry=own
        )

    def of_model(self, name: str) -> ModelMetrics:
        own = {one: getattr(self, one).labels(name) for one in ModelMetrics._fields if one != "finished"}
        return ModelMetrics(finished=cache(lambda reason: self.finished.labels(name, reason)), **own)

    def report_blocks(self, model: str, scheduler: Scheduler, before: BlockTotals) -> BlockTotals:
        """What the blocks of a paged scheduler are used for, and what was counted since `before`. Blocks of cached
        prefixes that no request uses are not part of the usage: they are evicted when blocks are needed."""
        assert scheduler.blocks is not None
        pool, prefixes = scheduler.blocks.pool, scheduler.blocks.prefixes
        used = pool.blocks - len(pool.free) - pool.evictable
        self.prefix_bytes.labels(model, "used").set(pool.evictable * scheduler.blocks.block_bytes)
        self.prefix_bytes.labels(model, "limit").set(pool.most_evictable * scheduler.blocks.block_bytes)
        for state, count in (("used", used), ("cached", pool.evictable), ("free", len(pool.free))):
            self.blocks.labels(model, state).set(count)
        self.cache_usage.labels(model).set(used / max(1, pool.blocks))
        self.cache_config.labels(model, str(pool.size), str(pool.blocks)).set(1)
        now = scheduler.preemptions, prefixes.prompt_tokens, prefixes.hits
        for counter, old, new in zip(
            (self.preemptions, self.prefix_queries, self.prefix_hits), before, now, strict=True
        ):
            if new > old:
                counter.labels(model).inc(new - old)
        return now

    def answered(self, method: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
        self.requests.labels(known, str(status or "left")).inc()
        self.request_seconds.observe(seconds)

    def text(self) -> bytes:
        registry = self.registry
        if FOLDER_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)
