"""What every family of encoders, and every family of encoder-decoders, is put through: see parity.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parity
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.nn.batch import Batch, Rows

TEXTS = [[7, 5, 11, 9, 3, 12, 6, 8], [4, 4, 10], [12], [6, 9, 3, 5, 7]]
SOURCES = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 5], [12], [13, 14, 15, 16, 4]]
TARGETS = [[7, 3, 5], [7, 4, 6, 8, 10, 12, 14, 18], [7, 7, 9, 11], [7]]

Answers = list[list[int]]


def real(rows: Rows) -> Tensor:
    """(batch, time): the places that are no padding."""
    steps = torch.arange(rows.tokens.shape[1])[None]
    return steps < (rows.tokens.shape[1] if rows.lengths is None else rows.lengths[:, None])


def weighed(scores: Tensor) -> Tensor:
    """A loss in which every score counts, and none like another."""
    return (scores * torch.linspace(-1, 1, scores.numel()).view_as(scores)).sum()


def encoder(
    theirs: Any,
    folder: Path,
    types: int = 1,
    texts: list[list[int]] = TEXTS,
    chosen: Tensor | None = None,
    types_name: str = "token_type_ids",
) -> tuple[float, float]:
    """Largest differences of outputs and of gradients, on texts of unequal lengths and `types` kinds, which they call
    `types_name`; `chosen`: tokens (batch, time) that are global."""
    parity.randomise(theirs)
    model = parity.ours(theirs, folder)
    rows = Rows.of(texts, pad=theirs.config.pad_token_id)
    kinds = torch.arange(rows.tokens.numel()).view_as(rows.tokens) // 3 % types
    rows = Rows(rows.tokens, rows.lengths, types=kinds, chosen=chosen)
    seen, given = real(rows), {types_name: kinds} if types > 1 else {}
    given |= {} if chosen is None else {"global_attention_mask": chosen.long()}
    result = theirs(input_ids=rows.tokens, attention_mask=seen.long(), **given)
    expected = result.logits if hasattr(result, "logits") else result.last_hidden_state
    found = model.logits(Batch(rows))
    expected = expected if expected.dim() == found.dim() else expected[..., None]  # one score a token
    if found.dim() == 3:
        found, expected = found[seen], expected[seen]
    outputs = parity.difference(found, expected)
    return outputs, parity.gradient_difference(model, theirs, folder, weighed(found), weighed(expected))


def encoder_decoder(theirs: Any, folder: Path) -> tuple[float, float]:
    """Largest differences of outputs (the whole at once and step by step) and of gradients."""
    parity.randomise(theirs)
    model = parity.ours(theirs, folder)
    source, target = (Rows.of(given, pad=theirs.config.pad_token_id) for given in (SOURCES, TARGETS))
    seen = real(target)
    expected = theirs(
        input_ids=source.tokens,
        attention_mask=real(source).long(),
        decoder_input_ids=target.tokens,
        decoder_attention_mask=seen.long(),
    ).logits[seen]
    found = model.logits(Batch(target, source))[seen]
    outputs = max(parity.difference(found, expected), step_by_step(model, theirs, source))
    return outputs, parity.gradient_difference(model, theirs, folder, weighed(found), weighed(expected))


@torch.no_grad()
def step_by_step(model: Any, theirs: Any, source: Rows) -> float:
    """Largest difference while decoding token by token, each side over its own memory of the past."""
    tokens = torch.tensor([[7, 3, 5, 9, 6], [7, 4, 6, 8, 3], [7, 9, 9, 9, 9], [7, 12, 4, 4, 10]])
    states, cache, worst, mask = model.start(source), None, 0.0, real(source).long()
    read = theirs.get_encoder()(input_ids=source.tokens, attention_mask=mask)
    for step in range(tokens.shape[1]):
        new = tokens[:, step : step + 1]
        result = theirs(
            encoder_outputs=read, attention_mask=mask, decoder_input_ids=new, past_key_values=cache, use_cache=True
        )
        cache = result.past_key_values
        worst = max(worst, parity.difference(model.head(model.advance(Rows(new), states)), result.logits))
    return worst


def loosened(theirs: Any, norm: Any, end: int, seed: int) -> None:
    """Random weights that say something. A tied random model says the token it has just read for ever: mixing the signs
    of the decoder's last `norm` breaks the loop, and small biases, that of the norm towards the end mark, let it look
    around and stop."""
    parity.randomise(theirs, seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.sub_(1 if name.endswith("bias") else 0)
        norm.weight.normal_(generator=torch.Generator().manual_seed(seed))
        if hasattr(norm, "bias"):
            towards = theirs.get_output_embeddings().weight[end]
            norm.bias.copy_(towards / towards.square().sum())


def greedy(theirs: Any, norm: Any, folder: Path, start: int, end: int, seed: int) -> tuple[Answers, Answers]:
    """What our engine and their `generate` say, up to the end mark."""
    loosened(theirs, norm, end, seed)
    dice, vocab, steps = torch.Generator().manual_seed(seed), theirs.config.vocab_size, 14
    lengths = torch.randint(1, 9, (24,), generator=dice).tolist()
    sources = [torch.randint(3, vocab, (length,), generator=dice).tolist() for length in lengths]
    rows = Rows.of(sources, pad=theirs.config.pad_token_id)
    said = theirs.generate(
        input_ids=rows.tokens,
        attention_mask=real(rows).long(),
        max_new_tokens=steps,
        do_sample=False,
        num_beams=1,
        forced_eos_token_id=None,
        decoder_start_token_id=start,
    )
    expected = [row[1:] for row in said.tolist()]
    expected = [row[: row.index(end)] if end in row else row for row in expected]
    engine = Engine(parity.ours(theirs, folder), bos=start, eos=end, pad=theirs.config.pad_token_id)
    answers = engine.generate(sources, Decoding(method="greedy", extra=1000, max_length=steps))
    assert len({tuple(row) for row in expected}) > 12 and len({len(row) for row in expected}) > 2, "too much alike"
    return [answer[0].tokens for answer in answers], expected
