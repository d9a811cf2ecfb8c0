"""Weights out of a file: read when they are used, never copied twice, and never written back."""

import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from allyouneed.config import parse
from allyouneed.data.files import mapped
from allyouneed.data.files.mapped import MappedFile, release_pages
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, cast_weights, meta_model, named_tensors, widen_half_for_cpu
from any_part import tree

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
KINDS += [torch.int8, torch.uint8, torch.bool]


@pytest.fixture(params=[0, 1 << 20], ids=["mapped", "read"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With 0 even the smallest tensor is mapped."""
    monkeypatch.setattr(mapped, "SMALL", request.param)
    return int(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    dice = torch.Generator().manual_seed(0)
    tensors = {str(kind): torch.randint(0, 2, (3, 5), generator=dice).to(kind) for kind in KINDS}
    tensors |= {"number": torch.tensor(2.5), "empty": torch.zeros(0, 4), "odd": torch.randn(333, 7, generator=dice)}
    save_file(tensors, tmp_path / "a.safetensors", {"about": "them"})
    return tmp_path / "a.safetensors"


def test_every_tensor_is_as_the_library_reads_it(file: Path, small: int) -> None:
    found, expected = MappedFile(file), load_file(file)
    assert set(found) == set(expected) and len(found) == len(expected) and "nothing" not in found
    for name, tensor in expected.items():
        assert found[name].dtype == found.dtype(name) == tensor.dtype
        assert found[name].shape == found.shape(name) == tensor.shape
        assert torch.equal(found[name], tensor)


def test_tensors_that_begin_at_odd_bytes_are_read(tmp_path: Path, small: int) -> None:
    text = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    content = torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "odd").write_bytes(len(text).to_bytes(8, "little") + text + b"abc" + content)
    assert MappedFile(tmp_path / "odd")["b"].tolist() == [1.5, -2.0]


def test_writes_to_a_tensor_do_not_reach_the_file(file: Path, small: int) -> None:
    before = file.read_bytes()
    tensor = MappedFile(file)["odd"]
    tensor.zero_()
    assert not tensor.any() and MappedFile(file)["odd"].any() and file.read_bytes() == before


def test_released_pages_are_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "SMALL", 0)
    tensor = MappedFile(file)["odd"]
    copy, own = tensor.clone(), torch.ones(9)
    assert len(mapped._MAPS) >= 1
    release_pages(tensor)
    release_pages(tensor[5:])
    release_pages(own)
    assert torch.equal(tensor, copy) and own.all(), "what is no file's is left alone"


def test_a_mapping_is_released_with_its_tensor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "SMALL", 0)
    tensor = MappedFile(file)["odd"]
    place = tensor.data_ptr()
    assert isinstance(mapped._MAPS[place], mmap.mmap)
    view = tensor[3:]
    del tensor
    assert place in mapped._MAPS and view.any(), "a view of it still needs it"
    del view
    assert place not in mapped._MAPS


# --- into a model -----------------------------------------------------------------------------------------------------


def config(**changes: object) -> Model:
    return parse(Model, tree() | {"vocab": 30} | changes)  # type: ignore[type-abstract]


def test_a_meta_model_takes_no_memory() -> None:
    model = meta_model(config(vocab=10**9))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_assigned_weights_are_not_copied_and_stay_tied() -> None:
    model = meta_model(config())
    found = {name: torch.ones(tensor.shape) for name, tensor in named_tensors(model).items()}
    assign_weights(model, found)
    own = dict(named_tensors(model))
    assert own.keys() == found.keys()
    assert all(own[name].data_ptr() == tensor.data_ptr() and own[name].requires_grad for name, tensor in found.items())
    assert model.head.weight is model.embed.tokens.weight
    assert sum(1 for _ in model.parameters()) == len(found)


def test_mixed_precisions_become_one() -> None:
    model = config().build().float()
    assign_weights(model, {name: t.detach().bfloat16() for name, t in named_tensors(model).items() if t.dim() > 1})
    cast_weights(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    cast_weights(model, torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.head.weight is model.embed.tokens.weight


def test_half_precision_becomes_float32_on_a_cpu() -> None:
    model = config().build().half()
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    widen_half_for_cpu(model)
    assert all(
        t.dtype == torch.float32 and torch.equal(t.half(), before[name]) for name, t in named_tensors(model).items()
    )
    widen_half_for_cpu(model.bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "which processors of today know"
