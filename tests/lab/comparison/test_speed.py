import torch

import allyouneed as ayn
from allyouneed.lab.comparison.speed import DecodingRow, UpdateMemory, decoding_speeds
from allyouneed.nn.batch import Batch, Rows


def model(mixer, **keys):
    torch.manual_seed(0)
    layer = {"wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 32}}
    tree = {"kind": "decoder", "vocab": 50, "width": 16, "embed": {"scale": "none"}, "decoder": [layer]} | keys
    return ayn.build(tree)


def test_decoding_continues_after_as_many_tokens_as_were_pretended():
    row = DecodingRow(model({"kind": "attention", "heads": 2, "pattern": "causal"}).eval(), 300)
    assert row.states.layers[0]["mixer"].end == 300
    assert row.turn(2) > 0
    assert row.states.lengths == [302]


def test_models_that_cannot_read_so_much_say_why():
    learned = {"embed": {"positions": {"kind": "learned", "length": 64}, "scale": "none"}}
    attention = {"kind": "attention", "heads": 2, "pattern": "causal"}
    speeds = decoding_speeds([model({"kind": "retention", "heads": 2}), model(attention, **learned)], [128])
    assert speeds[0]["128"] > 0 and speeds[1]["128"] == "reads at most 64 tokens"


def test_the_memory_of_an_update_grows_with_what_is_kept_for_the_backward_pass():
    one = model({"kind": "attention", "heads": 2, "pattern": "causal"})
    taken = []
    for length in (32, 64):
        with UpdateMemory(one) as memory:
            one.head(one(Batch(Rows(torch.zeros(2, length, dtype=torch.long))))).sum().backward()
        taken.append(memory.bytes)
    weights = 4 * sum(weight.nbytes for weight in one.parameters())
    assert weights < taken[0] < taken[1]
    assert 1.8 < (taken[1] - weights) / (taken[0] - weights) < 4.2
