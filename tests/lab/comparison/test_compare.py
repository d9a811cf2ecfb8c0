"""The lab's comparison: plans, guards, verdicts, and a journey on a small text."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from allyouneed.cli import main
from allyouneed.config import preset_tree, tree_of
from allyouneed.errors import UserError
from allyouneed.lab.comparison import compare as lab
from allyouneed.lab.comparison.compare import ComparisonSettings, Contender, ModelComparison, compare, plan, standings
from allyouneed.lab.comparison.report import page, recommendation, summary, write_report
from allyouneed.lab.comparison.sizes import Sized
from allyouneed.lab.rates import RateCurve, RateRule
from allyouneed.lab.store import ResultStore
from allyouneed.training import load_recipe
from waiting import until

COSTS = {name: {"update": seconds, "validation": 1.0} for name, seconds in (("a", 0.1), ("b", 0.3), ("c", 0.2))}
RATES = (3e-3, 1e-2, 3e-2)
SMALL = ComparisonSettings(steps=8, width=16, blocks=1, rule=RateRule(RATES, extensions=0))


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_budget_takes_fewer_steps_before_it_leaves_models_out():
    long, short = (plan(["a", "b", "c"], COSTS, ComparisonSettings(budget=60.0 * n)) for n in (120, 12))
    assert long.left_out == short.left_out == {}
    assert set(long.steps.values()) == {600} and 100 <= short.steps["a"] < 600
    assert short.seconds <= 12 * 60


def test_a_short_budget_leaves_the_slowest_out_and_says_so():
    found = plan(["b", "a", "c"], COSTS, ComparisonSettings(budget=340.0))
    assert list(found.left_out) == ["c"] and "slowest" in found.left_out["c"]
    assert list(found.steps) == ["b", "a"], "the first that was named stays, though it is slower"


def test_a_budget_too_short_for_two_models_is_refused():
    with pytest.raises(UserError, match=r"take about \d+ minutes"):
        plan(["a", "b", "c"], COSTS, ComparisonSettings(budget=30.0))


def test_models_matched_by_time_take_as_many_steps_as_fit_into_it():
    found = plan(["a", "b", "c"], COSTS, ComparisonSettings(match="time", steps=300))
    assert found.steps == {"a": 300, "b": 100, "c": 150}


# --- verdicts ---------------------------------------------------------------------------------------------------------


def contender(name, losses, best=1e-3, decoding=100.0, training=10.0, warnings=()):
    """With (seeds) mean losses; None: diverged."""
    generator = np.random.default_rng(7)
    hard = generator.normal(0, 0.3, 40)
    runs = [
        {"loss": loss, "diverged": None if loss else "not finite at step 3", "tokens": 9, "curve": [[1, 5.0]]}
        | {"losses": [] if loss is None else list(loss + hard), "counts": [] if loss is None else [5] * 40}
        for loss in losses
    ]
    curve = RateCurve({best / 3: 9.0, best: 3.0, best * 3: 9.0})
    tree = preset_tree("gpt2") | {"vocab": 500}
    costs = {"decoding": {"1024": decoding, "32768": decoding}, "training": training, "memory": 1e6, "joules": None}
    return Contender(Sized(name, tree, 1.0), 100, curve, runs, costs, list(warnings))


def compared(*contenders, left_out=None, labels=()):
    task = SimpleNamespace(
        has_perplexity=True, loss_unit="tokens", file_type=SimpleNamespace(examples="documents"), kind="causal-lm"
    )
    data = SimpleNamespace(train=[SimpleNamespace(files=lambda: [Path("a.txt")])])
    recipe = SimpleNamespace(task=task, max_tokens=64, data=data, task_kind="causal-lm")
    corpus = SimpleNamespace(recipe=recipe, prepared=SimpleNamespace(examples=12, labels=labels))
    return ModelComparison(
        ComparisonSettings(), corpus, list(contenders), standings(contenders), left_out or {}, "a machine"
    )


def test_models_whose_difference_may_be_chance_are_inconclusive():
    found = standings([contender("a", [3.0, 3.1, 3.2]), contender("b", [3.05, 3.0, 3.3])])
    assert [one.verdict for one in found] == ["best", "inconclusive"]


def test_a_clearly_higher_loss_is_worse():
    found = standings([contender("a", [4.0, 4.01, 4.02]), contender("b", [3.0, 3.01, 3.02])])
    assert [(one.name, one.verdict) for one in found] == [("b", "best"), ("a", "worse")]
    assert found[1].behind.mean == pytest.approx(1.0)


def test_diverged_runs_are_not_averaged_in_and_a_model_of_them_has_no_standing():
    found = standings([contender("a", [3.0, None, 3.2]), contender("b", [3.1, 3.1, 3.3]), contender("c", [None] * 3)])
    assert [one.name for one in found] == ["a", "b"]
    assert found[0].loss.mean == pytest.approx(3.1, abs=0.11) and found[0].loss.seeds == 2
    assert found[1].behind.seeds == 2, "compared on the seeds that both finished"


def test_of_models_that_are_as_good_the_clearly_faster_one_is_recommended():
    same = [3.0, 3.01, 3.02], [3.005, 3.0, 3.03]
    slow, fast = contender("slow", same[0]), contender("fast", same[1], decoding=150.0)
    assert compared(slow, fast).recommended == "fast"
    near = contender("fast", same[1], decoding=105.0)
    assert compared(slow, near).recommended == "slow", "a lead of 5% is none"
    worse = contender("fast", [4.0, 4.01, 4.02], decoding=900.0)
    assert compared(slow, worse).recommended == "slow", "speed does not buy a worse loss"


def test_a_wide_interval_is_not_taken_for_equality():
    best, wild = contender("best", [3.0, 3.01, 3.02]), contender("wild", [2.5, 3.1, 3.9], decoding=900.0)
    found = compared(best, wild)
    assert [one.verdict for one in found.standings] == ["best", "inconclusive"]
    assert found.recommended == "best" and "may be as good, or clearly worse" in summary(found)


def test_models_that_only_guess_are_not_recommended():
    found = compared(contender("a", [0.69, 0.7, 0.68]), contender("b", [0.7, 0.71, 0.69]), labels=("yes", "no"))
    assert found.recommended is None and "better than guessing" in recommendation(found)[0].en
    assert page(found, "allyouneed compare a b")


def test_every_guard_is_on_the_page_and_in_the_summary():
    odd = contender("odd", [3.0, 3.1, None], warnings=["seed 3 diverged (not finite at step 3) and is not in its mean"])
    found = compared(odd, contender("b", [4.0] * 3), left_out={"blind": "the first token sees 1 of 64"})
    for text in (page(found, "allyouneed compare odd b"), summary(found)):
        assert "seed 3 diverged" in text and "the first token sees 1 of 64" in text


def test_the_recommendation_is_given_in_both_languages():
    for lines in (recommendation(compared(contender("a", [3.0] * 3), contender("b", [4.0] * 3))),):
        assert lines[0] == ("Take a.", "建议选用 a。")
        assert all(one.en != one.zh for one in lines)
    assert "no model finished" in recommendation(compared(contender("a", [None] * 3)))[0].en


# --- a journey --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    dice = random.Random(0)
    words = ["".join(dice.choices("etaoinshr", k=3)) for _ in range(60)]
    lines = ["\n".join(" ".join(dice.choices(words, k=9)) for _ in range(4)) for _ in range(120)]
    file = tmp_path_factory.mktemp("data") / "mine.txt"
    file.write_text("\n\n".join(lines))
    return file


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A finished comparison: its folder and page."""
    from allyouneed.cli.lab.compare import write_recipe

    folder = tmp_path_factory.mktemp("compare") / "out"
    write_recipe(
        folder, [text], "causal-lm", ["batch.row=64", "batch.rows=2", "data.max_tokens=64", "tokenizer.vocab=300"]
    )
    models = {name: preset_tree(name) for name in ("gpt2", "rwkv-4-169m")}
    found = compare(models, folder, SMALL)
    return folder, write_report(found, folder, "allyouneed compare").read_bytes(), models


def again(folder, models):
    found = compare(models, folder, SMALL)
    return write_report(found, folder, "allyouneed compare").read_bytes()


def test_models_are_compared_on_ones_own_text(finished):
    folder, written, _ = finished
    html = written.decode()
    assert "gpt2" in html and "rwkv-4-169m" in html and "建议选用" in html and "<svg" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html
    changes = [f"model={folder / 'models' / 'rwkv-4-169m.yaml'}", "schedule={kind: cosine, peak: 0.01}"]
    recipe = load_recipe(folder / "recipe.yaml", changes)  # the command on the page
    assert tree_of(recipe.model_for(None))["decoder"][0]["mixer"]["kind"] == "rwkv"


def test_a_comparison_that_has_run_is_not_run_again(finished, monkeypatch):
    folder, written, models = finished

    def refuse(*_, **__):
        raise AssertionError("it was run again")

    monkeypatch.setattr(lab, "train_model", refuse)
    monkeypatch.setattr(lab, "measure_models", refuse)
    assert again(folder, models) == written


def test_a_comparison_that_was_killed_ends_with_the_same_bytes(finished, tmp_path):
    folder, written, models = finished
    copied = tmp_path / "out"
    shutil.copytree(folder, copied)
    runs = sorted(p for p in (copied / "results").glob("*.json") if '"kind": "training"' in p.read_text())
    assert len(runs) == 2 * 3 + 2 * 2  # rates, then the other seeds
    for run in itertools.chain(runs[::2]):
        run.unlink()
    (copied / "compare.html").unlink()
    (copied / "results" / f".{runs[0].name}.0123abcd").write_text("half of a re")  # what a kill leaves
    assert again(copied, models) == written


@pytest.mark.slow
def test_a_killed_command_resumes_to_the_same_bytes(finished, text, tmp_path):
    folder, written, models = finished
    copied = tmp_path / "out"
    shutil.copytree(folder, copied)
    for path in (copied / "results").glob("*.json"):
        if '"kind": "training"' in path.read_text():
            path.unlink()
    program = (
        "from pathlib import Path; from allyouneed.config import preset_tree\n"
        "from allyouneed.lab.comparison.compare import ComparisonSettings, compare\n"
        "from allyouneed.lab.rates import RateRule\n"
        "models = {name: preset_tree(name) for name in ('gpt2', 'rwkv-4-169m')}\n"
        f"compare(models, Path({str(copied)!r}), ComparisonSettings(steps=8, width=16, blocks=1, "
        f"rule=RateRule({RATES!r}, extensions=0)))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"OMP_NUM_THREADS": "1"})
    until(lambda: len(list((copied / "results").glob("*.json"))) >= 5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert again(copied, models) == written


def test_the_same_seed_reads_the_same_batches_whatever_the_model(finished):
    from allyouneed.lab.comparison.training import open_corpus

    corpus = open_corpus(str(finished[0]))

    def first(seed):
        with corpus.updates(seed) as updates:
            return [next(updates).batches[0].rows.tokens.tolist() for _ in range(3)]

    assert first(1) == first(1) != first(2)


def test_a_store_knows_what_determines_a_result(finished):
    from allyouneed.lab.comparison.training import open_corpus

    facts = open_corpus(str(finished[0])).facts()
    assert facts["sha256"] and facts["tokenizer"] and facts["versions"]["torch"]
    paths = {ResultStore(finished[0] / "results").path(facts | {"rate": rate}) for rate in (1e-3, 3e-3)}
    assert len(paths) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2"], "at least two models"),
        (["gpt2", "llama-7b"], "--data"),
        (["gpt2", "gpt3", "--data", "{text}"], "'gpt3': unknown preset"),
        (["gpt2", "llama-7b", "--data", "{text}", "--match", "size"], "expected parameters"),
        (["gpt2", "llama-7b", "--data", "{text}", "--budget", "soon"], "such as 20m"),
        (["gpt2", "llama-7b", "--data", "{text}", "--rates", "1,x"], "at least three rates"),
        (["gpt2", "llama-7b", "--data", "nothing.txt"], "nothing.txt"),
        (["gpt2", "llama-7b", "--data", "{text}", "--seeds", "1"], "at least 3"),
    ],
)
def test_a_mistake_is_one_message(arguments, message, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", *(one.format(text=text) for one in arguments), "--output", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_models_of_another_kind_are_left_out_with_the_reason(finished):
    folder, _, models = finished
    with pytest.raises(UserError, match=r"at least two models are needed.*\n  vit-tiny: "):
        compare({"gpt2": models["gpt2"], "vit-tiny": preset_tree("vit-tiny")}, folder, SMALL)


def test_plots_are_valid_svg_on_the_page(finished):
    html = finished[1].decode()
    plots = [f"<svg{part.split('</svg>')[0]}</svg>" for part in html.split("<svg")[1:]]
    assert len(plots) >= 4
    for one in plots:
        ElementTree.fromstring(one)
