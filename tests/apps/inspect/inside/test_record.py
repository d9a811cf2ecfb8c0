"""Every value inside every preset has a name, and recording changes no bit of the output."""

import pytest
import torch
from torch import nn

from allyouneed.apps.inspect.inside import inside
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from inside_models import PIXELS, SENTENCE, make_predictor, small, translator, unlike_presets
from shrink import GRID, PATCH


def sublayers(model):
    return [
        (f"{path.replace('.blocks', '')}.{name}", part)
        for path, block in model.named_modules()
        if hasattr(block, "sublayers")
        for name, part in block.sublayers.items()
    ]


@pytest.mark.parametrize("name", unlike_presets())
def test_every_sublayer_of_every_preset_is_recorded_and_the_output_keeps_its_bits(name):
    model, batch = small(name)
    seen = {}

    def hook(site):
        return lambda module, given, output: seen.update({site: seen.get(site, output)})

    hooks = [part.register_forward_hook(hook(site)) for site, part in sublayers(model)]
    with torch.no_grad():
        plain = model.logits(batch)
    for one in hooks:
        one.remove()
    run = inside(model, batch)
    assert torch.equal(run.logits, plain)
    assert len(run.names) == len(run.values)
    assert seen.keys() <= run.names.keys()
    assert all(torch.equal(run[site], output) for site, output in seen.items())
    for stack, blocks in run.stacks.items():
        assert {f"{stack}.{n}" for n in range(blocks)} | {f"{stack}.{n}.in" for n in range(blocks)} <= run.names.keys()


def test_shared_blocks_are_recorded_apart_and_every_sum_holds():
    model, batch = small("albert-base")
    run = inside(model, batch)
    assert model.encoder.blocks[0] is model.encoder.blocks[1]
    assert torch.equal(run["encoder.1.in"], run["encoder.0"])
    assert not torch.equal(run["encoder.0.mixer"], run["encoder.1.mixer"])
    norm = model.encoder.blocks[0].wiring.norms[0]
    added = run["encoder.1.in"] + run["encoder.1.mixer"]
    assert torch.allclose(
        nn.functional.layer_norm(added, (32,), norm.weight, norm.bias, norm.eps), run["encoder.1.mixer.norm"]
    )


def test_attention_is_recorded_from_queries_to_heads():
    model, batch = small("transformer-tiny")
    run = inside(model, batch)
    site = "decoder.1.cross"
    weights, v = run[f"{site}.weights"], run[f"{site}.v"]
    assert torch.allclose(run[f"{site}.scores"].softmax(-1), weights, atol=1e-6)
    assert torch.allclose(weights @ v, run[f"{site}.heads"], atol=1e-5)
    assert torch.equal(model.attention(batch, "cross", [1])[1], weights)


def test_names_of_shapes_are_those_of_the_values_and_a_wrong_one_is_refused():
    model, batch = small("mixtral-8x7b")
    run = inside(model, batch)
    assert all(run.names[name] == tuple(run[name].shape) for name in run.names)
    assert run.names["decoder.0.channel.router"][-1] == 4
    with pytest.raises(UserError, match=r"decoder.0.mixr.*did you mean 'decoder.0.mixer'"):
        run["decoder.0.mixr"]


def test_another_thread_is_not_recorded():
    from concurrent.futures import ThreadPoolExecutor

    from allyouneed.apps.inspect.inside.recorder import Recorder
    from allyouneed.nn.observe import probing

    model, batch = small("gpt2")
    recorder = Recorder(model)
    with probing(recorder), torch.no_grad(), ThreadPoolExecutor(1) as pool:
        pool.submit(model.logits, batch).result()
    assert not len(recorder.values)


def test_the_shipped_translator_shows_the_running_example():
    model = translator()
    run = model.inside("机器学习很有趣")
    assert [token.text for token in run.tokens["encoder"]] == ["<2en>", "机器", "学习", "很", "有趣", "</s>"]
    assert "".join(run.name(answer.id) for answer in run.answers).lower() == "machine learning is interesting</s>"
    assert run.python == "model.inside('机器学习很有趣')"
    best = run.candidates(run.answers[0].position, 3)
    assert best[0].id == run.answers[0].id and best[0].log_prob == pytest.approx(run.log_prob(run.answers[0]))
    caches = [step.states[0].tensors["keys"][2] for step in run.steps]
    assert caches == list(range(1, len(run.answers) + 1))
    assert run.steps[-1].bytes == 2 * 2 * 8 * 64 * 4 * (len(run.answers) + 6)
    given = model.inside("机器学习很有趣", target="Maschine")
    assert "".join(run.name(answer.id) for answer in given.answers) == "Maschine</s>"


def test_a_bare_module_takes_a_batch_or_its_inputs():
    model, _ = small("transformer-tiny")
    source, target = Rows.of([[5, 6, 7]]), Rows.of([[1, 8]])
    run = inside(model, source, target)
    assert torch.equal(run.logits, inside(model, Batch(target, source)).logits)
    assert [token.id for token in run.tokens["encoder"]] == [5, 6, 7]


ENCODER, IMAGE = "bert-base", {"size": [GRID * PATCH, GRID * PATCH]}
TWO = {"labels": ["a", "b"]}
TASKS = {  # preset, options of the task, input, changes, kind of output, answers
    "masked-lm": (ENCODER, {}, "How <mask> you", {}, "mask", 1),
    "classification": (ENCODER, {}, ("a", "b"), TWO | {"head": {"kind": "classes", "labels": 2}}, "classes", 1),
    "tagging": (ENCODER, {}, "How are you", TWO | {"head": {"kind": "tags", "labels": 2}}, "tags", 5),
    "similarity": (ENCODER, {"range": [0, 1]}, "How are you", {"head": {"kind": "pooled"}}, "vector", 0),
    "permutation-lm": ("xlnet-base", {}, "How <mask> you", {}, "mask", 1),
    "span-corruption": ("t5-small", {"sentinels": 2}, "How <mask> you", {}, "tokens", None),
    "seq2seq": ("t5-small", {}, SENTENCE, {}, "tokens", None),
    "image-text": ("clip-vit-b-32", {"image": IMAGE}, (PIXELS, "a fox"), {}, "similarity", 1),
    "causal-lm": ("yoco-3b", {}, SENTENCE, {}, "tokens", None),
    "prefix-lm": ("gpt2", {}, SENTENCE, {}, "tokens", None),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_predictor_shows_what_its_model_reads_and_chooses(task):
    preset, options, given, changes, output, answers = TASKS[task]
    model = make_predictor(preset, {"kind": task} | options, **changes)
    run = model.inside(*given) if task == "image-text" else model.inside(given)
    assert run.reading.output == output
    assert answers is None or len(run.answers) == answers
    for stack, tokens in run.tokens.items():
        assert run[f"{stack}.0.in"].shape[1] == len(tokens)
    if output == "tokens":
        assert len(run.steps) == len(run.answers) <= len(run.tokens[list(run.stacks)[-1]])
        inputs = run.batch.rows.tokens[0].tolist()
        assert [answer.id for answer in run.answers[:-1]] == inputs[run.reading.given :]
    if task == "classification":
        assert run.name(run.answers[0].id) == model.classify(given)
