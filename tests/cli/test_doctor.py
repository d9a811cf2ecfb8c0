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


def test_the_instruction_set_is_named_and_what_a_better_one_would_bring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from allyouneed.kernels.cpu import instruction_sets

    monkeypatch.delenv("ALLYOUNEED_ISA", raising=False)
    monkeypatch.setattr(instruction_sets.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instruction_sets, "processor_features", lambda: frozenset({"sse2", "avx2", "fma"}))
    assert run() == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "instruction set" in line)
    assert "avx2" in line and "avx-vnni would bring four int8 products in one instruction" in line
    monkeypatch.setenv("ALLYOUNEED_ISA", "avx512")
    assert run() == 0
    assert "ALLYOUNEED_ISA=avx512: this processor has sse2, avx2, portable" in capsys.readouterr().out


def test_the_bundled_translator_is_measured_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--measure", "--json") == 0
    found = {one["name"]: one["value"] for one in json.loads(capsys.readouterr().out)}
    assert all("words/s" in found[f"translator, {name} at a time"] for name in ("one text", "32 texts"))
