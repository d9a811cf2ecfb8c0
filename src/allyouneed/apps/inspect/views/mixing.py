"""Any mixer as a matrix: who reads whom, for every token mixer of the model.

data: {
  "sites": [{"name": "decoder.0.cross", "stack", "block", "kind", "heads"}],      # what can be asked for as `site`
  "site", "how": "attention" | "formula" | "unit values" | "jacobian",            # apps/inspect/inside/mixing.py
  "sampled": true if Jacobian norms are estimated, "channels": true if `heads` are channels,
  "queries": "decoder", "keys": "encoder",          # stacks whose tokens label rows and columns, or null
  "tokens", "media",                                # as in the walk
  "heads": [0, 1, …], "count": 8,                   # those in `grid`, and how many there are
  "half_life": [tokens of each head in `heads`] | null,
  "grid": tensor (heads, queries, keys), small,     # all heads, pooled to at most 64 × 64
  "average": tensor (queries, keys),                # over heads; magnitudes if weights may be negative
  "matrix": tensor (queries, keys), "head": 3,      # one head: exact up to 1,024 tokens, pooled above; null: none asked
  "residual": largest |Σ M v − out| / largest |out|, or null, "limit": 1e-5, "constant": a term beside M v exists,
  "pattern": "causal & window(4)", "mask": tensor (queries, keys) of 0 and 1, pooled to at most 256 | null,
  "state_bytes": bytes that decoding keeps for this mixer after the last token | null,
  "routing": [{"name": "decoder.0.channel.router", "shares": tensor (tokens, experts), "experts": [[…]], "weights": …}],
  "rollout": {"encoder": tensor (queries, inputs), …} | null      # of the stack of `site`, if asked for
}
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import Tensor

from allyouneed.apps.inspect.inside.mixing import Mixing
from allyouneed.apps.inspect.inside.parts import find_part
from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document, tensor
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import Index, Text, ViewModel
from allyouneed.apps.inspect.views.walk import media_data, place, tokens_data

GRID = 64  # rows and columns of each head in the grid
MASK = 256
LIMIT = 1e-5


class MixingRequest(InputRequest):
    """`site`: a token mixer; default: the first one. `head`: shown large. `rollout`: also of the whole stack."""

    site: Text | None = None
    head: Index | None = None
    rollout: bool = False


def follow(sent: Document) -> Iterator[tuple[str, Document]]:
    """The other mixers and rollout; heads, where those of the grid are pooled."""
    data = sent["data"]
    others = [one["name"] for one in data["sites"] if one["name"] != data["site"]]
    for site in [data["site"], *others]:
        if site != data["site"]:
            yield "mixing", {"site": site}
        yield "mixing", {"site": site, "rollout": True}
    if "pooled" in data["grid"]:
        for site in [data["site"], *others]:
            for head in data["heads"]:
                yield "mixing", {"site": site, "head": head}


@view("mixing", MixingRequest, follow=follow)
def mixing(model: ViewModel, request: MixingRequest) -> Document:
    run: Run = model.record(request)
    site = request.site or run.mixers[0]
    found = run.matrix(site)
    stack, _ = place(run, site)
    data: Document = {
        "sites": [site_data(run, name) for name in run.mixers],
        "site": site,
        "how": found.how,
        "sampled": found.sampled,
        "channels": found.channels,
        "queries": stack if _is_labelled(run, stack, found.weights.shape[1]) else None,
        "keys": key_stack(run, site, stack, found.weights.shape[2]),
        "tokens": tokens_data(run),
        "media": media_data(run),
        "heads": found.heads,
        "count": found.count,
        "half_life": None if found.half_life is None else [found.half_life[head] for head in found.heads],
        "residual": found.residual,
        "limit": LIMIT,
        "constant": found.constant,
        "state_bytes": state_bytes(run, site),
        "routing": routing_data(run, site),
        "rollout": rollout_data(run, stack) if request.rollout else None,
    }
    data |= heads_data(found) | pattern_data(run, site)
    data |= {
        "head": request.head,
        "matrix": None if request.head is None else tensor(one_head(run, found, request.head)),
    }
    chosen = "" if request.head is None else f", heads=[{request.head}]"
    return document("mixing", model, request, f"{run.python}.matrix({site!r}{chosen})", data)


_heads_data: WeakKeyDictionary[Mixing, Document] = WeakKeyDictionary()


def heads_data(found: Mixing) -> Document:
    """All heads small, and their mean: the same whatever head is shown large, so they are made once."""
    if found not in _heads_data:
        grid = tensor(found.weights, most=max(GRID, len(found.heads)))  # heads are never pooled
        _heads_data[found] = {"grid": grid, "average": tensor(found.average)}
    return _heads_data[found]


def one_head(run: Run, found: Mixing, head: int) -> Tensor:
    if head in found.heads:
        return found.weights[found.heads.index(head)]
    return run.matrix(found.site, [head]).weights[0]


def site_data(run: Run, name: str) -> Document:
    stack, block = place(run, name)
    heads = f"{name}.heads"
    shape = run.names.get(heads)
    count = 1 if shape is None else shape[1] if len(shape) == 4 else shape[2]
    return {
        "name": name,
        "stack": stack,
        "block": block,
        "kind": find_part(run.model.config, name).kind,
        "heads": count,
    }


def key_stack(run: Run, site: str, stack: str | None, keys: int) -> str | None:
    """The stack whose tokens are the keys."""
    crosses = ".cross" in f"{site}."
    candidates = [name for name in run.tokens if name != stack] if crosses else [stack]
    return next((name for name in candidates if name is not None and _is_labelled(run, name, keys)), None)


def _is_labelled(run: Run, stack: str | None, count: int) -> bool:
    return stack is not None and len(run.tokens.get(stack, ())) == count


def pattern_data(run: Run, site: str) -> Document:
    if f"{site}.mask" not in run:
        return {"pattern": "", "mask": None}
    part = run.recorder.parts[f"{site}.mask"]
    mask = run[f"{site}.mask"][0, 0].float()
    weights = run.names.get(f"{site}.weights")
    rows = mask.shape[0] if weights is None else weights[2]
    return {"pattern": getattr(part, "pattern_text", ""), "mask": tensor(mask.expand(rows, -1), most=MASK)}


def state_bytes(run: Run, site: str) -> int | None:
    if not run.decodes:
        return None
    return next((state.bytes for state in run.steps[-1].states if f"{site}.".startswith(f"{state.site}.")), None)


def routing_data(run: Run, site: str) -> list[Document]:
    stack, block = place(run, site)
    routers = [name for name in run.values if name.startswith(f"{stack}.{block}.") and name.endswith(".router")]
    return [
        {
            "name": name,
            "shares": tensor(run[f"{name}.shares"]),
            "experts": run[f"{name}.experts"].tolist(),
            "weights": tensor(run[f"{name}.weights"]),
        }
        for name in routers
    ]


def rollout_data(run: Run, stack: str | None) -> Document:
    return {name: tensor(shares) for name, shares in run.rollout.get(stack or "", {}).items()}
