"""What if? The run again with something changed, and what that does to the answers.

data: {
  "tokens": of the changed run, "tokens_before": of the original, "media",
  "answers": [{"position", "id", "text",               # answers of the original run
               "before", "after",                      # their log-probabilities; after: null if the token was left out
               "choice_before", "choice_after",        # the likeliest output: {"id", "text", "log_prob"}
               "candidates": top five after the change}],
  "changed": how many choices differ,
  "sites": [{"name", "difference": largest |after − before| or null if the shapes differ, "largest": largest |before|}],
  "rewritten": [{"id", "text", "log_prob"}] | null                  # greedy decoding under the change, if asked for
}
`python` makes the same run; a test executes it.
"""

from __future__ import annotations

from pydantic import Field

from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.inside.truth import largest_difference
from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import Index, Number, Text, ViewModel, ViewRequest
from allyouneed.apps.inspect.views.walk import CANDIDATES, media_data, tokens_data
from allyouneed.errors import UserError


class NumberEdit(ViewRequest):
    """Set the number at an index (axes after the batch) of a value."""

    site: Text
    at: list[Index]
    number: Number


class Patch(ViewRequest):
    """Take a value from another sentence, whole, or its tokens `there` (default: `positions`) for `positions`."""

    site: Text
    text: Text
    target: Text | None = None
    positions: list[Index] | None = None
    there: list[Index] | None = None


class WhatIfRequest(InputRequest):
    """`mask`: tokens to leave out of `stack` (default: the first). `ablate`: blocks, sub-layers, heads
    (`decoder.0.mixer.heads[3]`). `place`: other positions for the tokens of `stack`. They are applied in this order."""

    stack: Text | None = None
    mask: list[Index] = Field(default_factory=list)
    place: list[Index] | None = None
    ablate: list[Text] = Field(default_factory=list)
    edit: list[NumberEdit] = Field(default_factory=list)
    patch: list[Patch] = Field(default_factory=list)
    rewrite: bool = False


def start(model: ViewModel, request: WhatIfRequest) -> list[Document]:
    """A request without a change: leave out each token and each block in turn."""
    if any((request.place, request.mask, request.ablate, request.edit, request.patch)):
        return [{}]
    run: Run = model.record(request)
    stack, tokens = next(iter(run.tokens.items()))
    masks: list[Document] = [{"stack": stack, "mask": [number]} for number in range(len(tokens))]
    blocks = [f"{name}.{number}" for name, count in run.stacks.items() for number in range(count)]
    return [*masks, *({"ablate": [block]} for block in blocks)]


@view("what_if", WhatIfRequest, start=start)
def what_if(model: ViewModel, request: WhatIfRequest) -> Document:
    before: Run = model.record(request)
    after = changed_run(model, before, request)
    answers = [answer_data(before, after, number) for number in range(len(before.answers))]
    data: Document = {
        "tokens": tokens_data(after),
        "tokens_before": tokens_data(before),
        "media": media_data(before),
        "answers": answers,
        "changed": sum(differs(one) for one in answers),
        "sites": [site_data(before, after, name) for name in before.values if before.values.is_stored(name)],
        "rewritten": [one._asdict() for one in after.rewrite()] if request.rewrite else None,
    }
    return document("what_if", model, request, after.python, data)


def changed_run(model: ViewModel, run: Run, request: WhatIfRequest) -> Run:
    after = run
    if request.place is not None:
        after = after.place(request.place, stack=request.stack)
    if request.mask:
        after = after.mask(*request.mask, stack=request.stack)
    if request.ablate:
        after = after.ablate(*request.ablate)
    for edit in request.edit:
        after = after.edit(edit.site, edit.at, edit.number)
    for patch in request.patch:
        other = model.record(InputRequest(text=patch.text, target=patch.target, to=request.to, source=request.source))
        after = after.patch(patch.site, other, _positions(patch))
    if after is run:
        raise UserError("nothing to change: give mask, place, ablate, edit or patch")
    return after


def _positions(patch: Patch) -> list[int] | dict[int, int] | None:
    if patch.there is None:
        return patch.positions
    if patch.positions is None or len(patch.positions) != len(patch.there):
        raise UserError("patch: positions and there must have the same number of tokens")
    return dict(zip(patch.positions, patch.there, strict=True))


def answer_data(before: Run, after: Run, number: int) -> Document:
    answer, now = before.answers[number], after.position_of(number)
    gone = now is None and answer.position is not None
    candidates = [] if gone else after.candidates(now, CANDIDATES)
    return {
        "position": answer.position,
        "id": answer.id,
        "text": before.name(answer.id),
        "before": before.log_prob(answer),
        "after": None if gone else float(after.scores(now)[answer.id]),
        "choice_before": before.candidates(answer.position, 1)[0]._asdict(),
        "choice_after": candidates[0]._asdict() if candidates else None,
        "candidates": [one._asdict() for one in candidates],
    }


def differs(answer: Document) -> bool:
    """Whether another output is the likeliest now."""
    now = answer["choice_after"]
    return now is not None and now["id"] != answer["choice_before"]["id"]


def site_data(before: Run, after: Run, name: str) -> Document:
    same = name in after and after.names[name] == before.names[name]
    difference = largest_difference(after[name], before[name]) if same else None
    return {"name": name, "difference": difference, "largest": before.largest(name)}
