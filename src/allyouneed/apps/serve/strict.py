"""Types of request fields: a number is a number, finite and in range; `true` and "5" are not numbers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints, model_validator
from pydantic_core import CoreSchema

from allyouneed.apps.serve.unknown_fields import check_fields

INT64 = 1 << 63

Int = Annotated[int, Field(strict=True, ge=-INT64, lt=INT64)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e9, le=1e9)]
Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, StringConstraints(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
Count = Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
Probability = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


IGNORED = "accepted and ignored"
Ignored = Annotated[Any, Field(default=None, description=IGNORED)]


def _fail_fast(schema: Any) -> None:
    """Let every list in a schema be refused at its first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class RequestBody(BaseModel):
    """A request of an API. Unknown fields are ignored; those that look misspelt are refused (unknown_fields.py). Of a
    list, the first wrong item is reported: a body may have a million."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    model_config = ConfigDict(extra="ignore", protected_namespaces=(), regex_engine="rust-regex")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and set(map(type, given)) <= {str}:
            check_fields(given, cls.model_fields, cls.ignored)
        return given

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.ignored = frozenset(name for name, field in cls.model_fields.items() if field.description == IGNORED)
