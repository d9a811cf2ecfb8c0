"""Solutions of the exercises in the lessons: computed for the model and the sentence, so that each has one.

A function per lesson gives the values that its solution states, the state of the page that shows them (`params`), and
what a reader who looks for them asks the page for (`requests`, for the offline file).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.effects import Effect
from allyouneed.apps.inspect.inside.reading import tokens_of
from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.views.answers import choices
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.lesson_facts import Facts
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.apps.inspect.views.use import UseRequest, engine_requests, observed
from allyouneed.apps.inspect.views.walk import place

Values = dict[str, Any]
OTHERS = 20  # next words among which another one is looked for


@dataclass(frozen=True)
class Exercise:
    model: ViewModel
    request: InputRequest
    run: Run
    facts: Facts

    def of(self, text: str) -> Run:
        """The run of another text."""
        return self.model.record(InputRequest(text=text, to=self.request.to, source=self.request.source))

    def __getitem__(self, name: str) -> Any:
        return self.facts.values[name]


class Solution(NamedTuple):
    values: Values
    params: Values
    requests: Sequence[tuple[str, Values]] = ()


def tokens(one: Exercise) -> Solution:
    tokenizer = one.model.predictor.folder.tokenizers.source
    found: Values = {"count": {}, "pieces": {}}
    for language, text in one["rare"].items():
        pieces = tokens_of(tokenizer, tokenizer.encode(text))
        found["count"][language] = len(pieces)
        found["pieces"][language] = " · ".join(piece.text.strip() for piece in pieces)
    return Solution(found, {}, [("walk", {"text": text, "position": one["row"]}) for text in one["rare_text"].values()])


def vectors(one: Exercise) -> Solution:
    run = one.of(one["twice"])
    same, different = list[str](), list[str]()
    for name in one["embed_boxes"]:
        value = run[name][0] if run[name].dim() == 3 else run[name]
        (same if torch.equal(value[one["first"]], value[one["second"]]) else different).append(name)
    places = [("walk", {"text": one["twice"], "position": one[name]}) for name in ("first", "second")]
    return Solution({"same": ", ".join(same) or "–", "different": ", ".join(different) or "–"}, {}, places)


def attention(one: Exercise) -> Solution:
    values: Values = {}
    for site, name, number in ((one["site"], "most", "value"), (one["next"], "next_most", "next_value")):
        values[name], values[number] = _largest(one, one.run.matrix(site).average)
    return Solution(values, {"site": one["next"], "query": one["row"]})


def heads(one: Exercise) -> Solution:
    weights = one.run.matrix(one["middle"]).weights.abs()
    if "attention" not in one.facts.true:
        back = torch.arange(weights.shape[1])[:, None] - torch.arange(weights.shape[2])
        reach = (weights * back).sum((1, 2)) / weights.sum((1, 2)).clamp(min=1e-30)
        head = int(reach.argmax())
        return Solution({"furthest": head, "distance": _number(reach[head])}, {"shown": f"head {head}"})
    before = weights.diagonal(-1, 1, 2).mean(-1)
    edge = weights[:, :, 0 if "causal" in one.facts.true else -1].mean(-1)
    head, other = int(before.argmax()), int(edge.argmax())
    values = {
        "previous": head,
        "previous_value": _number(before[head]),
        "edge": other,
        "edge_value": _number(edge[other]),
    }
    return Solution(values, {"shown": f"head {head}"})


def channel(one: Exercise) -> Solution:
    worst, drop, tried = _worst(one.run, "sublayer")
    return Solution({"worst": worst, "drop": _number(drop)}, {"ablate": worst}, tried)


def depth(one: Exercise) -> Solution:
    stack = one["stack_name"]
    most, value = _largest(one, one.run.rollout[stack][stack])
    last, last_value = _largest(one, one.run.matrix(one["last"]).average)
    values = {"most": most, "value": value, "last_most": last, "last_value": last_value}
    return Solution(values, {"query": one["row"]})


def mask(one: Exercise) -> Solution:
    above = one.run.matrix(one["writer"]).average[-2, -1]
    return Solution({"above": f"{float(above):g}"}, {})


def cross(one: Exercise) -> Solution:
    sharpness = one.run.matrix(one["cross"]).weights.amax(-1).mean(-1)
    head = int(sharpness.argmax())
    return Solution({"sharpest": head, "sharpest_value": _number(sharpness[head])}, {"shown": f"head {head}"})


def choice(one: Exercise) -> Solution:
    """The likeliest next word that the answer does not begin with."""
    predictor: Any = one.model.predictor
    target = predictor.folder.tokenizers.target
    given = {"text": one.request.text, "to": one.request.to, "source": one.request.source, "method": one["method"]}
    request = UseRequest(**given)
    _, seen = observed(predictor, request, request.options(predictor), {})
    said = seen.decoded[0].hypotheses[0].tokens
    decoded = one.model.decoded.get(request.input_key(), lambda: engine_requests(predictor, request))[0]
    words = [word for word in choices(decoded, [], target, OTHERS) if word.get("ids")]
    others = [word for word in words if word["ids"] != said[: len(word["ids"])]]
    other = next((word for word in others if word["word"].strip()), others[0])
    changed = request.model_copy(update={"prefix": other["ids"]})
    answer, _ = observed(predictor, changed, changed.options(predictor), {0: other["ids"]})
    values = {"other": other["word"].strip(), "continued": answer["answer"].strip(), "prefix": other["ids"]}
    taken = ("use", {"prefix": other["ids"]} | ({} if one["method"] is None else {"method": one["method"]}))
    return Solution(values, {"prefix": ",".join(map(str, other["ids"]))}, [taken])


def why(one: Exercise) -> Solution:
    unit = "head" if "heads-out" in one.facts.true else "sublayer"
    found = {name: one.run.why(one["answer"], unit=name).units for name in ("token", unit)}
    best, part = (max(units, key=lambda unit: unit.value) for units in found.values())
    values = {
        "best_token": best.label.strip(),
        "best_token_value": _number(best.value),
        "best_part": part.name,
        "best_part_value": _number(part.value),
    }
    return Solution(values, {"unit": unit}, [("why", {"answer": one["answer"], "unit": unit})])


def what_if(one: Exercise) -> Solution:
    block, drop, tried = _worst(one.run, "block")
    values = {"block": block, "block_drop": _number(drop)}
    again: Values = {"rewrite": True} if "decodes" in one.facts.true else {}
    if again:
        ids = [found.id for found in one.run.ablate(block).rewrite()]
        target = one.model.predictor.folder.tokenizers.target
        values["rewritten"] = target.decode([number for number in ids if number not in target.specials]).strip()
    params = {"mask": None, "stack": None, "rewrite": "1" if again else None, "ablate": block}
    return Solution(values, params, [(name, asked | again) for name, asked in tried])


SOLVERS: dict[str, Callable[[Exercise], Solution]] = {
    solve.__name__: solve
    for solve in (tokens, vectors, attention, heads, channel, depth, mask, cross, choice, why, what_if)
}


def _largest(one: Exercise, matrix: Tensor) -> tuple[str, str]:
    """The token that the lesson's row takes most from, and how much."""
    row = matrix[one["row"]]
    column = int(row.argmax())
    stack = place(one.run, one["site"])[0] or one["stack_name"]
    return one.run.tokens[stack][column].text.strip(), _number(row[column])


def _worst(run: Run, unit: str) -> tuple[str, float, list[tuple[str, Values]]]:
    """The part without which the log-probability of the whole answer falls most, by how much; and the requests that
    try each."""
    whole = sum(run.log_prob(answer) for answer in run.answers)
    drops = {effect.name: whole - _total(effect) for effect in run.effects(unit)}
    name = max(drops, key=lambda one: drops[one])
    return name, drops[name], [("what_if", {"ablate": [part]}) for part in drops]


def _total(effect: Effect) -> float:
    return float(effect.log_probs.sum())


def _number(value: float | Tensor) -> str:
    return f"{float(value):.2f}".replace("-", "−")
