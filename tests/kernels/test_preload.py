"""The libraries of a GPU load in the background while a model's weights are read, once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import allyouneed as ayn
from allyouneed.interop import load as interop
from allyouneed.kernels import preload


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    found: list[torch.device] = []
    monkeypatch.setattr(preload, "_loading", None)
    monkeypatch.setattr(preload, "_load", found.append)
    return found


def test_libraries_of_a_gpu_are_loaded_once(begun: list[torch.device]) -> None:
    for device in ("cpu", "cuda", torch.device("cuda:0")):
        preload.preload_libraries(device)
    preload.wait_for_libraries()
    assert begun == [torch.device("cuda")]


def test_kernels_wait_for_libraries_that_are_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    go, order = threading.Event(), list[str]()
    monkeypatch.setattr(preload, "_loading", None)
    monkeypatch.setattr(preload, "_load", lambda device: (go.wait(), order.append("loaded")))
    preload.preload_libraries("cuda")
    threading.Timer(0.01, go.set).start()
    preload.wait_for_libraries()
    order.append("used")
    assert order == ["loaded", "used"]


def test_a_library_that_fails_to_load_fails_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_loading", None)
    preload.preload_libraries("cuda")  # there is none here, or it works
    preload.wait_for_libraries()


def test_libraries_load_before_the_weights_are_read(
    begun: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> object:
        assert begun == [torch.device("cuda")]
        raise InterruptedError

    monkeypatch.setattr(interop, "check_device", lambda device: None)
    monkeypatch.setattr(interop.Folder, "load", read)
    tokenizer = ayn.train_tokenizer(["the cat", "a dog"], vocab=300)
    sizes = ["width=16", "decoder[0].repeat=1", "decoder[0].mixer.heads=2", "decoder[0].channel.hidden=16"]
    ayn.save(ayn.build("llama-15m", sizes, vocab=tokenizer.size), tokenizer, tmp_path / "model")
    with pytest.raises(InterruptedError):
        interop.load(tmp_path / "model", "cuda")
