"""Builds inert records for the names that pickles of checkpoints contain, by a fixed table.

Nothing is imported and nothing of the pickle is called: each entry of the table is a function of
this module that puts values together. A name that is not in the table becomes an ``Opaque``, which
can be listed and never becomes state.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.geometry.box import ITEMSIZE
from holdfast.geometry.leaves import MAX_DIMS, MAX_LEAF_BYTES


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A name that a pickle refers to, as text. ``offset``: where in the pickle."""

    module: str
    name: str
    offset: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True)
class Opaque:
    """An object of a class that is not known, or the result of a call that is not made."""

    what: str
    offset: int


class Record(msgspec.Struct):
    """An object of a known class: its name without the module, and its attributes."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of a ``torch.save`` file: the name of its entry, its element type, its elements."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor: a view of a storage. ``offset`` and ``strides`` count elements."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The element type, as in the safetensors format."""
        return self.storage.dtype

    @property
    def last(self) -> int:
        """The element behind the last one that the view reaches; 0 for an empty one."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in pairs) + 1


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A dtype of torch, by its name."""

    name: str


@dataclass(slots=True)
class NumpyDtype:
    """A dtype of numpy, by its text, as in ``<f8``."""

    text: str


@dataclass(slots=True)
class NumpyArray:
    """An array or, with ``shape`` None, a scalar of numpy: its elements as bytes, row by row unless
    ``by_columns``. One of objects has none.
    """

    dtype: str = ""
    shape: tuple[int, ...] | None = ()
    data: bytes = b""
    by_columns: bool = False


#: The element types of torch, by the names that torch has for them.
TORCH_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
#: The element types of the classes of storages that ``torch.save`` names.
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
    "UntypedStorage": "U8",
}
#: Modules of Python's own library of which a checkpoint may hold objects; any other is refused.
HARMLESS = frozenset(
    (
        *("__builtin__", "builtins", "_codecs", "argparse", "collections", "copy_reg", "copyreg"),
        *("dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "pathlib"),
        *("pathlib._local", "random", "types", "typing", "uuid"),
    )
)
DCP_METADATA = "torch.distributed.checkpoint.metadata"
DCP_FILES = "torch.distributed.checkpoint.filesystem"
#: Classes whose objects are attributes and nothing else.
RECORDS = {
    (DCP_METADATA, "Metadata"),
    (DCP_METADATA, "TensorStorageMetadata"),
    (DCP_METADATA, "TensorProperties"),
    (DCP_METADATA, "ChunkStorageMetadata"),
    (DCP_METADATA, "BytesStorageMetadata"),
    (DCP_METADATA, "MetadataIndex"),
    (DCP_METADATA, "StorageMeta"),
    (DCP_FILES, "_StorageInfo"),
    ("torch.distributed.checkpoint._fsspec_filesystem", "_StorageInfo"),
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
}
#: Classes made from their values: enums, with the values kept.
ENUMS = {
    (DCP_METADATA, "_MEM_FORMAT_ENCODING"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("megatron.core.enums", "ModelType"),
    ("megatron.core.transformer.enums", "AttnBackend"),
    ("signal", "Signals"),  # of an argument of Megatron
}
#: Classes of Python's library of which objects may stand in a checkpoint and become no state.
_LISTED = {
    ("_io", "BytesIO"),  # what modules of Transformer Engine give as extra state
    *(("builtins", "range"), ("builtins", "slice")),
    *(("__builtin__", "xrange"), ("__builtin__", "slice")),
}


def shown(value: Any) -> str:
    """A value in a message: text, small numbers and names; of all else, its type.

    A list may contain itself, or be named so often that to print it takes for ever.
    """
    if type(value) is str:
        return repr(value[:60])
    if type(value) is int and abs(value) < 1 << 64:
        return str(value)
    if type(value) in (float, bool):
        return str(value)
    if isinstance(value, (GlobalName, TorchDtype)):
        return str(value)[:100]
    return f"a {type(value).__name__}"


class Unbuildable(ValueError):
    """Arguments that no writer gives a known name."""


def refuses(name: GlobalName) -> bool:
    """True for a name of Python's library that no checkpoint has a use for."""
    top = name.module.partition(".")[0]
    if (name.module, name.name) in ENUMS | _LISTED:
        return False
    if name.module in HARMLESS:
        is_function = name.module in ("builtins", "__builtin__", "functools", "types", "_codecs")
        return is_function and (name.module, name.name) not in _CALLS.keys() | RECORDS | _TYPES
    return top in sys.stdlib_module_names or top in ("nt", "posix", "__main__", "__builtin__")


def constant(name: GlobalName) -> Any:
    """The value of a name that is not called: a dtype of torch, or the name itself."""
    if name.module == "torch" and name.name in TORCH_NAMES:
        return TorchDtype(name.name)
    return name


def call(name: GlobalName, arguments: Sequence[Any]) -> Any:
    """The record for a call of ``name``; Opaque for a name that the table has not."""
    key = (name.module, name.name)
    if key in _CALLS:
        return _CALLS[key](*arguments)
    if key in ENUMS and len(arguments) == 1:
        return Record(name.name, {"value": arguments[0]})
    if key in RECORDS and not arguments:
        return Record(name.name, {})
    return Opaque(str(name), name.offset)


def new(name: GlobalName, arguments: Sequence[Any]) -> Any:
    """The record for a new object of the class ``name``."""
    key = (name.module, name.name)
    if key == ("torch", "Size") or key[0] in ("collections", "builtins", "__builtin__"):
        return call(name, arguments)
    if key in RECORDS:
        return Record(name.name, dict(enumerate_fields(name.name, arguments)))
    return Opaque(str(name), name.offset)


def enumerate_fields(kind: str, arguments: Sequence[Any]) -> list[tuple[str, Any]]:
    """Names the fields of a tuple with names; other classes take no arguments."""
    names = {"fragment_address": ("numel", "start")}.get(kind, ())
    if len(arguments) > len(names):
        raise Unbuildable(f"{kind} takes {len(names)} values, not {len(arguments)}")
    return list(zip(names, arguments, strict=False))


def build(target: Any, state: Any) -> None:
    """Sets the attributes of ``target``, as BUILD says."""
    if isinstance(target, Record):
        _build_record(target, state)
    elif isinstance(target, NumpyDtype):
        _build_dtype(target, state)
    elif isinstance(target, NumpyArray):
        _build_array(target, state)
    elif isinstance(target, OrderedDict):
        if not isinstance(state, dict):
            raise Unbuildable("an ordered dictionary with a state that is no dictionary")
        # Attributes that torch gives state dicts, as _metadata: no part of the state.
    elif not isinstance(target, Opaque):
        raise Unbuildable(f"BUILD of a {type(target).__name__}")


#: What the state of TensorProperties consists of.
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def _build_record(record: Record, state: Any) -> None:
    if isinstance(state, tuple) and record.kind == "TensorProperties":
        state = dict(zip(_PROPERTIES, state, strict=False))
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
        state = state[1]  # of a class with slots
    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        raise Unbuildable(f"a {record.kind} without attributes")
    record.fields.update(state)


def as_key(record: Record) -> tuple[Any, ...]:
    """The attributes of a record that is the key of a dictionary, as plain values."""
    if record.kind != "MetadataIndex":
        raise Unbuildable(f"a key that is a {record.kind}")
    get = record.fields.get
    return record.kind, get("fqn"), get("offset"), get("index")


def _build_dtype(dtype: NumpyDtype, state: Any) -> None:
    is_plain = isinstance(state, tuple) and len(state) >= 3 and state[2] is None
    if not is_plain or state[1] not in ("<", ">", "|", "="):
        raise Unbuildable("a dtype of numpy that has parts")
    if state[1] == ">":
        dtype.text = ">" + dtype.text.lstrip("<>|=")


def _build_array(array: NumpyArray, state: Any) -> None:
    if not (isinstance(state, tuple) and len(state) == 5):
        raise Unbuildable("an array of numpy without its five parts")
    _, shape, dtype, is_fortran, data = state
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, (bytes, list)):
        raise Unbuildable("an array of numpy without its elements")
    array.shape, array.dtype, array.by_columns = _sizes(shape), dtype.text, bool(is_fortran)
    array.data = data if isinstance(data, bytes) else b""


def storage(parts: Any) -> StorageRef | Opaque:
    """The storage that a persistent id names, Opaque for one of a type without a name here."""
    if not (isinstance(parts, tuple) and len(parts) == 5 and parts[0] == "storage"):
        raise Unbuildable("a persistent id that names no storage of torch")
    _, kind, key, location, elements = parts
    is_named = isinstance(kind, GlobalName) and kind.module in ("torch", "torch.storage")
    if not is_named:
        raise Unbuildable(f"a storage of the type {shown(kind)}, which is not known")
    if kind.name not in STORAGES:
        return Opaque(f"a tensor of torch.{kind.name}"[:200], kind.offset)
    if type(key) is not str or type(location) is not str or type(elements) is not int:
        raise Unbuildable("a storage without key, location and size")
    if not 0 <= elements <= MAX_LEAF_BYTES:
        raise Unbuildable(f"a storage of {elements} elements")
    return StorageRef(key, STORAGES[kind.name], elements)


def _sizes(value: Any) -> tuple[int, ...]:
    is_sizes = isinstance(value, (tuple, list)) and len(value) <= MAX_DIMS
    if not is_sizes or any(type(one) is not int or one < 0 for one in value):
        raise Unbuildable(f"{shown(value)} where sizes belong")
    return tuple(value)


def _tensor(
    source: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorRef | Opaque:
    if isinstance(source, Opaque):
        return Opaque(source.what, source.offset)
    if metadata:  # as {"conj": True}: the elements are not what the bytes say
        return Opaque(f"a tensor with {_marks(metadata)}, which its bytes do not show", 0)
    if not isinstance(source, StorageRef) or type(offset) is not int or offset < 0:
        raise Unbuildable("a tensor without a storage")
    sizes, steps = _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps):
        raise Unbuildable(f"a tensor of {len(sizes)} dimensions with {len(steps)} strides")
    found = TensorRef(source, offset, sizes, steps)
    if found.last > source.elements:
        raise Unbuildable(
            f"a tensor that ends at element {found.last} of a storage with {source.elements}"
        )
    return found


def _marks(metadata: Any) -> str:
    if not isinstance(metadata, dict) or not all(type(key) is str for key in metadata):
        raise Unbuildable("a tensor whose marks are no names")
    return " and ".join(f"the mark {key!r:.20}" for key in list(metadata)[:4])


def _tensor_v3(
    source: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRef | Opaque:
    if isinstance(dtype, GlobalName) and dtype.module == "torch":
        return Opaque(f"a tensor of {dtype!s:.100}", 0)
    if not isinstance(dtype, TorchDtype) or not isinstance(source, StorageRef):
        raise Unbuildable("a tensor without a dtype")
    name = TORCH_NAMES[dtype.name]
    elements = source.elements * ITEMSIZE[source.dtype] // ITEMSIZE[name]
    whole = StorageRef(source.key, name, elements)
    return _tensor(whole, offset, shape, strides, metadata=metadata)


def _parameter(data: Any, *_: Any) -> TensorRef | Opaque:
    if isinstance(data, Opaque):
        return Opaque(data.what, data.offset)
    if not isinstance(data, TensorRef):
        raise Unbuildable("a parameter without a tensor")
    return data


def _from_type(function: Any, kind: Any, arguments: Any, state: Any = None) -> Any:
    if not isinstance(function, GlobalName) or not isinstance(arguments, tuple):
        raise Unbuildable("a tensor of a class without its parts")
    if not isinstance(kind, GlobalName) or str(kind) not in _PLAIN_TENSORS:
        return Opaque(str(kind), function.offset)
    made = _TENSORS.get((function.module, function.name))
    return Opaque(str(function), function.offset) if made is None else made(*arguments)


_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")


def _ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    if not isinstance(pairs, (list, tuple)) or len(pairs) > 1 << 16:
        raise Unbuildable("an ordered dictionary of no pairs")
    found: OrderedDict[Any, Any] = OrderedDict()
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or type(pair[0]) is not str:
            raise Unbuildable("an ordered dictionary of no pairs")
        found[pair[0]] = pair[1]
    return found


def _counter(counts: Any = None) -> Counter[Any]:
    """Without its counts where a dictionary of them follows."""
    if counts is not None and not (isinstance(counts, dict) and len(counts) <= 1 << 16):
        raise Unbuildable("a counter of no counts")
    found: Counter[Any] = Counter()
    dict.update(found, counts or {})
    return found


def _default_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _set(items: Any = ()) -> set[Any] | Opaque:
    if not isinstance(items, (list, tuple)):
        raise Unbuildable("a set of no list")
    if any(type(one) not in (str, int, float, bool, bytes, type(None)) for one in items):
        return Opaque("a set of other things than plain values", 0)
    if any(type(one) is int and abs(one) >= MAX_KEY for one in items):
        raise Unbuildable("a set of integers that are too large")
    return set(items)


def _frozen_set(items: Any = ()) -> frozenset[Any] | Opaque:
    found = _set(items)
    return found if isinstance(found, Opaque) else frozenset(found)


#: Integers from here on may have equal hashes, so many that a dictionary of them takes hours.
MAX_KEY = (1 << 61) - 1


def _encode(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise Unbuildable("text in another encoding than latin1")
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise Unbuildable("bytes that are no bytes") from None


def _bytes(data: Any = b"", *more: Any) -> bytes:
    if isinstance(data, bytes) and not more:
        return data
    return _encode(data, *more)


def _bytearray(data: Any = b"", *more: Any) -> bytearray:
    return bytearray(_bytes(data, *more))


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise Unbuildable("a complex number without its parts")
    try:
        return complex(real, imaginary)
    except OverflowError:
        raise Unbuildable("a complex number of too large a part") from None


def _numpy_dtype(text: Any, *_: Any) -> NumpyDtype:
    if type(text) is not str or len(text) > 16:
        raise Unbuildable("a dtype of numpy without its text")
    return NumpyDtype(text if text[:1] in "<>|=" else f"<{text}")


def _numpy_scalar(dtype: Any, data: Any) -> NumpyArray:
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, bytes):
        raise Unbuildable("a scalar of numpy without dtype and bytes")
    return NumpyArray(dtype.text, None, data)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> NumpyArray:
    if not isinstance(dtype, NumpyDtype) or not isinstance(data, (bytes, bytearray)):
        raise Unbuildable("an array of numpy without dtype and bytes")
    if order not in ("C", "F"):
        raise Unbuildable("an array of numpy in no order")
    return NumpyArray(dtype.text, _sizes(shape), bytes(data), order == "F")


MAX_PATH = 4096


def _path(*parts: Any) -> str:
    if any(type(part) is not str for part in parts) or sum(map(len, parts)) + len(parts) > MAX_PATH:
        raise Unbuildable(f"a path of other things than text, or of more than {MAX_PATH} letters")
    return "/".join(parts).replace("//", "/")


def _size(value: Any = ()) -> tuple[int, ...]:
    return _sizes(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unbuildable("the name of a layout that is no text")
    return value


def _device(kind: Any, index: Any = None) -> Record:
    return Record("device", {"type": _text(kind), "index": index})


#: The functions that make a tensor; also what one with attributes of its own may be made by.
_TENSORS: dict[tuple[str, str], Callable[..., TensorRef | Opaque]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
_BUILTINS = ("builtins", "__builtin__")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    **_TENSORS,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _counter,
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _numpy_dtype,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    **{(module, "scalar"): _numpy_scalar for module in _NUMPY},
    **{(module, "_reconstruct"): lambda *_: NumpyArray() for module in _NUMPY},
    **{(module, "PosixPath"): _path for module in ("pathlib", "pathlib._local")},
    **{(module, "PurePosixPath"): _path for module in ("pathlib", "pathlib._local")},
    **{(module, "set"): _set for module in _BUILTINS},
    **{(module, "frozenset"): _frozen_set for module in _BUILTINS},
    **{(module, "bytes"): _bytes for module in _BUILTINS},
    **{(module, "bytearray"): _bytearray for module in _BUILTINS},
    **{(module, "complex"): _complex for module in _BUILTINS},
}
#: Names of Python's that are arguments of others, as the factory of a dictionary.
_TYPES = {
    (module, name)
    for module in _BUILTINS
    for name in ("int", "float", "str", "list", "dict", "set", "object", "bool", "tuple")
}
