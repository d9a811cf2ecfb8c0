"""Truth: the largest difference of every value that the page shows from a plain recomputation in float64.

data: {
  "sites": [{"name", "shape", "largest": largest |value|, "difference": largest |difference|}],
  "worst": name of the site with the largest relative difference, "relative": that difference / largest |value|,
  "stored": null or how it is stored,      # quantized models also round their activations; the difference shows it
  "answers": {"same": 7, "of": 7}          # choices that the float64 run makes as well
}
"""

from __future__ import annotations

from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.nn.models.precision import stored_as


@view("truth", InputRequest)
def truth(model: ViewModel, request: InputRequest) -> Document:
    run: Run = model.record(request)
    sites = [
        {"name": name, "shape": list(run.names[name]), "largest": run.largest(name), "difference": difference}
        for name, difference in run.truth().items()
    ]
    relative = {str(site["name"]): _ratio(site) for site in sites}
    worst = max(relative, key=lambda name: relative[name])
    exact = run.exact_answers()
    data = {
        "sites": sites,
        "worst": worst,
        "relative": relative[worst],
        "stored": stored_as(run.model),
        "answers": {"same": sum(exact), "of": len(exact)},
    }
    return document("truth", model, request, f"{run.python}.truth()", data)


def _ratio(site: Document) -> float:
    return float(site["difference"]) / max(float(site["largest"]), 1e-30)
