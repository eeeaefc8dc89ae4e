"""The tensors that a pickle describes, by its opcodes: nothing is unpickled, imported or called.

`read_value` follows the opcodes that `torch.save` writes for a table of tensors. Names of Python objects stand for
themselves: those of storages, of the functions that rebuild a tensor and of OrderedDict are known, and any other name,
opcode or use is refused.
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
    """`count` values of `dtype` that lie elsewhere, under `key`."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor whose values follow each other in `storage` from number `first` on, row after row."""

    storage: PickledStorage
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """A Python object that is named, and never looked up."""

    name: str


_MARK = _Name("(")


def read_value(stream: BinaryIO) -> Any:
    """The value of the pickle that `stream` stands before; it then stands behind it.

    It holds tables with text as keys, lists, tuples, constants and `PickledTensor`. Raises `ValueError` for any other
    pickle.
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
    except (IndexError, KeyError) as cause:  # of an empty stack, and of what was never memoized
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
        case "BINPERSID":
            stack.append(_storage(stack.pop()))
        case "REDUCE":
            function, arguments = _top(stack, 2)
            stack.append(_rebuilt(function, arguments))
        case "SETITEM":
            pair = _top(stack, 2)
            _set_items(stack[-1], pair)
        case "SETITEMS":
            items = _from_mark(stack)
            _set_items(stack[-1], items)
        case "APPEND":
            values = _top(stack, 1)
            _list(stack[-1]).extend(values)
        case "APPENDS":
            values = _from_mark(stack)
            _list(stack[-1]).extend(values)
        case "BUILD":  # what modules say of themselves, which a table carries as `_metadata`
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
    return ValueError(f"holds more than tensors, and what more there is was not run: it {what}")


def _top(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise IndexError
    values = stack[-count:]
    del stack[-count:]
    return values


def _from_mark(stack: list[Any]) -> list[Any]:
    """What was pushed since the last mark, which goes with it."""
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


def _set_items(table: Any, items: list[Any]) -> None:
    if not isinstance(table, dict) or len(items) % 2:
        raise ValueError("holds a damaged pickle")
    if any(type(key) is not str for key in items[::2]):
        raise ValueError("holds a table whose names are not text")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if key in table:
            raise ValueError(f"holds {shown(key)} twice in one table")
        table[key] = value


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError("holds a damaged pickle")


def _storage(identity: Any) -> PickledStorage:
    """The storage of a persistent id: ("storage", its class, key, device, number of values), and None in old files."""
    match identity:
        case ("storage", _Name(kind), str(key), str(), int(count)) | (
            "storage", _Name(kind), str(key), str(), int(count), None
        ) if kind in _STORAGES and is_sizes([count]):  # fmt: skip
            return PickledStorage(key, _STORAGES[kind], count)
    raise ValueError("holds a storage that vtx does not read")


def _rebuilt(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Name(name), () if name == _TABLE:
            return {}
        case _Name(name), (PickledTensor() as tensor, bool(), dict()) if name == _PARAMETER:
            return tensor
        case _Name(name), (storage, first, shape, stride, bool(), dict(), *more) if name == _TENSOR:
            return _tensor(storage, first, shape, stride, more)
    raise _refused("calls what vtx does not know")


def _tensor(storage: Any, first: Any, shape: Any, stride: Any, more: list[Any]) -> PickledTensor:
    sizes = all(isinstance(value, tuple) and len(value) <= MAX_DIMS and is_sizes([*value]) for value in (shape, stride))
    if not isinstance(storage, PickledStorage) or not sizes or len(shape) != len(stride) or not is_sizes([first]):
        raise ValueError("holds a tensor without a valid storage, offset, shape or stride")
    if more not in ([], [None]):
        raise ValueError("holds a tensor with attributes of its own, as conjugated ones have")
    step = 1
    for size, given in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and given != step and 0 not in shape:
            raise ValueError("holds a tensor that is not stored row after row")
        step *= size
    if first + math.prod(shape) > storage.count:
        raise ValueError("holds a tensor that is larger than its storage")
    return PickledTensor(storage, first, shape)
