"""GET /healthz (the process is alive), /readyz (it answers requests), /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.serve.responses import to_json

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    state = request.app.state
    phase = "stopping" if state.gate.draining else state.registry.phase
    status = 200 if phase == "ready" else 503
    return Response(to_json({"status": phase}), status, media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
