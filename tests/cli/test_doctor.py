"""`allyouneed doctor` lists what the installation has, and what each missing piece costs."""

from __future__ import annotations

import json
import sys

import pytest

from allyouneed.cli import main
from allyouneed.errors.extras import install_hint


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *args])
    return int(stopped.value.code or 0)


def test_doctor_lists_everything_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    for name in (
        "Python",
        "torch",
        "CPU",
        "C++ compiler",
        "native CPU interpreter",
        "GPU",
        "matplotlib",
        "cache folder",
    ):
        assert name in text


def test_json_has_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert all(set(one) == {"name", "value", "ok", "cost"} for one in found)
    assert next(one for one in found if one["name"] == "torch")["ok"] is not False


def test_a_missing_extra_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["allyouneed.cli.doctor"], "_version", lambda name: None)
    assert run() == 0
    text = capsys.readouterr().out
    assert f"missing: `look` draws only in the terminal; {install_hint('look')}" in text


def test_a_missing_compiler_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run() == 0
    assert "not found (g++, or $CXX): the native CPU interpreter cannot be built" in capsys.readouterr().out
