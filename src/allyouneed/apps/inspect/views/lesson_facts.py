"""What the lessons say of a model, read from its config and from its run of the sentence: values that fill in the texts
(`values`), and conditions on which texts depend (`true`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allyouneed.apps.inspect.inside.changes import input_side
from allyouneed.apps.inspect.inside.parts import EMBEDS, find_part
from allyouneed.apps.inspect.inside.reading import Token
from allyouneed.apps.inspect.inside.run import Run
from allyouneed.apps.inspect.inside.steps import StateSize
from allyouneed.apps.inspect.views.formulas import PARTS
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.apps.inspect.views.walk import place
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.generating import GeneratingPredictor
from allyouneed.nn.models.block import Layer

MASK = "<mask>"
RARE = {"en": "Quetzalcoatl", "zh": "魑魅魍魉"}
TWICE = ("很很很", "no no no no", "a a a a", "aaaa")  # one of them repeats a token, whatever the vocabulary
STACKS = {"encoder": "编码器", "decoder": "解码器", "first": "第一解码器", "second": "第二解码器"}
STATE = {"en": "state", "zh": "状态"}
FEED_FORWARD = ("ffn", "glu")
NORMS = ("pre-norm", "post-norm")


@dataclass(frozen=True)
class Facts:
    """A value is the same in all languages, or a dict by language."""

    values: dict[str, Any]
    true: frozenset[str]

    def hold(self, conditions: list[str]) -> bool:
        """Whether all of them are true; `!name`: not true."""
        return all((one.removeprefix("!") in self.true) != one.startswith("!") for one in conditions)


def facts_of(model: ViewModel, request: InputRequest) -> Facts:
    run = model.record(request)
    if not run.mixers or any(token.id < 0 for tokens in run.tokens.values() for token in tokens):
        raise UserError("the lessons are about models that read a text")
    mask = f" {MASK}" if MASK in (request.text or "") else ""  # some models read no text without one
    values: dict[str, Any] = {"rare": RARE, "rare_text": {name: word + mask for name, word in RARE.items()}}
    true = {"masks"} if mask else set[str]()
    text, first, second = repeated(model, request, mask)
    values |= {"twice": text, "first": first, "second": second}
    true |= {"twice"} if first < second else set()
    for read in (_text, _vectors, _mixers, _layers, _answers):
        more, also = read(model, request, run)
        values |= more
        true |= {name for name, holds in also.items() if holds}
    return Facts(values, frozenset(true))


Found = tuple[dict[str, Any], dict[str, bool]]


def _text(model: ViewModel, request: InputRequest, run: Run) -> Found:
    """Tokens: those that are not text, the first that are."""
    tokenizers = model.predictor.folder.tokenizers
    stack = next(iter(run.tokens))
    tokens = given_tokens(run)
    marks = special_ids(model, stack)
    content = [n for n, token in enumerate(tokens) if token.id not in marks] or list(range(len(tokens)))
    row = content[min(1, len(content) - 1)]
    language = dict.fromkeys(token.text for token in tokens if token.id in tokenizers.source.languages.values())
    named = dict.fromkeys(
        token.text
        for name, some in run.tokens.items()
        for token in some
        if token.id in special_ids(model, name) and token.text not in language
    )
    values = {
        "stack_name": stack,
        "stack": {"en": stack, "zh": STACKS.get(stack, stack)},
        "vocab": f"{tokenizers.source.size:,}",
        "target_vocab": f"{tokenizers.target.size:,}",
        "marks": ", ".join(named),
        "language": ", ".join(language),
        "row": row,
        "row_token": tokens[row].text.strip(),
        "hidden_token": content[0],
        "masked": tokens[content[0]].text.strip(),
    }
    return values, {"marks": bool(named), "language": bool(language), "long": len(content) > 1}


def given_tokens(run: Run) -> list[Token]:
    """What was given to the first stack; a decoder reads its own answer after it."""
    stack, tokens = next(iter(run.tokens.items()))
    return tokens if input_side(run.model, stack) == "source" or not run.decodes else tokens[: run.reading.given]


def special_ids(model: ViewModel, stack: str) -> set[int]:
    """Tokens of a stack that do not encode text."""
    tokenizers = model.predictor.folder.tokenizers
    reads = tokenizers.source if input_side(model.predictor.model, stack) == "source" else tokenizers.target
    return {*reads.specials, *reads.languages.values()}


def repeated(model: ViewModel, request: InputRequest, mask: str) -> tuple[str, int, int]:
    """A text, and two places of a token in it."""
    for words in TWICE:
        text = words + mask
        run = model.record(InputRequest(text=text, to=request.to, source=request.source))
        marks, seen = special_ids(model, next(iter(run.tokens))), dict[int, int]()
        for n, token in enumerate(given_tokens(run)):
            if token.id in seen and token.id not in marks:
                return text, seen[token.id], n
            seen[token.id] = n
    return TWICE[0], 0, 0


def _vectors(model: ViewModel, request: InputRequest, run: Run) -> Found:
    """The first embedding: its summands, its kind of positions."""
    config = run.model.config
    embed = next(name for name in run.names if name in EMBEDS)
    positions = getattr(getattr(find_part(config, embed).part, "positions", None), "kind", "none")
    mixer = find_part(config, run.mixers[0]).part
    relative = getattr(getattr(mixer, "positions", None), "kind", "none")
    added = f"{embed}.positions" in run.names
    layer = getattr(config, next(iter(run.tokens)))[0]
    boxes = [name for name in run.names if name == embed or name.startswith(f"{embed}.")]
    values = {
        "embed": embed,
        "vector": f"{run.names[boxes[0]][-1]:,}",
        "positions": positions,
        "relative": relative,
        "coordinates": layer.coordinates.kind,
        "boxes": ", ".join(boxes),
        "embed_boxes": boxes,
    }
    true = {
        "added": added,
        "sinusoidal": added and positions == "sinusoidal",
        "relative": relative != "none",
        "coordinates": layer.coordinates.kind != "none",
    }
    return values, true


def _mixers(model: ViewModel, request: InputRequest, run: Run) -> Found:
    """The token mixers of the first stack, and their heads."""
    stack = next(iter(run.tokens))
    sites = [site for site in run.mixers if place(run, site)[0] == stack and ".cross" not in site] or run.mixers
    by_block = list({place(run, site)[1]: site for site in reversed(sites)}.values())[::-1]
    site, middle = by_block[0], by_block[min(2, len(by_block) - 1)]
    found = run.matrix(site)
    at_middle = run.matrix(middle)
    part = find_part(run.model.config, middle).part
    queries = run.names.get(f"{middle}.q") or run.names.get(f"{middle}.heads") or (0,)
    kv_heads = getattr(part, "kv_heads", None) or at_middle.count
    kinds = {find_part(run.model.config, one).kind: one for one in by_block}  # a matrix of each is enough
    values = {
        "site": site,
        "next": by_block[min(1, len(by_block) - 1)],
        "middle": middle,
        "last": by_block[-1],
        "mixer": find_part(run.model.config, site).kind,
        "heads": at_middle.count,
        "kv_heads": kv_heads,
        "head_width": queries[-1],
    }
    true = {
        "attention": found.how == "attention",
        "matrix": found.how in ("formula", "unit values"),
        "jacobian": found.how == "jacobian",
        "heads": at_middle.count > 1 and not at_middle.channels and at_middle.how == found.how != "jacobian",
        "grouped": kv_heads < at_middle.count,
        "causal": not bool(found.average.triu(1).any()),
        "deep": len(by_block) > 1,
        "weights": all(run.matrix(one).how != "jacobian" for one in kinds.values()),
    }
    return values, true


def _layers(model: ViewModel, request: InputRequest, run: Run) -> Found:
    """The first stack's layers: how many, their wiring and channel mixers."""
    config = run.model.config
    stack = next(iter(run.tokens))
    layers: tuple[Layer, ...] = getattr(config, stack)
    middle = run.stacks[stack] // 2
    ablated = f"{stack}.{middle}.channel"
    part = find_part(config, ablated).part if ablated in run.names else None
    kind = getattr(part, "kind", "")
    wiring = find_part(config, f"{stack}.{middle}").kind
    every = [layer for name in type(config).stacks for layer in getattr(config, name, None) or ()]
    channels = [layer for layer in every if layer.channel is not None]
    own = sum(
        layer.channel.cost(config).parameters * (1 if layer.share else layer.repeat)
        for layer in channels
        if layer.channel is not None
    )
    values = {
        "layers": run.stacks[stack],
        "width": f"{config.width:,}",
        "hidden": f"{getattr(part, 'hidden', None) or 0:,}",
        "activation": str(getattr(part, "activation", "")),
        "channel": kind,
        "ablated": ablated,
        "channels": sum(1 if layer.share else layer.repeat for layer in channels),
        "share": round(100 * own / config.cost(1).parameters),
        "wiring": wiring,
        "wiring_formula": PARTS.get(("wiring", wiring), wiring),
    }
    true = {
        "channel": part is not None,
        "ffn": kind == "ffn",
        "glu": kind == "glu",
        "relu": getattr(part, "activation", None) == "relu",
        "other-channel": part is not None and kind not in FEED_FORWARD,
        "other-wiring": wiring not in NORMS,
        "shared": any(layer.share for layer in layers),
        wiring: True,
    }
    return values, true


def _answers(model: ViewModel, request: InputRequest, run: Run) -> Found:
    """The stack that writes, and how its answer is decoded."""
    config, predictor = run.model.config, model.predictor
    stacks = list(run.tokens)
    writer = [site for site in run.mixers if place(run, site)[0] == stacks[-1] and ".cross" not in site]
    above = run.matrix(writer[0]).average if run.decodes and writer else None
    tokens = run.tokens[stacks[-1]]
    crosses = [site for site in run.mixers if site.endswith(".cross")]
    blocks = run.stacks.get(stacks[-1], 0)
    engine = isinstance(predictor, GeneratingPredictor)
    decoding = Decoding.of(predictor.folder.decoding) if engine else None
    beam = decoding is not None and decoding.method == "beam" and decoding.beam > 1
    decodes = run.decodes and input_side(run.model, "decoder") == "target"
    rewrites = decodes and input_side(run.model, stacks[0]) == "source"  # a target with holes cannot be continued
    states = run.steps[-1].states if run.decodes else []
    masked = bool(writer) and f"{writer[0]}.mask" in run
    answer = min(2, max(0, len(run.answers) - 1))
    values = {
        "writer": writer[0] if writer else "",
        "above_row": tokens[-2].text if len(tokens) > 1 else "",
        "above_column": tokens[-1].text,
        "cross": crosses[-1] if crosses else "",
        "writer_layers": blocks,
        "beam": 1 if decoding is None else decoding.beam,
        "method": None if beam else "greedy",
        "state": {language: _named(language, states) for language in STATE},
        "answer": answer,
        "word": run.name(run.answers[answer].id).strip() if run.answers else "",
        "rewrites": True if rewrites else None,
        "rewrite": "1" if rewrites else None,
    }
    writes = above is not None and len(tokens) > 1 and not bool(above.triu(1).any())
    true = {
        "writes": writes,
        "masked": masked,
        "source": len(crosses) == blocks > 0 and config.kind == "encoder-decoder",
        "between": all(layer.mixer and layer.cross and layer.channel for layer in getattr(config, "decoder", ())),
        # a copying head reads the source too, and a recurrent decoder may begin with a state made of it
        "only-way": not getattr(getattr(config, "head", None), "copy_", False) and masked,
        "decodes": decodes and engine,
        "beam": beam,
        "tied": bool(config.embed.ties) if hasattr(config, "embed") else False,
        "cache": any(state.kind == "KVCache" for state in states),
        "answers": bool(run.answers),
        "rewrites": rewrites,
        "heads-out": any(name.endswith(".heads") and len(shape) == 4 for name, shape in run.names.items()),
    }
    return values, true


def _named(language: str, states: Sequence[StateSize]) -> str:
    """What the states of decoding are called."""
    from allyouneed.apps.inspect.assets import strings

    names = dict.fromkeys(strings()[language].get(f"state.{state.kind}", STATE[language]) for state in states)
    return ", ".join(names) or STATE[language]
