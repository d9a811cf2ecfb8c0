"""Metrics for Prometheus, under the names of vLLM's, so that its dashboards show this server too."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """One registry per server."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        label = ["model_name"]
        self.running = Gauge("vllm:num_requests_running", "sequences being decoded", label, registry=own)
        self.waiting = Gauge("vllm:num_requests_waiting", "sequences waiting to be decoded", label, registry=own)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "prompt tokens read", label, registry=own)
        self.generated_tokens = Counter("vllm:generation_tokens", "tokens generated", label, registry=own)
        self.preemptions = Gauge("vllm:num_preemptions", "requests preempted so far", label, registry=own)
        self.finished = Counter("vllm:request_success", "finished sequences", [*label, "finished_reason"], registry=own)
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "until the first token", label, buckets=LATENCIES, registry=own
        )
        self.token = Histogram(
            "vllm:time_per_output_token_seconds",
            "between tokens, mean of a sequence",
            label,
            buckets=TOKEN_LATENCIES,
            registry=own,
        )
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds", "of whole sequences", label, buckets=LATENCIES, registry=own
        )
        self.loaded = Gauge("allyouneed:model_bytes", "weights of a loaded model", label, registry=own)
        self.requests = Counter("allyouneed:http_requests", "HTTP requests", ["method", "status"], registry=own)
        self.request_seconds = Histogram(
            "allyouneed:http_request_seconds", "HTTP requests, all routes", buckets=LATENCIES, registry=own
        )

    def answered(self, method: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
        self.requests.labels(known, str(status or "left")).inc()
        self.request_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
