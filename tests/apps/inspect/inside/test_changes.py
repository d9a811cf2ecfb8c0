"""What if: changed runs do what they say, and a change without effect is an error."""

import pytest
import torch

from allyouneed.apps.inspect.inside import inside
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from inside_models import SENTENCE, first_row, record_system, small, translator, unlike_presets

TEXT = "机器学习很有趣"


@pytest.mark.parametrize("name", unlike_presets("wiring", "channel"))
def test_in_every_system_a_sublayer_can_be_switched_off_and_put_back(name):
    model, batch = small(name)
    run = inside(model, batch)
    site = next(site for site in reversed(run.recorder.calls) if site.endswith((".mixer", ".channel", ".cross")))
    off = run.ablate(site)
    assert not off[site].any() and not torch.equal(off.logits, run.logits)
    back = off.patch(site, run)
    assert torch.equal(back.logits, run.logits)


def test_a_head_switched_off_is_the_sum_of_the_others():
    model, batch = small("gpt2")
    run = inside(model, batch)
    off = run.ablate("decoder.1.mixer.heads[2]")
    heads = run["decoder.1.mixer.heads"].clone()
    heads[:, 2] = 0
    wanted = model.decoder.blocks[1].sublayers["mixer"].out(heads.transpose(1, 2).flatten(2))
    assert torch.allclose(off["decoder.1.mixer"], wanted, atol=1e-6)


def test_a_block_switched_off_passes_its_input_on():
    for name, block in (("gpt2", "decoder.0"), ("residual", "encoder.1"), ("reformer", "decoder.3")):
        model, batch = small(name)
        off = inside(model, batch).ablate(block)
        assert torch.equal(off[block], off[f"{block}.in"])


def test_changed_weights_change_the_sum():
    model, batch = small("transformer-tiny")
    run = inside(model, batch)
    site = "decoder.0.cross"
    even = run.patch(f"{site}.weights", lambda weights: torch.full_like(weights, 1 / weights.shape[-1]))
    mean = even[f"{site}.v"].mean(2, keepdim=True)
    assert torch.allclose(even[f"{site}.heads"], mean.expand_as(even[f"{site}.heads"]), atol=1e-6)
    flat = run.patch(f"{site}.scores", lambda scores: torch.zeros_like(scores))
    assert torch.allclose(flat[f"{site}.weights"].sum(-1)[0], torch.ones(()))


@pytest.mark.parametrize("name", ["transformer-tiny", "gpt2", "rwkv-4-169m", "t5-small", "convs2s"])
def test_a_masked_token_is_never_read_and_the_others_keep_their_positions(name):
    model, batch = small(name)
    one = first_row(batch)
    run = inside(model, one)
    stack = next(iter(run.tokens))
    masked = run.mask(2, stack=stack)
    side = one.source if isinstance(one.source, Rows) else one.target
    other = side.tokens.clone()
    other[:, 2] = (other[:, 2] + 5) % 40 + 1
    again = Batch(one.target, Rows(other)) if isinstance(one.source, Rows) else Batch(Rows(other))
    assert torch.equal(inside(model, again).mask(2, stack=stack).logits, masked.logits)
    assert masked.batch is not run.batch and len(masked.tokens[stack]) == len(run.tokens[stack]) - 1


def test_the_running_example_becomes_another_sentence():
    model = translator()
    run, other = model.inside(TEXT), model.inside("机器学习很难")
    patched = run.patch("encoder.7", other, positions=[3, 4])
    assert "".join(word.text for word in patched.rewrite()) == "Machine learning is difficult</s>"
    changed = "patch('encoder.7', model.inside('机器学习很难'), positions=[3, 4])"
    assert patched.python == f"model.inside({TEXT!r}).{changed}"
    assert "".join(word.text for word in run.mask(3, 4).rewrite()) == "Machine learning</s>"
    assert "".join(word.text for word in run.rewrite()) == "Machine learning is interesting</s>"


def test_positions_are_moved():
    run = record_system("gpt-2")
    count = run.batch.rows.tokens.shape[1]
    moved = run.place(list(range(1, count + 1)))
    assert torch.equal(moved["embed.positions"][0, :-1], run["embed.positions"][0, 1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.ablate("decoder.9"), "decoder.9: no such value"),
        (lambda run: run.ablate("decoder.0.mixer.heads[99]"), "there are 4 heads, from 0"),
        (lambda run: run.ablate("decoder.0.mixer.mask"), "cannot be changed"),
        (lambda run: run.patch("embed", run), "left every number as it was"),
        (lambda run: run.patch("embed", torch.zeros(1, 2, 3)), r"has shape .* new value \(1, 2, 3\)"),
        (lambda run: run.patch("embed", run, positions=[99]), "this run has"),
        (lambda run: run.edit("embed", (0,), 1.0), "is no index of it"),
        (lambda run: run.edit("embed", (0, 0), float(run["embed"][0, 0, 0])), "left every number as it was"),
        (lambda run: run.mask(99), "expected numbers from 0"),
        (lambda run: run.mask(0, stack="encoder"), "unknown stack 'encoder'"),
        (lambda run: run.place([0, 1]), "one per token of decoder"),
        (lambda run: run.patch("embed", "text"), "expected a run, a tensor"),
    ],
)
def test_a_change_without_effect_is_an_error(change, message):
    run = record_system("gpt-2")
    with pytest.raises(UserError, match=message):
        change(run)


def test_changes_add_up_and_the_python_line_makes_the_same_run():
    run = record_system("gpt-2")
    twice = run.ablate("decoder.0.mixer").edit("decoder.1.in", (1, 2), 3.0)
    assert float(twice["decoder.1.in"][0, 1, 2]) == 3.0 and not twice["decoder.0.mixer"].any()
    from inside_models import system

    assert torch.equal(eval(twice.python, {"model": system("gpt-2").predictor}).logits, twice.logits)
    assert twice.original.python == f"model.inside({SENTENCE!r})"
