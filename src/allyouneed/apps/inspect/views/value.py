"""One value of a run, whole: what the page downloads as CSV.

data: {"site": "encoder.0.mixer.q", "tensor": all numbers of it, not pooled}
"""

from __future__ import annotations

from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document, tensor
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import Text, ViewModel
from allyouneed.errors import UserError

MOST = 1 << 22  # numbers that are sent


class ValueRequest(InputRequest):
    site: Text


@view("value", ValueRequest)
def value(model: ViewModel, request: ValueRequest) -> Document:
    run = model.record(request)
    found, python = run.shown(request.site), f"{run.python}[{request.site!r}]"
    if found.numel() > MOST:
        raise UserError(f"{request.site}: {found.numel():,} numbers, at most {MOST:,} are sent; in Python: {python}")
    return document("value", model, request, python, {"site": request.site, "tensor": tensor(found, most=MOST)})
