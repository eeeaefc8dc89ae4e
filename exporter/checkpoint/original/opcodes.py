"""The tensors that a pickle describes, by its opcodes: nothing is unpickled, imported or called.

`read_value` follows the opcodes that `torch.save` writes for a table of tensors. Python objects are names only:
storages, the functions that rebuild a tensor and OrderedDict are known; any other name, opcode or use is refused.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pickletools import genops
from typing import Any, BinaryIO

from vtx.runtime.bundle.safetensors import MAX_DIMS, is_sizes, shown

MAX_OPCODES = 4_000_000  # a tensor takes about 35

_TABLE, _TENSOR, _PARAMETER = (
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
)  # fmt: skip
_STORAGES = {
    "torch FloatStorage": "F32", "torch HalfStorage": "F16", "torch BFloat16Storage": "BF16",
    "torch DoubleStorage": "F64", "torch LongStorage": "I64", "torch IntStorage": "I32", "torch ShortStorage": "I16",
    "torch CharStorage": "I8", "torch ByteStorage": "U8", "torch BoolStorage": "BOOL",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """`count` values of `dtype`, stored outside of the pickle under `key`."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A contiguous tensor in `storage`, from its value number `first` on."""

    storage: PickledStorage
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of a Python object, which is never imported."""

    name: str


_MARK = _Name("(")


def read_value(stream: BinaryIO) -> Any:
    """The value of the pickle at the position of `stream`, which moves to its end.

    It consists of tables with text as keys, lists, tuples, constants and `PickledTensor`. Raises ValueError.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the text of a hostile pickle
            for count, (opcode, argument, _) in enumerate(genops(stream)):
                if count >= MAX_OPCODES:
                    raise ValueError(f"holds a pickle of more than {MAX_OPCODES:,} opcodes, the limit")
                _step(opcode.name, argument, stack, memo)
    except (IndexError, KeyError) as cause:  # an empty stack, or an unknown memo
        raise ValueError("holds a damaged pickle") from cause
    if len(stack) != 1:
        raise ValueError("holds a damaged pickle")
    return stack[0]


def _step(opcode: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    match opcode:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case "MARK":
            stack.append(_MARK)
        case "EMPTY_DICT":
            stack.append({})
        case "EMPTY_LIST":
            stack.append([])
        case "TUPLE":
            stack.append(tuple(_from_mark(stack)))
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL":
            stack.append(_named(argument))
        case "STACK_GLOBAL":
            module, name = _top(stack, 2)
            stack.append(_named(f"{module} {name}" if isinstance(module, str) and isinstance(name, str) else ""))
        case "BINPERSID":  # ("storage", its class, key, device, number of values), and None in old files
            match stack.pop():
                case ("storage", _Name(kind), str(key), str(), int(length)) | (
                    "storage", _Name(kind), str(key), str(), int(length), None
                ) if kind in _STORAGES and is_sizes([length]):  # fmt: skip
                    stack.append(PickledStorage(key, _STORAGES[kind], length))
                case _:
                    raise ValueError("holds a storage that vtx does not read")
        case "REDUCE":
            function, arguments = _top(stack, 2)
            stack.append(_rebuilt(function, arguments))
        case "SETITEM" | "SETITEMS":
            items = _top(stack, 2) if opcode == "SETITEM" else _from_mark(stack)
            table = stack[-1]
            if not isinstance(table, dict) or len(items) % 2:
                raise ValueError("holds a damaged pickle")
            if any(type(key) is not str for key in items[::2]):
                raise ValueError("holds a table whose names are not text")
            for key, value in zip(items[::2], items[1::2], strict=True):
                if key in table:
                    raise ValueError(f"holds {shown(key)} twice in one table")
                table[key] = value
        case "APPEND" | "APPENDS":
            values = _top(stack, 1) if opcode == "APPEND" else _from_mark(stack)
            if type(stack[-1]) is not list:
                raise ValueError("holds a damaged pickle")
            stack[-1].extend(values)
        case "BUILD":  # a table's `_metadata` of modules
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise _refused("gives an object attributes")
        case _ if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        case _ if opcode in _TUPLES:
            stack.append(tuple(_top(stack, _TUPLES[opcode])))
        case _ if opcode in _VALUES:
            stack.append(argument)
        case _:
            raise _refused(f"uses the opcode {opcode}")


def _refused(what: str) -> ValueError:
    return ValueError(f"holds more than tensors, none of which was run: it {what}")


def _top(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise IndexError
    values = stack[-count:]
    del stack[-count:]
    return values


def _from_mark(stack: list[Any]) -> list[Any]:
    """Remove and return the values pushed since the last mark."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise IndexError
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _named(name: str) -> _Name:
    if name not in (_TABLE, _TENSOR, _PARAMETER, *_STORAGES):
        raise _refused(f"names {shown(name)}")
    return _Name(name)


def _rebuilt(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Name(name), () if name == _TABLE:
            return {}
        case _Name(name), (PickledTensor() as tensor, bool(), dict()) if name == _PARAMETER:
            return tensor
        case _Name(name), (storage, first, shape, stride, bool(), dict(), *more) if name == _TENSOR:
            pass
        case _:
            raise _refused("calls a function that vtx does not know")
    sizes = all(isinstance(value, tuple) and len(value) <= MAX_DIMS and is_sizes([*value]) for value in (shape, stride))
    if not isinstance(storage, PickledStorage) or not sizes or len(shape) != len(stride) or not is_sizes([first]):
        raise ValueError("holds a tensor without a valid storage, offset, shape or stride")
    if more not in ([], [None]):
        raise ValueError("holds a tensor with extra attributes, e.g. a conjugated one")
    step = 1
    for size, given in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and given != step and 0 not in shape:
            raise ValueError("holds a tensor that is not contiguous")
        step *= size
    if first + math.prod(shape) > storage.count:
        raise ValueError("holds a tensor that is larger than its storage")
    return PickledTensor(storage, first, shape)
