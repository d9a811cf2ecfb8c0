"""The losses of InstructGPT and WebGPT against their equations, one answer at a time and in double precision."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from allyouneed.nn.batch import Batch, Rows
from allyouneed.tasks.feedback.preference import ComparisonItems
from allyouneed.tasks.language.chat import ChatItems
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from parity import TOLERANCE
from toy_texts import Listener, recipe, write_all

EXACT = 1e-10


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("texts"))


def prepared(run: str, texts: Path, folder: Path):
    """Task, model in double precision, the first packed batch and its items with their numbers."""
    given = recipe(folder, texts, run)
    data = prepare(given, RunFolder(given.output), Reporter(Listener().console))
    torch.manual_seed(1)
    model = given.model_for(data.vocabularies, data.labels).build().double().eval()
    batch = next(data.train.batches(0))
    assert batch.rows.segments is not None and int(batch.rows.segments.max()) > 1, "nothing is packed"
    return given.task, model, batch, data.train.items, data.train.describe(0, 0)


def compare(record, system, source, model, found, expected, tolerance=EXACT):
    """Records differences of two losses and of their gradients; both must be rounding."""
    own = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
    theirs = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    outputs = float((found - expected).detach().abs() / expected.detach().abs().clamp(min=1))
    pairs = [(a, b) for a, b in zip(own, theirs, strict=True) if b is not None]
    gradients = max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)
    assert pairs and any(b.any() for _, b in pairs)
    record(system, source, outputs, gradients)
    assert outputs < tolerance and gradients < tolerance


def log_prob(model, prompt, answer):
    """log π(answer | prompt) = Σ_t log softmax(logits)_t, token by token."""
    tokens = torch.tensor([[*prompt, *answer]])
    logits = model.logits(Batch(Rows(tokens)))[0]
    return sum(
        logits[at - 1].log_softmax(-1)[int(tokens[0, at])] for at in range(len(prompt), len(prompt) + len(answer))
    )


def answers(items: ComparisonItems, number: int):
    return [items.store[name][number].tolist() for name in ("prompt", "chosen", "rejected")]


def test_dpo_is_equation_7(texts, tmp_path, record_difference):
    """Rafailov et al. 2023, eq. 7; the reference is the model to start from, which differs from the policy here."""
    import allyouneed as ayn

    task, policy, batch, items, numbers = prepared("dpo", texts, tmp_path)
    reference = ayn.load(task.reference).model.double()
    batch = Batch(batch.target, batch.source, torch.zeros(len(numbers), dtype=torch.float64))
    expected = 0
    for at, number in enumerate(numbers):
        prompt, chosen, rejected = answers(items, number)
        with torch.no_grad():
            ref = log_prob(reference, prompt, chosen), log_prob(reference, prompt, rejected)
        # computed before training, in single precision
        assert float(ref[0] - ref[1]) == pytest.approx(float(items.margins[number]), abs=1e-4)
        batch.labels[at] = ref[0] - ref[1]
        ratio = log_prob(policy, prompt, chosen) - ref[0], log_prob(policy, prompt, rejected) - ref[1]
        expected = expected - logsigmoid(task.beta * ratio[0] - task.beta * ratio[1])
    found = task.loss(policy, batch)
    assert int(found.tokens) == len(numbers)
    source = "DPO: Rafailov et al. 2023, eq. 7 written out"
    compare(record_difference, "InstructGPT", source, policy, found.total, expected)


def test_the_reward_model_is_equation_1(texts, tmp_path, record_difference):
    """Ouyang et al. 2022, eq. 1, with two answers per prompt."""
    task, model, batch, items, numbers = prepared("preference", texts, tmp_path)
    expected = 0
    for number in numbers:
        prompt, *both = answers(items, number)
        rewards = [model.logits(Batch(Rows(torch.tensor([[*prompt, *answer]]))))[0, 0] for answer in both]
        expected = expected - logsigmoid(rewards[0] - rewards[1])
    found = task.loss(model, batch).total
    compare(record_difference, "InstructGPT", "reward model: eq. 1 written out", model, found, expected)


def test_behaviour_cloning_is_the_likelihood_of_the_commands(texts, tmp_path, record_difference):
    """Nakano et al. 2021, 3.2: −Σ log p of what the demonstrator wrote, given the session so far; nothing else."""
    task, model, batch, items, numbers = prepared("chat", texts, tmp_path)
    assert isinstance(items, ChatItems)
    expected = 0
    for number in numbers:
        ids, written = items.store["text"][number].tolist(), items.store["answer"][number].tolist()
        logits = model.logits(Batch(Rows(torch.tensor([ids]))))[0].log_softmax(-1)
        expected = expected - sum(logits[at - 1, ids[at]] for at in range(len(ids)) if written[at])
    found = task.loss(model, batch).total
    # the fused cross-entropy computes in single precision
    compare(record_difference, "WebGPT", "behaviour cloning written out", model, found, expected, TOLERANCE)
