"""Documents about one decoded answer: its tokens with alternatives, the beam search as a tree, word alignment, and the
distribution of the next token with the cut of sampling. The numbers are the engine's own (decoding/observe.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from allyouneed.apps.inspect.views.document import Document, tensor
from allyouneed.apps.inspect.views.tokens import token_list, token_text
from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER, Tokenizer
from allyouneed.infer.decoding.alignment import cross_attention
from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.observe import DecodedRequest
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.rules import choose_tokens
from allyouneed.infer.decoding.sampling import filter_logits, token_probs, uniform_stream
from allyouneed.runtime.process import inference

SHOWN, NAMED = 1024, 200  # tokens of a distribution that are sent, and with their texts; the others are counted
CONTEXT = 4  # tokens on which the text of the next one may depend
WORD_TOKENS = 8  # tokens decoded to complete a word


def answer_part(decoded: DecodedRequest, source: Tokenizer, target: Tokenizer, top: int) -> Document:
    """One request of the engine: what was read, the best answer token by token, and how it was found."""
    best, request = decoded.hypotheses[0], decoded.request
    read = request.prompt if request.source is None else request.source
    return {
        "read": token_list(source if request.source is not None else target, read),
        "continues": request.source is None,
        "prefix": len(decoded.prefix),
        "tokens": token_list(target, best.tokens),
        "words": words(target, best.tokens),
        "word_texts": [_added(target, best.tokens, *word) for word in words(target, best.tokens)],
        "text": target.decode(best.tokens),
        "log_probs": best.log_probs,
        "log_prob": best.log_prob,
        "score": best.score,
        "finished": best.finished,
        "eos": decoded.spec.eos,
        "alternatives": _alternatives(decoded, target, top),
        "tree": _tree(decoded, target),
        "alignment": _alignment(decoded),
    }


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[list[int]]:
    """[first, end) tokens of each word."""
    starts = [n for n in range(len(ids)) if n == 0 or begins_word(tokenizer, ids[:n], ids[n])]
    return [[first, end] for first, end in zip(starts, [*starts, len(ids)][1:], strict=True)]


def _added(tokenizer: Tokenizer, ids: Sequence[int], first: int, end: int) -> str:
    """The text of some tokens where they stand."""
    near = list(ids[max(0, first - CONTEXT) : first])
    return tokenizer.decode([*near, *ids[first:end]])[len(tokenizer.decode(near)) :]


def begins_word(tokenizer: Tokenizer, before: Sequence[int], token: int) -> bool:
    """Whether a word begins with this token: after a space, at punctuation, or at an East Asian character."""
    near = list(before[-CONTEXT:])
    whole, added = tokenizer.decode(near), _added(tokenizer, [*near, token], len(near), len(near) + 1)
    if not whole or not added:
        return True
    if whole.endswith("\ufffd"):  # the token completes a character
        return False
    first = added.lstrip()[:1]
    within = first.isalnum() and not EAST_ASIAN_CHARACTER.match(first) and not added[0].isspace()
    return not within or not whole[-1].isalnum() or EAST_ASIAN_CHARACTER.match(whole[-1]) is not None


def _alternatives(decoded: DecodedRequest, target: Tokenizer, top: int) -> list[list[Document]]:
    """For each token of the answer, and for its end mark, the likeliest tokens at that step of the engine."""

    def best(step: int, logits: Tensor) -> tuple[list[int], list[float]]:
        found = logits.log_softmax(-1).topk(min(top, len(logits)))
        return found.indices.tolist(), found.values.tolist()

    rows = decoded.steps(decoded.hypotheses[0].tokens, best)
    return [[_choice(target, decoded.spec, token, value) for token, value in zip(*row, strict=True)] for row in rows]


def _choice(target: Tokenizer, spec: DecodingSpec, token: int, log_prob: float) -> Document:
    return {
        "id": token,
        "text": token_text(target, token),
        "log_prob": log_prob,
        "end": token in spec.eos_ids,
        "banned": token in spec.forbidden,
    }


# --- the beam search ------------------------------------------------------------------------------------------------


def _tree(decoded: DecodedRequest, target: Tokenizer) -> Document | None:
    """Nodes as columns. `winner`: the node at which the answer ended; `path`: the nodes that lead to it."""
    record = decoded.beams
    if record is None or not record.nodes:
        return None
    options, counted = decoded.spec.decoding, decoded.spec.counted_prompt + len(decoded.prefix)
    best, nodes = decoded.hypotheses[0], record.nodes
    size = len(decoded.prefix)
    before = sum(best.log_probs[:size])  # the search began after the prefix
    winner = record.find(
        replace(best, tokens=best.tokens[size:], log_probs=best.log_probs[size:]), decoded.spec.eos_ids
    )
    return {
        "beams": options.beam,
        "length_penalty": options.length_penalty,
        "parent": [one.parent for one in nodes],
        "step": [one.step for one in nodes],
        "token": [one.token for one in nodes],
        "text": [token_text(target, one.token) for one in nodes],
        "end": [one.token in decoded.spec.eos_ids for one in nodes],
        "log_prob": [one.log_prob for one in nodes],
        "total": [one.total + before for one in nodes],
        "score": [(one.total + before) / options.length_divisor(one.step + 1 + counted) for one in nodes],
        "fate": [one.fate for one in nodes],
        "open": record.rows,
        "winner": winner,
        "path": [] if winner is None else record.path(winner),
    }


# --- alignment ------------------------------------------------------------------------------------------------------


def _alignment(decoded: DecodedRequest) -> Document | None:
    """Cross-attention of each token of the answer (rows) to what was read (columns); None for other models."""
    engine, request = decoded.engine, decoded.request
    model, pad = engine.runner.model, engine.runner.pad
    blocks = getattr(getattr(model, "decoder", None), "blocks", ())
    crosses = hasattr(model, "attention") and any("cross" in block.sublayers for block in blocks)
    if request.source is None or not crosses:
        return None
    tokens = decoded.hypotheses[0].tokens

    def compute(some: list[tuple[list[int], list[int]]]) -> list[Tensor]:
        with inference():
            return cross_attention(model, [one for one, _ in some], [other for _, other in some], pad)

    pair = (list(request.source), [*request.prompt, *tokens])
    (weights,) = engine.compute("cross-attention", [pair], compute)
    return tensor(weights[len(request.prompt) - 1 :])


# --- the next token -------------------------------------------------------------------------------------------------


def cut(decoded: DecodedRequest, prefix: Sequence[int], decoding: Decoding, target: Tokenizer) -> Document:
    """The distribution of the token after `prefix`, likeliest first, and what sampling by these options leaves of it.

    `probs`: after the temperature; `kept`: those that top-k, top-p and min-p leave, `sampled`: their probabilities
    afterwards; `drawn`: the token that the seed draws here, as the first of an answer that continues the prefix."""
    logits = decoded.next_logits(prefix, decoding)
    scaled = logits / decoding.temperature
    filtered = filter_logits(scaled[None], decoding.top_k, decoding.top_p, decoding.min_p)[0]
    order = scaled.argsort(descending=True, stable=True)
    shown = order[:SHOWN]
    probs, kept = scaled.double().softmax(-1), filtered.isfinite()
    uniform = uniform_stream((decoding.seed, 0, *decoded.request.sample_key), 1)
    drawn = int(choose_tokens(logits[None], decoding, uniform)[0])
    return {
        "ids": shown.tolist(),
        "texts": [token_text(target, token) for token in shown[:NAMED].tolist()],
        "probs": tensor(probs[shown]),
        "sampled": tensor(token_probs(logits[None], decoding)[0][shown]),
        "kept": int(kept.sum()),
        "kept_shown": kept[shown].tolist(),
        "mass": float(probs[kept].sum()),
        "vocab": len(logits),
        "rest": float(probs[order[SHOWN:]].sum()),
        "drawn": {"id": drawn, "text": token_text(target, drawn), "end": drawn in decoded.spec.eos_ids},
    }


def choices(decoded: DecodedRequest, prefix: Sequence[int], target: Tokenizer, top: int) -> list[Document]:
    """The likeliest next words: each begins with one of the likeliest next tokens and is completed greedily."""
    log_probs = decoded.logits_after(prefix).log_softmax(-1)
    best, ids = log_probs.topk(min(top, len(log_probs)))
    found = [_choice(target, decoded.spec, *both) for both in zip(ids.tolist(), best.tolist(), strict=True)]
    usable = [one for one in found if not one["end"] and not one["banned"]]
    rest = decoded.continue_each([[*prefix, one["id"]] for one in usable], WORD_TOKENS)
    for one, (tokens, values) in zip(usable, rest, strict=True):
        taken: list[int] = []
        for token in tokens:
            if begins_word(target, [*prefix, one["id"], *taken], token):
                break
            taken.append(token)
        one["ids"] = [one["id"], *taken]
        one["word"] = target.decode([*prefix, *one["ids"]])[len(target.decode(prefix)) :]
        one["word_log_prob"] = one["log_prob"] + sum(values[: len(taken)])
    return found
