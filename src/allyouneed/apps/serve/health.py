"""GET /healthz (the process need not be started again), /readyz (it answers requests), /metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.responses import to_json

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """503 once an engine has been stuck for longer than any request waits for its answer."""
    state = request.app.state
    since = state.registry.stuck_since
    stuck = since is not None and time.monotonic() - since > state.settings.limits.request_seconds
    content = {"status": state.registry.phase if stuck else "ok"}
    return Response(to_json(content), 503 if stuck else 200, media_type="application/json")


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    state = request.app.state
    phase = "stopping" if state.gate.draining else state.registry.phase
    found: dict[str, Any] = {"status": phase}
    if state.phases is not None:  # ready when all workers are: any of them may get the next request
        found["workers"] = workers = state.phases.read()
        others = (f"worker {n}: {one['status']}" for n, one in enumerate(workers) if one["status"] != "ready")
        found["status"] = phase if phase != "ready" else next(others, phase)
    status = 200 if found["status"] == "ready" else 503
    return Response(to_json(found), status, media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
