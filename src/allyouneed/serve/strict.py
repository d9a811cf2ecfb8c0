"""Types of request fields: a number is a number, finite and in range; `true` and "5" are not numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

INT64 = 1 << 63

Int = Annotated[int, Field(strict=True, ge=-INT64, lt=INT64)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e9, le=1e9)]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, StringConstraints(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
Probability = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class RequestBody(BaseModel):
    """A request of an API: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), regex_engine="rust-regex")


Ignored = Annotated[Any, Field(default=None, description="accepted and ignored")]
