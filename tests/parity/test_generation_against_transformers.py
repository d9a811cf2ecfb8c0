"""What encoder-decoders say, greedily and by beam search: their `generate` and our engine on the same random weights,
with and without a first and a last token that are forced."""

import importlib

import pytest
import torch

import parity
import trials
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.nn.batch import Rows

STEPS, START, FORCED, SEED = 14, 4, 9, 4
# family -> where the norm before its head is
FAMILIES = {
    "t5": "decoder.final_layer_norm",
    "mt5": "decoder.final_layer_norm",
    "switch_transformers": "decoder.final_layer_norm",
    "bart": "model.decoder.layers.-1.final_layer_norm",
    "mbart": "model.decoder.layer_norm",
    "marian": "model.decoder.layers.-1.final_layer_norm",
    "m2m_100": "model.decoder.layer_norm",
}


def built(family):
    """Their model with weights that let it look around, see `trials.loosened`."""
    module = importlib.import_module(f"test_{family}_against_transformers")
    theirs = module.theirs(next(iter(module.CASES)))
    norm = theirs
    for step in FAMILIES[family].split("."):
        norm = norm[-1] if step == "-1" else getattr(norm, step)
    trials.loosened(theirs, norm, 2, SEED)
    return theirs


def generated(theirs, sources, beam, forced, end):
    """Their output after the forced tokens, up to the end token."""
    pad = theirs.config.pad_token_id  # positions are counted by it: it is never generated
    rows = Rows.of(sources, pad=pad)
    said = theirs.generate(
        input_ids=rows.tokens,
        attention_mask=trials.real(rows).long(),
        max_new_tokens=STEPS,
        do_sample=False,
        num_beams=beam,
        pad_token_id=pad,
        suppress_tokens=[pad],
        eos_token_id=end,
        decoder_start_token_id=START,
        forced_bos_token_id=forced,
        forced_eos_token_id=None if forced is None or end < 0 else end,
    )
    answers = [row[1 if forced is None else 2 :] for row in said.tolist()]
    return [row[: row.index(end)] if end in row else row for row in answers]


def well_spread(answers):
    """A token that comes soon in some answers, late in others and never in the rest: a good end mark."""
    places = {token: {row.index(token) for row in answers if token in row} for token in range(3, 31) if token != FORCED}
    return max(places, key=lambda token: len(places[token]))


@pytest.mark.parametrize("forced", [None, FORCED])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family, beam, forced, tmp_path):
    theirs, dice = built(family), torch.Generator().manual_seed(SEED)
    lengths = torch.randint(1, 9, (20,), generator=dice).tolist()
    sources = [torch.randint(3, 31, (length,), generator=dice).tolist() for length in lengths]
    end = well_spread(generated(theirs, sources, beam, forced, -1))
    expected = generated(theirs, sources, beam, forced, end)
    assert len({tuple(row) for row in expected}) > 3 and len({len(row) for row in expected}) > 1, "too much alike"
    prefix = [] if forced is None else [forced]
    options = dict(counted=len(prefix), ended=forced is not None)
    pad = theirs.config.pad_token_id
    engine = Engine(parity.ours(theirs, tmp_path), bos=START, eos=end, pad=pad, forbidden=[pad], **options)
    how = dict(method="beam" if beam > 1 else "greedy", beam=beam, length_penalty=1.0, penalty="power")
    decoding = Decoding(**how, extra=1000, max_length=STEPS - len(prefix))
    answers = engine.generate(sources, decoding, prefix=[prefix] * len(sources))
    assert [answer[0].tokens for answer in answers] == expected
