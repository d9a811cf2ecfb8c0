"""Why this word? What the choice of an answer rests on, and when the model made it.

data: {
  "tokens", "answers",                                 # as in the walk; `answer` is an index of answers
  "answer": 4, "method": "causal", "unit": "token",
  "units": [{"name": "encoder" or a site, "tokens": [3], "label": "很有趣", "value": 5.31}],
       # causal: log p of the answer − log p without it (positive: it spoke for the answer)
       # logits: what it adds to the logit; they sum to `total`
       # attention, rollout: shares
  "total": log p of the answer, or its logit, "residual": |sum − logit| / largest |logit|, or null,
  "methods": [{"method", "units": ["token", …], "problem": null or why it is not available}],
  "lens": [{"site": "decoder.0", "candidates": [{"id", "text", "log_prob"}]}]     # top five after each block
}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from allyouneed.apps.inspect.inside.effects import UNITS
from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.inside.why import METHODS, attribution_problem
from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import Index, ViewModel
from allyouneed.apps.inspect.views.walk import answers_data, media_data, tokens_data
from allyouneed.errors import UserError


class WhyRequest(InputRequest):
    """`answer`: number of the answer to explain, from 0."""

    answer: Index = 0
    method: Literal["causal", "attention", "rollout", "logits"] = "causal"
    unit: Literal["token", "head", "sublayer", "block"] = "token"


def follow(sent: Document) -> Iterator[tuple[str, Document]]:
    """The other words; then the other methods and units, word by word."""
    data = sent["data"]
    pairs = [(one["method"], unit) for one in data["methods"] if not one["problem"] for unit in one["units"]]
    answers = [data["answer"], *(n for n in range(len(data["answers"])) if n != data["answer"])]
    for method, unit in sorted(pairs, key=lambda pair: pair != (data["method"], data["unit"])):
        for answer in answers:
            if (answer, method, unit) != (data["answer"], data["method"], data["unit"]):
                yield "why", {"answer": answer, "method": method, "unit": unit}


@view("why", WhyRequest, follow=follow)
def why(model: ViewModel, request: WhyRequest) -> Document:
    run: Run = model.record(request)
    found = run.why(request.answer, request.method, request.unit)
    data: Document = {
        "tokens": tokens_data(run),
        "media": media_data(run),
        "answers": answers_data(run),
        "answer": request.answer,
        "method": found.method,
        "unit": found.unit,
        "units": [unit._asdict() | {"tokens": list(unit.tokens)} for unit in found.units],
        "total": found.total,
        "residual": found.residual,
        "methods": methods_data(run),
        "lens": lens_data(run, request.answer),
    }
    chosen = f"{request.answer}, method={request.method!r}, unit={found.unit!r}"
    return document("why", model, request, f"{run.python}.why({chosen})", data)


def methods_data(run: Run) -> list[Document]:
    problems = {"logits": attribution_problem(run)}
    units = {"causal": list(UNITS), "logits": list(UNITS[1:])}
    if not any(name.endswith(".heads") and len(shape) == 4 for name, shape in run.names.items()):
        units["causal"].remove("head")
    return [
        {"method": method, "units": units.get(method, ["token"]), "problem": problems.get(method)} for method in METHODS
    ]


def lens_data(run: Run, answer: int) -> list[Document]:
    try:
        found = run.lens(answer)
    except UserError:  # similarities have no candidates
        return []
    return [{"site": site, "candidates": [one._asdict() for one in best]} for site, best in found.items()]
