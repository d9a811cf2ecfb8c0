"""Generative models: our beam search gives what theirs gives, prompt by prompt.

Ours goes on with all prompts at once, theirs with one at a time and without its cache: some of theirs take padding for
text, or keep a state that is wrong for more than one row. Greedy continuations are compared in tests/parity.
"""

import pytest
import torch

import hf_models as foreign
import parity
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine

PROMPTS = [[1, 5, 7, 9, 3, 2, 11], [4, 8], [12]]
END, STEPS, BEAM = 6, 8, 3
WRITERS = [(family, name) for family, name in foreign.CASES if foreign.writes(family)]
FIRSTS = list({family: (family, name) for family, name in reversed(WRITERS)}.values())
# logits of every variant are compared elsewhere
CASES = [case if case in FIRSTS else pytest.param(*case, marks=pytest.mark.slow) for case in WRITERS]


@pytest.mark.parametrize("family, name", CASES, ids=lambda word: word.replace(" ", "-"))
def test_beam_search_finds_the_same(family, name, tmp_path):
    theirs = foreign.theirs(family, name, seed=1)
    with torch.no_grad():  # biases of about one would drown what a text says, and so would its last token alone
        for key, parameter in theirs.named_parameters():
            parameter.sub_(1.0 if key.endswith("bias") else 0.0)
            parameter.mul_(2.0 if parameter.dim() > 1 and len(parameter) != theirs.config.vocab_size else 1.0)
    options = dict(num_beams=BEAM, num_return_sequences=BEAM, length_penalty=1.0, early_stopping=False, do_sample=False)
    options |= dict(max_new_tokens=STEPS, eos_token_id=END, pad_token_id=0, use_cache=False)
    expected = []
    with torch.compiler.set_stance("force_eager"):  # BitNet compiles how it rounds
        for prompt in PROMPTS:
            rows = theirs.generate(input_ids=torch.tensor([prompt]), **options)[:, len(prompt) :].tolist()
            expected.append([row[: row.index(END)] if END in row else row for row in rows])
    engine = Engine(parity.ours(theirs, tmp_path), bos=1, eos=END, pad=0)
    decoding = Decoding(beam=BEAM, best=BEAM, length_penalty=1.0, penalty="power", max_length=STEPS)
    found = [[answer.tokens for answer in answers] for answers in engine.complete(PROMPTS, decoding)]
    assert found == expected
    assert len({tuple(row) for rows in expected for row in rows}) > 4, "too much alike"
