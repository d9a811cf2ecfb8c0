"""Documents: what a view gives to the page, the offline file and the notebook. Plain data, ready for JSON.

    {"view": "walk",
     "model": {"name", "kind", "task", "parameters", "dtype"},
     "request": {…as it was sent…},
     "python": "the line that does the same",
     "data": {…}}

A tensor is {"shape": […], "base64": float32, little-endian}: exact numbers, NaN and infinities included. Where an axis
is longer than `MOST`, neighbours are pooled and the tensor says so: {…, "pooled": [factor of each axis], "by": "max"}.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from allyouneed.look.views.model import ViewModel, ViewRequest

Document = dict[str, Any]
MOST = 1024  # numbers on an axis that are sent exactly


def document(view: str, model: ViewModel | None, request: ViewRequest, python: str, data: Document) -> Document:
    return {
        "view": view,
        "model": None if model is None else model.facts,
        "request": {name: _sent(name, value) for name, value in request.model_dump(exclude_none=True).items()},
        "python": python,
        "data": data,
    }


def _sent(name: str, value: Any) -> Any:
    """A field of the request. Images and sounds are named by their hash: documents are kept in offline files."""
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}" if name in ("image", "sound") else value


def tensor(values: Tensor, most: int = MOST, by: Literal["max", "mean"] = "max") -> Document:
    """Any numbers as float32. `most`: the longest axis that is not pooled; `by`: the largest magnitude of each
    window, with its sign, or the mean."""
    found = values.detach().cpu().float()
    factors = [-(-size // most) if size else 1 for size in found.shape]
    for axis, factor in enumerate(factors):
        found = _pool(found, axis, factor, by)
    sent: Document = {"shape": list(found.shape), "base64": base64.b64encode(_bytes(found)).decode()}
    if any(factor > 1 for factor in factors):
        sent |= {"pooled": factors, "by": by}
    return sent


def _pool(values: Tensor, axis: int, factor: int, by: str) -> Tensor:
    if factor == 1:
        return values
    import torch

    size = values.shape[axis]
    whole = values.movedim(axis, -1)
    if rest := -size % factor:  # the last window is filled up with its last number
        whole = torch.cat((whole, whole[..., -1:].expand(*whole.shape[:-1], rest)), -1)
    windows = whole.unflatten(-1, (-1, factor))
    if by == "max":
        high, low = windows.amax(-1), windows.amin(-1)
        return torch.where(high >= -low, high, low).movedim(-1, axis)
    sums = windows.sum(-1)
    sums[..., -1] -= rest * whole[..., -1]
    counts = torch.full_like(sums, factor)
    counts[..., -1] -= rest
    return (sums / counts).movedim(-1, axis)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().numpy().astype("<f4", copy=False).tobytes()


def numbers(sent: Document) -> Tensor:
    """The tensor that was sent."""
    import numpy as np
    import torch

    flat = np.frombuffer(base64.b64decode(sent["base64"]), "<f4").astype("float32")
    return torch.from_numpy(flat).view(sent["shape"])
