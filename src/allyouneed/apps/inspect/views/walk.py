"""The walk: the way of one input through the model, box by box, and of its answer, step by step.

data: {
  "stacks": {"encoder": 6, "decoder": 6},                     # blocks of each stack, in the order they ran
  "tokens": {"encoder": [{"id", "text", "group"}], …},        # what each stack reads
  "boxes": [{"name": "encoder.0.mixer.q",                     # the site, as in Python: run["encoder.0.mixer.q"]
             "stack": "encoder", "block": 0,                  # or null
             "slot", "kind",                                  # of the part it belongs to
             "formula", "paper", "equation", "file",          # plain text; file: from the package on
             "shape": [1, 8, 5, 64], "position": 2,           # of the token whose numbers are shown; null: no time axis
             "numbers": [eight floats or fewer]}],            # null: −∞; none: large and computed only as `site`
  "answers": [{"position", "id", "text", "log_prob",          # what was chosen where (position null: whole input)
               "candidates": [{"id", "text", "log_prob"}]}],
  "steps": [{"position", "read", "bytes",                     # generative models: the states after each step
             "states": [{"site", "kind", "word", "tensors": {"keys": [1, 8, 3, 64]}, "bytes"}],
             "blocks": [4, 3] | null}],                       # `paged`: the block table
  "block_size": tokens of a block | null,
  "media": {"encoder": {"kind", "values": tensor, …}},        # the image or sound that a stack reads
  "tensor": the whole value of `site`, if the request names one
}
`csv(run, site)` gives a value as CSV.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from torch import Tensor

from allyouneed.apps.inspect.inside.parts import find_part, source_file
from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document, tensor
from allyouneed.apps.inspect.views.formulas import formula_of
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import Index, Text, ViewModel
from allyouneed.nn.states.paged import BLOCK

FIRST = 8  # numbers shown in a box
CANDIDATES = 5
COMPUTED = 1 << 14  # numbers that are computed just to show the first of them
OFFLINE_TOKENS = 32  # whose numbers are in an offline file
OFFLINE_NUMBERS = 1 << 17  # of a value that is there as CSV
IMAGE_SIDE = 224  # pixels of an image that are sent


class WalkRequest(InputRequest):
    """`position`: the token whose numbers are shown, in every stack (the last, where a stack is shorter). `site`: a
    value to send whole. `paged`: keep the states of decoding in blocks of a pool, as the server does."""

    position: Index = 0
    site: Text | None = None
    paged: bool = False


def follow(sent: Document) -> Iterator[tuple[str, Document]]:
    """The other tokens; then every value, for its CSV file."""
    longest = max(map(len, sent["data"]["tokens"].values()), default=1)
    for position in range(min(longest, OFFLINE_TOKENS)):
        if position != sent["request"]["position"]:
            yield "walk", {"position": position}
    for one in sent["data"]["boxes"]:
        if math.prod(one["shape"]) <= OFFLINE_NUMBERS:
            yield "value", {"site": one["name"]}


@view("walk", WalkRequest, follow=follow)
def walk(model: ViewModel, request: WalkRequest) -> Document:
    run: Run = model.record(request)
    data: Document = {
        "stacks": run.stacks,
        "tokens": tokens_data(run),
        "boxes": [box(run, name, request.position) for name in run.values],
        "answers": answers_data(run),
        "steps": steps_data(run, request.paged),
        "block_size": BLOCK if request.paged else None,
        "media": media_data(run),
    }
    python = run.python
    if request.site is not None:
        data["tensor"] = tensor(run.shown(request.site))
        python += f"[{request.site!r}]"
    return document("walk", model, request, python, data)


def box(run: Run, name: str, position: int) -> Document:
    found = find_part(run.model.config, name)
    formula = formula_of(found.part, found.inner)
    stack, block = place(run, name)
    numbers, at = first_numbers(run, name, position)
    return {
        "name": name,
        "stack": stack,
        "block": block,
        "slot": found.slot,
        "kind": found.kind,
        "formula": formula.formula,
        "paper": formula.paper,
        "equation": formula.equation,
        "file": "" if found.part is None else source_file(type(found.part)),
        "shape": list(run.names[name]),
        "position": at,
        "numbers": numbers,
    }


def place(run: Run, name: str) -> tuple[str | None, int | None]:
    """The stack and block of a site."""
    for stack in run.stacks:
        if name.startswith(f"{stack}."):
            number = name.removeprefix(f"{stack}.").split(".")[0]
            return stack, int(number) if number.isdigit() else None
    return None, None


def first_numbers(run: Run, name: str, position: int) -> tuple[list[float | None], int | None]:
    """The first numbers of a token (of the first head), and which token. Values that are computed on request (scores,
    weights) have none if they are large."""
    shape = run.names[name]
    time = shape[-2] if len(shape) > 2 else None
    at = None if time is None else min(max(position, 0), time - 1)
    if not run.values.is_stored(name) and math.prod(shape) > COMPUTED:
        return [], at
    value = run.shown(name)[0]
    while value.dim() > 2:
        value = value[0]
    if value.dim() == 2:
        value = value[at or 0]
    first = value.reshape(-1)[:FIRST].tolist()
    return [None if number == -math.inf else float(number) for number in first], at


def tokens_data(run: Run) -> Document:
    return {stack: [token._asdict() for token in tokens] for stack, tokens in run.tokens.items()}


def answers_data(run: Run, top: int = CANDIDATES) -> list[Document]:
    if run.reading.output in ("vector", "similarity", "other"):
        return []
    return [
        {
            "position": answer.position,
            "id": answer.id,
            "text": run.name(answer.id),
            "log_prob": run.log_prob(answer),
            "candidates": [candidate._asdict() for candidate in run.candidates(answer.position, top)],
        }
        for answer in run.answers
    ]


def steps_data(run: Run, paged: bool = False) -> list[Document]:
    if not run.decodes:
        return []
    return [
        {
            "position": step.position,
            "read": step.read,
            "bytes": step.bytes,
            "states": [
                state._asdict() | {"tensors": {name: list(shape) for name, shape in state.tensors.items()}}
                for state in step.states
            ],
            "blocks": step.blocks,
        }
        for step in (run.paged_steps if paged else run.steps)
    ]


def media_data(run: Run) -> Document:
    return {
        stack: {
            "kind": media.kind,
            "values": tensor(media.values, most=IMAGE_SIDE if media.kind == "image" else 1024, by="mean"),
            "first": media.first,
            "rows": media.rows,
            "columns": media.columns,
            "step": media.step,
        }
        for stack, media in run.reading.media.items()
    }


def csv(run: Run, name: str) -> str:
    """A whole value: one line per row of its last axis, with the indices of the other axes before the numbers."""
    value = run.shown(name).detach().cpu()
    text = io.StringIO()
    axes = [f"axis{n}" for n in range(value.dim() - 1)]
    text.write(",".join([*axes, *map(str, range(value.shape[-1]))]) + "\n")
    for index, row in rows_of(value):
        text.write(",".join([*map(str, index), *(repr(number) for number in row.tolist())]) + "\n")
    return text.getvalue()


def rows_of(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    flat = value.reshape(-1, value.shape[-1])
    for number, row in enumerate(flat):
        index: list[int] = []
        for size in reversed(value.shape[:-1]):
            number, left = divmod(number, size)
            index.insert(0, left)
        yield tuple(index), row
