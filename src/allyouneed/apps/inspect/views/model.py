"""A model as views see it: the predictor, the runs it recorded lately, and where its forward passes run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.inspect.views.input import InputRequest
    from allyouneed.infer.predictors.base import Predictor

T = TypeVar("T")
KEPT = 8  # runs of a model, the latest used
MOST_BYTES = 1 << 30  # of their values together, if there is more than one

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


class ViewModel:
    """`execute`: runs a function where the model's other forward passes run; by default, here. `kept`: the number of
    recorded runs that are kept."""

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        execute: Callable[[Callable[[], Any]], Any] | None = None,
        kept: int = KEPT,
    ) -> None:
        self.name, self.predictor, self.kept = name, predictor, kept
        self._execute = execute
        self._runs: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def compute(self, function: Callable[[], T]) -> T:
        """`function`, where the model's other forward passes run."""
        found: T = function() if self._execute is None else self._execute(function)
        return found

    def record(self, request: InputRequest) -> Any:
        """The recorded run of the input of a request (apps/inspect/inside): from the cache, or computed now."""
        key = request.input_key()
        with self._lock:
            if key in self._runs:
                self._runs.move_to_end(key)
                return self._runs[key]
        run = request.run(self.predictor)
        with self._lock:
            self._runs[key] = run
            while len(self._runs) > self.kept or (len(self._runs) > 1 and self._bytes() > MOST_BYTES):
                self._runs.popitem(last=False)
        return run

    def _bytes(self) -> int:
        return sum(run.bytes for run in self._runs.values())

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
