"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

router = APIRouter(tags=["OpenAI"])


async def describe(registry: Any, name: str) -> dict[str, Any]:
    entry = registry.find(name)
    facts = await registry.facts(entry)
    return {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "allyouneed",
        "root": entry.name,
        "max_model_len": facts["max_model_len"],
        "task": facts["task"],
    }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    registry = request.app.state.registry
    names = [*registry.entries, *registry.aliases]
    return {"object": "list", "data": [await describe(registry, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    return await describe(request.app.state.registry, name)
