"""A model as views see it: the predictor, the runs it recorded lately, and where its forward passes run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.inspect.inside.run import Run
    from allyouneed.apps.inspect.views.input import InputRequest
    from allyouneed.infer.decoding.observe import DecodedRequest
    from allyouneed.infer.predictors.base import Predictor

T = TypeVar("T")
KEPT = 8  # inputs of a model, the latest used
MOST_BYTES = 1 << 30  # of recorded runs together, if there is more than one

Index = Annotated[int, Field(strict=True, ge=-(1 << 31), lt=1 << 31)]
Text = Annotated[str, StringConstraints(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class ViewRequest(BaseModel):
    """What the page asks a view for. `model`: the name of a served model; default: the server's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True)

    model: Text | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Parse JSON or keyword arguments; one error names every field at fault."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise UserError("; ".join(_problems(error, cls))) from None


def _problems(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    lines = []
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            allowed = ", ".join(kind.model_fields)
            lines.append(f"{where}: unknown field (allowed: {allowed})")
        else:
            message = str(problem["msg"]).removeprefix("Value error, ")
            lines.append(f"{where}: {message}" if where else message)
    return list(dict.fromkeys(lines))


class Latest(Generic[T]):
    """The results used last, by key; a missing one is computed. All are of one type, so that one route cannot find what
    another has stored. `size`: the bytes of a result, if `MOST_BYTES` of them are the limit."""

    def __init__(self, count: int, size: Callable[[T], int] | None = None) -> None:
        self.count, self.size = count, size
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = make()
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > self.count or (len(self._kept) > 1 and self.bytes > MOST_BYTES):
                self._kept.popitem(last=False)
        return found

    @property
    def bytes(self) -> int:
        return 0 if self.size is None else sum(map(self.size, self._kept.values()))

    def __len__(self) -> int:
        return len(self._kept)


class ViewModel:
    """`execute`: runs a function where the model's other forward passes run; by default, here. `runs`: recorded runs by
    input; `decoded`: what the engine was asked for an input (use.py)."""

    def __init__(
        self, name: str, predictor: Predictor, execute: Callable[[Callable[[], Any]], Any] | None = None
    ) -> None:
        self.name, self.predictor = name, predictor
        self._execute = execute
        self.runs: Latest[Run] = Latest(KEPT, lambda run: run.bytes)
        self.decoded: Latest[list[DecodedRequest]] = Latest(KEPT)

    def compute(self, function: Callable[[], T]) -> T:
        """`function`, where the model's other forward passes run."""
        return function() if self._execute is None else self._execute(function)

    def record(self, request: InputRequest) -> Run:
        """The recorded run of the input of a request (apps/inspect/inside): from the cache, or computed now."""
        return self.runs.get(request.input_key(), lambda: request.run(self.predictor))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """`model` of a document."""
        predictor = self.predictor
        return {
            "name": self.name,
            "kind": predictor.model.config.kind,
            "task": str(predictor.folder.task["kind"]),
            "parameters": predictor.model.config.cost(1).parameters,
            "dtype": predictor.dtype,
        }
