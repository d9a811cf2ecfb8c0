"""The registry of claims, its verdicts, and the pages that are written from both."""

import json
import math
from pathlib import Path

import pytest

from allyouneed.cli import main
from allyouneed.lab.claims import pages, run
from allyouneed.lab.claims.claim import ClaimRun, Figure, Outcome, find, names, topic, verdict

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = json.loads((DOCS / "results" / "claims.json").read_text(encoding="utf-8"))
MEASURED = [name for name in names() if find(name).measure is not None]
QUICK = ["mla-cache", "path-length", "two-hops", "parity", "retnet-decoding", "glu-two-thirds"]


def figure(*values, **keys):
    return Figure(("figure", "数字"), values, **keys)


def test_every_claim_says_what_is_tested_in_both_languages_or_why_it_is_not():
    assert len(names()) >= 50
    for name in names():
        claim = find(name)
        texts = (claim.says, claim.tests) if claim.measure else (claim.says, claim.why_not)
        assert claim.paper and all(text for pair in texts for text in pair), name
        assert all(any("一" <= letter <= "鿿" for letter in pair[1]) for pair in texts), name
        assert topic(name) in pages.TOPICS


def test_a_figure_is_judged_by_its_interval_and_the_range_that_was_predicted():
    assert figure(0.5, low=0.4, high=0.6).verdict == "confirmed"
    assert figure(0.7, low=0.4, high=0.6).verdict == "refuted"
    assert figure(0.50, 0.51, 0.52, low=0.4, high=0.6).verdict == "confirmed"
    assert figure(0.90, 0.91, 0.92, high=0.6).verdict == "refuted"
    assert figure(0.55, 0.60, 0.65, high=0.6).verdict == "inconclusive"
    assert figure(0.5, math.nan, high=0.6).verdict == "inconclusive"


def test_a_claim_is_refuted_by_one_prediction_and_left_open_by_a_control_that_does_not_land():
    good, bad, open_ = figure(1.0, low=0.5), figure(0.1, low=0.5), figure(0.4, 0.5, 0.6, low=0.5)
    told = figure(0.0)  # without a prediction
    assert Outcome((good, told)).verdict == "confirmed"
    assert Outcome((good, bad)).verdict == Outcome((open_, bad)).verdict == "refuted"
    assert Outcome((good, open_)).verdict == "inconclusive"
    assert Outcome((good, figure(0.1, low=0.5, control=True))).verdict == "inconclusive"
    assert Outcome((told,)).verdict == "inconclusive"


def test_an_outcome_is_read_back_as_it_was_written():
    given = Outcome(
        (figure(1.0, 2.0, low=0.5), figure(3.0, high=4.0, control=True)), {"a": {1.0: 2.0}}, ("x", "y"), True
    )
    assert Outcome.of(json.loads(json.dumps(given.tree()))) == given


@pytest.mark.parametrize("name", RESULTS)
def test_a_written_result_is_that_of_the_claim_as_it_stands(name):
    assert RESULTS[name]["source"] == run.source(name), f"run `allyouneed claims {name} --write docs`"


def test_the_pages_and_pictures_are_those_of_the_registry_and_the_results():
    outcomes = run.outcomes(RESULTS)
    assert pages.page(outcomes) == (DOCS / "claims.md").read_text(encoding="utf-8")
    assert pages.page(outcomes, chinese=True) == (DOCS / "zh" / "claims.md").read_text(encoding="utf-8")
    for name, drawn in pages.pictures(outcomes).items():
        assert drawn == (DOCS / "pictures" / name).read_text(encoding="utf-8")


def test_a_claim_without_a_result_is_not_called_confirmed():
    text = pages.page({})
    assert verdict(find("mla-cache"), None) == "not run"
    assert "confirmed |" not in text and "| not run yet |" in text and "| not testable here |" in text


@pytest.mark.parametrize("name", QUICK)
def test_quick_claims_rehearse(name):
    assert rehearse(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEASURED if name not in QUICK])
def test_every_claim_rehearses(name):
    assert rehearse(name)


def rehearse(name):
    outcome = find(name).measure(ClaimRun(tiny=True))
    assert any(one.predicts for one in outcome.figures)
    assert Outcome.of(json.loads(json.dumps(outcome.tree(), allow_nan=False))).verdict in pages.VERDICTS
    return outcome


def test_results_are_kept_and_a_claim_for_a_gpu_waits_for_one(tmp_path, monkeypatch, capsys):
    command = ["claims", "mla-cache", "flash-speed", "translation-bleu", "--cpu", "-o", str(tmp_path)]
    with pytest.raises(SystemExit) as first:
        main(command)
    shown = capsys.readouterr().out
    assert first.value.code == 0
    assert "mla-cache: refuted" in shown and "flash-speed: not run yet" in shown
    assert "translation-bleu: not testable here" in shown
    monkeypatch.setattr(run, "run_one", lambda one: pytest.fail("it had run before"))
    with pytest.raises(SystemExit):
        main(command)
    assert capsys.readouterr().out == shown


def test_an_unknown_claim_is_refused_with_the_nearest_name(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["claims", "mla-cach"])
    assert exit_.value.code == 2 and "did you mean 'mla-cache'?" in capsys.readouterr().err


def test_a_rehearsal_is_never_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["claims", "mla-cache", "--tiny", "--write", str(tmp_path), "-o", str(tmp_path / "runs")])
    assert exit_.value.code == 2 and "only rehearses" in capsys.readouterr().err
    assert not (tmp_path / "claims.md").exists()
