"""Probes: labels follow from tokens, the loop learns what can be learnt, controls refuse, results are kept."""

import pytest
import torch

from allyouneed.cli import main
from allyouneed.lab.probe import report, task
from allyouneed.lab.probe import run as probes
from allyouneed.lab.probe.tasks.group_words import ELEMENTS, TABLE
from allyouneed.lab.probe.train import Fit, fit, score
from allyouneed.lab.rates import RateCurve, RateRule
from allyouneed.lab.statistics import Control
from allyouneed.nn.batch import IGNORE

TASKS = task.names()


def example(name, length, rows=8):
    return task.find(name).make(torch.Generator().manual_seed(0), rows, length)


@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_labels_fit_the_vocabulary_at_every_length(name):
    one = task.find(name)
    for length in (*one.trained, one.longer):
        tokens, labels = example(name, length)
        assert tokens.shape == labels.shape and int(tokens.min()) >= 0 and int(tokens.max()) < one.vocab
        asked = labels[labels != IGNORE]
        assert len(asked) and int(asked.min()) >= 0 and int(asked.max()) < one.vocab
    assert all(one.about) and one.source and one.longer > one.trained[1] and 0 < one.chance <= 0.5


def test_labels_say_what_the_tasks_promise():
    def asked(name, length):
        tokens, labels = example(name, length, rows=1)
        return tokens[0].tolist(), [label for label in labels[0].tolist() if label != IGNORE]

    tokens, labels = asked("copy", 6)
    assert labels == tokens[:6]
    tokens, labels = asked("reversal", 6)
    assert labels == tokens[:6][::-1]
    tokens, labels = asked("sorting", 6)
    assert labels == sorted(tokens[:6])
    tokens, labels = asked("selective-copy", 20)
    assert labels == [token for token in tokens[:20] if token < 8]
    tokens, labels = asked("addition", 4)
    numbers = [int("".join(map(str, reversed(digits)))) for digits in (tokens[:4], tokens[5:9])]
    assert int("".join(map(str, reversed(labels)))) == sum(numbers)
    tokens, labels = asked("parity", 9)
    assert labels == [sum(tokens[: n + 1]) % 2 for n in range(9)]
    tokens, labels = asked("recall", 4)
    pairs = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
    assert labels == [pairs[key] for key in tokens[8::2]]
    tokens, labels = asked("induction", 10)
    assert labels == [tokens[tokens.index(tokens[-1]) + 1]]
    tokens, labels = asked("needle", 20)
    assert labels == [tokens[tokens.index(24) + 1]]


def test_group_words_are_words_of_a_group_of_sixty():
    assert len(ELEMENTS) == 60
    a, b, c = torch.randint(0, 60, (3, 200), generator=torch.Generator().manual_seed(0))
    assert torch.equal(TABLE[TABLE[a, b], c], TABLE[a, TABLE[b, c]])
    assert sorted(TABLE[7].tolist()) == list(range(60))


def test_an_lstm_learns_parity_and_nothing_learns_without_mixing():
    found = {}
    for name, mixer in (("lstm", "lstm"), ("identity", "identity")):
        torch.manual_seed(0)
        tree = probes.tree(probes.SIZES, {}) | {"vocab": 2, "decoder": [{"wiring": "pre-norm", "mixer": mixer}]}
        net = probes.parse(probes.Model, tree).build()
        one = task.find("parity")
        fit(net, probes.sample(one), Fit(1e-2, 150), probes.sample(one, 12))
        found[name] = score(net, probes.sample(one, 40))[1]
    assert found["lstm"] > 0.99 and found["identity"] < 0.6


def test_the_same_seed_gives_the_same_result():
    one = probes.experiment(probes.model_tree("retention"), "copy", 1e-3, 0, probes.ProbeSize(steps=3, rows=4))
    assert probes.run_one(one) == probes.run_one(one)


def test_a_control_that_does_not_land_refuses_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "controls", lambda store, size: [Control("no mixing, copy", 0.9, high=0.1)])
    with pytest.raises(SystemExit) as exit_:
        main(["probe", "retention", "--steps", "1", "-o", str(tmp_path)])
    shown = capsys.readouterr()
    assert exit_.value.code == 2 and "no mixing, copy" in shown.err and not shown.out


def test_a_second_call_trains_nothing_and_prints_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "controls", lambda store, size: [])
    docs = tmp_path / "docs"
    docs.mkdir()
    command = ["probe", "retention", "identity", "--tasks", "copy,parity", "--steps", "1", "--rates", "0.001"]
    command += ["-o", str(tmp_path / "runs"), "--write", str(docs)]
    with pytest.raises(SystemExit) as first:
        main(command)
    shown = capsys.readouterr().out
    assert first.value.code == 0 and "| retention |" in shown
    pages = [path.read_bytes() for path in sorted(docs.rglob("*.*"))]
    monkeypatch.setattr(probes, "run_one", lambda one, device: pytest.fail("it had run before"))
    with pytest.raises(SystemExit):
        main(command)
    assert capsys.readouterr().out == shown
    assert [path.read_bytes() for path in sorted(docs.rglob("*.*"))] == pages and len(pages) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bert-base"], "of kind encoder cannot be probed"),
        (["attention", "--tasks", "juggling"], "no probe task 'juggling'"),
        (["attention", "--rates", "fast"], "expected numbers above 0"),
        (["attention", "--write", "nowhere"], "no such folder"),
    ],
)
def test_mistakes_are_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probes, "controls", lambda store, size: [])
    with pytest.raises(SystemExit) as exit_:
        main(["probe", *words, "--steps", "1", "-o", str(tmp_path)])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_best_model_stands_first_and_what_cannot_read_longer_texts_has_no_figure():
    curve = RateCurve({1e-3: 1.0, 3e-3: 0.5, 1e-2: 1.0})
    cells = {
        ("weak", "copy"): probes.ProbeCell((0.1,), (None,), (9,), curve),
        ("strong", "copy"): probes.ProbeCell((0.9,), (0.8,), (9,), curve),
    }
    assert report.axes(cells)[0] == ["strong", "weak"]
    assert "| weak | 10 / – |" in report.table(cells)
    assert report.heat_map(cells).count("<rect") == 5 and not list(report.notes(cells))


def test_only_the_named_rates_are_tried():
    assert RateRule((0.005,), extensions=0).next({0.005: 1.0}) == ()
