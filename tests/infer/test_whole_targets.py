"""Translators that write whole targets, and copy heads, as a user meets them: Python, command line, server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.runtime.report import executor_lines
from served import served_client, tiny_tokenizer
from toy_texts import BOTH, ENCODER, SYNCHRONOUS, WHOLE

TEXTS = ["the cat sees the dog", "a bird", "the sun is warm today and tomorrow", "9"]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask-predict": (WHOLE | {"head": {"kind": "mask-predict", "lengths": 12}}, {"kind": "mask-predict"}),
    "ctc-translation": (ENCODER, {"kind": "ctc-translation", "upsample": 2}),
    "synchronous-translation": (SYNCHRONOUS, {"kind": "synchronous-translation"}),
    "copy": (BOTH | {"head": {"copy": True}}, {"kind": "translation"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with random weights and decisive logits."""
    tokenizer, found = tiny_tokenizer(masked=True), {}
    for name, (model, task) in KINDS.items():
        torch.manual_seed(4)
        module = ayn.build(model | {"vocab": tokenizer.size})
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2)
        folder = Folder(module.eval(), Vocabularies(tokenizer, tokenizer), task, {"extra": 6}, max_tokens=64)
        found[name] = tmp_path_factory.mktemp("models") / name
        folder.save(found[name])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_translated_the_same_alone_and_among_others(folders: dict[str, Path], kind: str) -> None:
    translator: Any = ayn.load(folders[kind])
    together = translator.translate(TEXTS)
    assert len(set(together)) > 1, "every answer is the same: nothing is tested"
    assert [translator.translate(text) for text in TEXTS] == together
    assert translator.translate(["", TEXTS[0], ""]) == ["", together[0], ""]
    assert list(translator.translate_stream(TEXTS))[1].text == together[1]


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_translates(folders: dict[str, Path], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("translate", TEXTS[0], "--model", str(folders[kind]), "--quiet")
    translator: Any = ayn.load(folders[kind])
    assert capsys.readouterr().out.strip() == translator.translate(TEXTS[0])


def test_more_iterations_and_lengths_are_options(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    translator: Any = ayn.load(folders["mask-predict"])
    (full,) = translator.translate_full([TEXTS[2]], beam=3, best=3, iterations=2)
    assert len(full.candidates) == 3
    run("translate", TEXTS[2], "-m", str(folders["mask-predict"]), "--iterations", "1", "--quiet")
    assert capsys.readouterr().out.strip() == translator.translate(TEXTS[2], iterations=1)
    other: Any = ayn.load(folders["copy"])
    with pytest.raises(UserError, match="iterations: only for mask-predict"):
        other.translate(TEXTS[0], iterations=3)


@pytest.mark.parametrize("kind", ["mask-predict", "ctc-translation", "synchronous-translation"])
def test_options_of_decoding_by_token_are_refused(folders: dict[str, Path], kind: str) -> None:
    translator: Any = ayn.load(folders[kind])
    with pytest.raises(UserError, match=f"method=sample: not supported by {kind}"):
        translator.translate(TEXTS[0], temperature=0.5)
    with pytest.raises(UserError, match="draft: not supported"):
        translator.translate(TEXTS[0], draft="lookup", method="greedy")
    with pytest.raises(UserError, match=f"align: not supported by {kind}"):
        translator.translate_full(TEXTS, align=True)


def test_a_server_translates_and_refuses_what_needs_tokens(folders: dict[str, Path]) -> None:
    with served_client({"whole": folders["mask-predict"], "copy": folders["copy"]}) as (_, client):
        for name, folder in (("whole", "mask-predict"), ("copy", "copy")):
            translator: Any = ayn.load(folders[folder])
            body = {"model": name, "inputs": TEXTS}
            found = client.post("/v1/tasks/translation", json=body).json()
            assert [one["text"] for one in found["results"]] == translator.translate(TEXTS)
        text = {"model": "whole", "prompt": TEXTS[0]}
        assert client.post("/v1/completions", json=text).json()["choices"][0]["text"]
        tokens = client.post("/v1/completions", json=text | {"prompt": [5, 6, 7]})
        assert tokens.status_code == 400
        assert "mask-predict writes whole targets" in tokens.json()["error"]["message"]


@torch.no_grad()
def test_a_copy_head_samples_and_searches_by_its_own_probabilities(folders: dict[str, Path]) -> None:
    """Beams and samples have the log-probabilities that a pass over the whole target gives."""
    translator: Any = ayn.load(folders["copy"])
    assert "CopyHeadModule" in executor_lines(translator.model)["CPU executor"]
    source = [*translator.source.encode(TEXTS[0]), translator.source.eos]
    for options in ({"beam": 3, "best": 3}, {"method": "sample", "best": 3}):
        decoding = Decoding(**options, max_length=8)  # type: ignore[arg-type]
        (found,) = translator.engine.generate([source], decoding)
        assert len(found) == 3
        for one in found:
            labels = [*one.tokens, translator.target.eos][: len(one.log_probs)]
            inputs = [translator.target.bos, *one.tokens][: len(labels)]
            scores = translator.logits(tokens=[source], targets=[inputs])[0].log_softmax(-1)
            expected = [scores[t, label].item() for t, label in enumerate(labels)]
            assert one.log_probs == pytest.approx(expected, abs=1e-4)
    hidden = translator.hidden(tokens=[source], targets=[[1, 5, 6]])
    assert hidden.shape == (1, 3, 32)
