"""Why this word: effects are those of leaving out by hand, and attributions add up to the logit."""

import pytest
import torch

from allyouneed.apps.inspect.inside import inside
from allyouneed.apps.inspect.inside.effects import token_groups
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from inside_models import SYSTEMS, first_row, make_predictor, record_system, small, translator

SUMS = ["gpt-2", "retnet", "rwkv", "moe", "t5", "whisper"]


@pytest.mark.parametrize("name", SUMS)
def test_direct_attributions_add_up_to_the_logit(name):
    run = record_system(name)
    for unit in ("sublayer", "head", "block"):
        for number in (0, -1):
            why, answer = run.why(number, "logits", unit), run.answers[number]
            logit = float(run.logits[0, answer.position, answer.id])
            total, size = sum(one.value for one in why.units), float(run.logits[0, answer.position].abs().max())
            assert why.total == logit and abs(total - logit) <= 1e-5 * size
    heads = [unit for unit in run.why(0, "logits", "head").units if ".heads[" in unit.name]
    assert bool(heads) == (name not in ("retnet", "rwkv"))  # gates follow their heads


@pytest.mark.parametrize("preset", ["gpt2", "bloom-560m", "mistral-7b", "deepseek-v2-lite"])
def test_norms_scales_and_parallel_blocks_add_up_too(preset):
    changes = {"gpt2": {"norm": {"kind": "scale"}}, "mistral-7b": {}}.get(preset, {})
    run = make_predictor(preset, {"kind": "causal-lm"}, **changes).inside("How are you")
    assert run.why(0, "logits").residual < 1e-5


def test_wirings_whose_stream_is_no_sum_are_refused():
    run = record_system("post-norm encoder-decoder")
    with pytest.raises(UserError, match="wiring 'post-norm' normalises the stream itself; use method='causal'"):
        run.why(0, "logits")
    with pytest.raises(UserError, match="its head gives no logits of tokens"):
        record_system("vit").why(0, "logits")


def test_the_effect_of_a_token_is_that_of_a_sentence_without_it():
    model, batch = small("transformer-tiny")
    one = first_row(batch)
    run = inside(model, one)
    why = run.why(3)
    answer = run.answers[3]
    for unit in why.units[:3] + why.units[-2:]:
        rows = {"encoder": one.source, "decoder": one.target}
        kept = [n for n in range(rows[unit.name].tokens.shape[1]) if n not in unit.tokens]
        rows[unit.name] = Rows(rows[unit.name].tokens[:, kept], positions=torch.tensor([kept]))
        position = answer.position - (unit.name == "decoder" and unit.tokens[0] < answer.position)
        with torch.no_grad():
            logits = model.logits(Batch(rows["decoder"], rows["encoder"]))[0, position]
        assert unit.value == pytest.approx(why.total - float(logits.log_softmax(-1)[answer.id]), abs=1e-5)
    assert all(unit.tokens[0] < 3 for unit in why.units if unit.name == "decoder")  # nothing after it, and not itself


@pytest.mark.parametrize("name", ["post-norm encoder-decoder", "vit", "whisper", "moe"])
def test_the_effect_of_a_part_is_that_of_switching_it_off(name):
    run = record_system(name)
    for unit in ("head", "sublayer", "block"):
        why = run.why(0, unit=unit)
        for one in (why.units[0], why.units[-1]):
            assert one.value == pytest.approx(why.total - run.ablate(one.name).log_prob(run.answers[0]), abs=1e-4)
    if name in ("vit", "whisper"):
        token = run.why(0).units[3]
        masked = run.mask(*token.tokens, stack=token.name)
        assert token.value == pytest.approx(why.total - masked.log_prob(run.answers[0]), abs=1e-4)


def test_the_lens_ends_in_the_output_of_the_model():
    for name in SYSTEMS:
        run = record_system(name)
        lens, position = run.lens(0), run.answers[0].position
        last = list(lens.values())[-1]
        assert [one.id for one in last] == [one.id for one in run.candidates(position)]
        assert last[0].log_prob == pytest.approx(run.candidates(position)[0].log_prob, abs=1e-5)
        assert len(lens) == 1 + run.stacks[list(run.stacks)[-1]]


def test_the_running_example_rests_on_the_right_word():
    run = translator().inside("机器学习很有趣")
    number = next(n for n, answer in enumerate(run.answers) if run.name(answer.id) == " interesting")
    for method in ("causal", "attention"):
        why = run.why(number, method)
        source = {unit.label: unit.value for unit in why.units if unit.name == "encoder"}
        assert max(source, key=source.get) == "有趣"
    shares = run.why(number, "rollout").units
    assert sum(unit.value for unit in shares) == pytest.approx(1)


def test_tokens_of_one_character_are_left_out_together():
    run = record_system("gpt-2")
    groups = token_groups(run.tokens["decoder"], 128)
    assert sorted(n for group in groups for n in group) == list(range(len(run.tokens["decoder"])))
    assert len(token_groups(run.tokens["decoder"], 4)) == 4
    with pytest.raises(UserError, match=r"unknown method 'x' \(allowed: causal"):
        run.why(0, "x")
    with pytest.raises(UserError, match="answer 99: expected 0 to"):
        run.why(99)
