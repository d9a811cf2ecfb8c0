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

    from allyouneed.apps.inspect.views.model import ViewModel, ViewRequest

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
    """Windows of `factor` numbers along an axis; the last may be shorter."""
    if factor == 1:
        return values
    import torch

    whole = values.shape[axis] // factor
    parts = [values.narrow(axis, 0, whole * factor).unflatten(axis, (whole, factor))]
    if whole * factor < values.shape[axis]:
        parts.append(values.narrow(axis, whole * factor, values.shape[axis] - whole * factor).unsqueeze(axis))
    return torch.cat([_reduce(part, axis + 1, by) for part in parts], axis)


def _reduce(values: Tensor, axis: int, by: str) -> Tensor:
    if by == "mean":
        return values.mean(axis)
    low, high = values.aminmax(dim=axis)
    return low.where(-low > high, high)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().numpy().astype("<f4", copy=False).tobytes()


def numbers(sent: Document) -> Tensor:
    """The tensor that was sent."""
    import numpy as np
    import torch

    flat = np.frombuffer(base64.b64decode(sent["base64"]), "<f4").astype("float32")
    return torch.from_numpy(flat).view(sent["shape"])
