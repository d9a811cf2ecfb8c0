"""GET /healthz (the process is alive), /readyz (it answers requests), /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.responses import to_json

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


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
