"""Logit lens (nostalgebraist 2020): what the head would choose from the stream after each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.effects import split_site
from allyouneed.apps.inspect.inside.execute import forward_pass
from allyouneed.apps.inspect.inside.why import final_stack
from allyouneed.errors import UserError
from allyouneed.runtime.process import evaluation_mode


@forward_pass
def lens_logits(run: Any, position: int | None) -> dict[str, Tensor]:
    """{site of the stream: logits (outputs,)} at a position, from the embedding to the last block: the stream through
    the stack's own end (its final norm) and the head."""
    stack = final_stack(run)
    tower = stack.rpartition(".")[0]
    model = run.model.get_submodule(tower) if tower else run.model
    if run.reading.output in ("vector", "similarity"):
        raise UserError("this model outputs a vector; a logit lens needs scores of outputs")
    end, head = model.get_submodule(stack.removeprefix(f"{tower}.")).end, model.head
    context = next(call.context for site, call in run.recorder.calls.items() if site.startswith(f"{stack}."))
    found = {}
    with evaluation_mode(run.model), torch.no_grad():
        for site, stream in run.recorder.streams.items():
            if split_site(run, site)[0] != stack:
                continue
            closed = stream if end is None else end(stream, context=context)
            if position is None:
                found[site] = head(closed, context.queries)[0]
            else:
                first = max(0, min(position, closed.shape[1] - 2))  # a quantized head rounds one token otherwise
                found[site] = head(closed[:, first : first + 2], None)[0, position - first]
    return found
