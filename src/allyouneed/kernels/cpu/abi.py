"""The interface of the CPU interpreter for ctypes, read from program.h, which is its only definition.

`Instruction`, `Cache`, `Mask`, `Memory`, `Pass`, `SelectiveScan` and `RnnLayer` are ctypes structures with its fields;
`Kind`, `Format`, `Keys`, `Activation`, `Features` and `Cell` are its enums; `CONSTANTS` its integer constants.
"""

from __future__ import annotations

import ctypes
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

HEADER = Path(__file__).with_name("program.h")
NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "float": ctypes.c_float,
}

_text = re.sub(r"//[^\n]*", "", HEADER.read_text("utf-8"))
_MEMBER = re.compile(r"(?P<type>[\w ]+?(?:\*| |\bconst\b)*)(?P<name>\w+)\s*;")
_STRUCT = re.compile(r"^struct (\w+) \{ *\n(.*?)^\};", re.S | re.M)
_UNION = re.compile(r"union \{(.*?)\};", re.S)

CONSTANTS = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", _text)}
_enums: Any = {
    name: IntEnum(name, [(member.strip(), number) for number, member in enumerate(members.split(","))])
    for name, members in re.findall(r"^enum (\w+) \{([^}]*)\};", _text, re.M)
}
Kind, Format, Keys, Activation, Features, Cell = (
    _enums[name] for name in ("Kind", "Format", "Keys", "Activation", "Features", "Cell")
)

_structs: dict[str, Any] = {}


def _fields(text: str) -> list[tuple[str, Any]]:
    """The members of a struct or union, in order."""
    found = []
    for member in _MEMBER.finditer(text):
        kind = member["type"].strip()
        found.append((member["name"], ctypes.c_void_p if "*" in kind else NUMBERS.get(kind) or _structs[kind]))
    return found


def _struct(name: str, text: str) -> Any:
    union = _UNION.search(text)
    if union is None:
        return type(name, (ctypes.Structure,), {"_fields_": _fields(text)})
    arguments = type(f"{name}Arguments", (ctypes.Union,), {"_fields_": _fields(union[1])})
    fields = [*_fields(text[: union.start()]), ("arguments", arguments)]
    return type(name, (ctypes.Structure,), {"_anonymous_": ("arguments",), "_fields_": fields})


for _name, _body in _STRUCT.findall(_text):
    if "(" not in _body:  # a struct with functions is the interpreter's own
        _structs[_name] = _struct(_name, _body)

Instruction, Cache, Mask, Memory, Pass, SelectiveScan, RnnLayer = (
    _structs[name] for name in ("Instruction", "Cache", "Mask", "Memory", "Pass", "SelectiveScan", "RnnLayer")
)
