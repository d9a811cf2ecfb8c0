"""Python's view of the interpreter's structures is the compiler's."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from allyouneed.kernels.cpu import abi, build
from allyouneed.kernels.cpu.abi import Cache, Instruction, Kind, Pass

STRUCTS = {"Instruction": Instruction, "Cache": Cache, "Pass": Pass}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_every_field_lies_where_the_compiler_puts_it(tmp_path: Path) -> None:
    checks = [f"static_assert(sizeof({name}) == {ctypes.sizeof(kind)});" for name, kind in STRUCTS.items()]
    for name, kind in STRUCTS.items():
        fields = [field for field, *_ in kind._fields_ if field != "arguments"]
        checks += [f"static_assert(offsetof({name}, {field}) == {getattr(kind, field).offset});" for field in fields]
    for member, struct in dict(Instruction._fields_)["arguments"]._fields_:
        for field, *_ in struct._fields_:
            offset = Instruction.arguments.offset + getattr(struct, field).offset
            checks.append(f"static_assert(offsetof(Instruction, {member}.{field}) == {offset});")
    source = tmp_path / "check.cpp"
    source.write_text("\n".join(["#include <cstddef>", f'#include "{abi.HEADER}"', *checks]))
    command = ["g++", "-std=c++17", "-c", source, "-o", tmp_path / "check.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_enums_and_constants_are_read_from_the_header() -> None:
    assert [kind.name for kind in Kind][:3] == ["EMBED", "LINEAR", "NORM"] and Kind.ATTENTION == 7
    assert abi.CONSTANTS["TILE_OUTPUTS"] == 64 and abi.CONSTANTS["QUAD"] == 4


@pytest.mark.parametrize("banned", [[3, 3], [-1, 5], [2**40, 7], [100]])
def test_banned_ids_outside_the_vocabulary_are_ignored(banned: list[int]) -> None:
    if build.wait_for_build() is None:
        pytest.skip(build.status().reason)
    scores = torch.randn(4, 100)
    before = scores.clone()
    found = build.top_k(scores, 5, torch.tensor(banned))
    assert found is not None and torch.equal(scores, before)
    inside = [token for token in banned if 0 <= token < 100]
    expected = scores.log_softmax(-1).index_fill(1, torch.tensor(inside, dtype=torch.long), -torch.inf).topk(5)
    assert torch.equal(found[0], expected.indices)
    torch.testing.assert_close(found[1], expected.values, rtol=1e-5, atol=1e-5)
