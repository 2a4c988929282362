"""What does a torch pickle say, without letting it do anything?

In: the bytes of a pickle that torch.save wrote. Out: its plain containers, with a `TensorRecord` where a tensor was,
and the names of all classes that it wanted to run and that became inert placeholders instead.

A pickle is a program. This unpickler gives it three things to call: OrderedDict, the rebuilding of a tensor (which
here only notes storage, offset, shape and strides) and a placeholder that swallows anything. Nothing is imported.
"""

import collections
import dataclasses
import io
import math
import pickle
import pickletools
import struct

import ml_dtypes
import numpy as np

from vitplast_jax.errors import UserError

LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
# A name's plain state dict comes first; an average of weights is only taken when asked for.
WRAPPERS = ("state_dict", "model", "model_state_dict", "module", "net", "teacher")
AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")


class ByteReader(io.RawIOBase):
    """Reads a uint8 array like a file, without copying the whole of it."""

    def __init__(self, content):
        self._content, self._place = content, 0

    def readable(self):
        return True

    def tell(self):
        return self._place

    def read(self, size=-1):  # io's own would take the memory for any size that is asked for
        end = len(self._content) if size is None or size < 0 else self._place + size
        piece = self._content[self._place : end].tobytes()
        self._place += len(piece)
        return piece

    def readline(self, size=-1):
        block = self._content[self._place : self._place + 65536].tobytes()
        line = block[: block.find(b"\n") + 1] or block
        self._place += len(line)
        return line


class Inert:
    """Stands for an object of a class that is not run: takes any arguments, state and items, keeps none."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def append(self, item):
        pass

    def extend(self, items):
        pass


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: object
    length: int  # items of dtype; bytes where dtype is None (untyped)


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Where a tensor lies: storage `key`, `dtype`, `offset` and `strides` in items."""

    key: str
    dtype: object
    offset: int
    shape: tuple
    strides: tuple

    def __setstate__(self, state):  # a pickle may try to set attributes of it
        pass

    def array(self, storage):
        """The tensor as a read-only numpy view of `storage`, the storage's bytes as uint8."""
        dtype = np.dtype(self.dtype)
        numbers = (self.offset, *self.shape, *self.strides)
        if len(self.shape) != len(self.strides) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise ValueError(f"a tensor of storage {self.key} has an impossible shape, stride or offset")
        items = storage[: len(storage) // dtype.itemsize * dtype.itemsize].view(dtype)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        count = math.prod(self.shape)
        if count == 0 and max(self.shape) < 2**31:
            return np.zeros(self.shape, dtype)
        if count == 0 or last >= len(items) or count > max(len(items), 2**20):
            raise ValueError(f"a tensor of {count} items leaves storage {self.key} ({len(items)} items)")
        strides = [s * dtype.itemsize for s in self.strides]
        return np.lib.stride_tricks.as_strided(items[self.offset :], self.shape, strides, writeable=False)


def _rebuild_tensor(storage, offset, shape, strides, *_):
    if storage.dtype is None:
        raise pickle.UnpicklingError("a tensor without a type")
    return TensorRecord(storage.key, storage.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_tensor_v3(storage, offset, shape, strides, requires_grad, hooks, dtype, *_):
    return TensorRecord(storage.key, dtype.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(record, *_):
    return record


def _rebuild_from_type(function, kind, arguments, state):
    if function in (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_parameter):
        return function(*arguments)
    return Inert()


class _Name:
    """A dtype or a storage class: something that a pickle names and never calls."""

    def __init__(self, dtype):
        self.dtype = dtype


_KNOWN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.storage", "UntypedStorage"): _Name(None),
    **{("torch", name): _Name(dtype) for name, dtype in (STORAGES | DTYPES).items()},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file):
        super().__init__(file, encoding="latin1")
        self.inert = {}
        self.storages = {}

    def find_class(self, module, name):
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        full = f"{module}.{name}"
        if full not in self.inert:
            self.inert[full] = type("Inert", (Inert,), {})
        return self.inert[full]

    def persistent_load(self, identity):
        kind, storage, key, _, length = identity[:5]
        if kind != "storage" or not isinstance(storage, _Name):
            raise pickle.UnpicklingError(f"a storage of unknown kind {str(identity)[:80]!r}")
        return self.storages.setdefault(str(key), _Storage(str(key), storage.dtype, length))


def load(content):
    """(what the pickle holds, the names of its classes that were not run)."""
    result, inert, _ = _load_next(io.BytesIO(content), len(content))
    return result, inert


def _load_next(file, size):
    start = file.tell()
    # Reading the opcodes without obeying them holds every claimed length against the bytes that are there.
    for code, argument, _ in pickletools.genops(file):
        if code.name.endswith("PUT") and int(argument) > size:  # the memo is an array as long as its largest index
            raise pickle.UnpicklingError("the pickle's memo is larger than the file")
    file.seek(start)
    unpickler = _Unpickler(file)
    return unpickler.load(), set(unpickler.inert), unpickler.storages


def load_legacy(data):
    """(content, inert names, storages: key -> bytes) of torch's format before 1.6: pickles, then raw storages."""
    file = io.BytesIO(data.tobytes())
    _load_next(file, len(data))  # the magic number, by which the file was recognised
    _load_next(file, len(data))  # the protocol version
    system, *_ = _load_next(file, len(data))
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("it was saved on a big-endian machine")
    content, inert, known = _load_next(file, len(data))
    sizes = {key: np.dtype(storage.dtype).itemsize if storage.dtype else 1 for key, storage in known.items()}
    keys, *_ = _load_next(file, len(data))
    place, storages = file.tell(), {}
    for key in map(str, keys):
        (count,) = struct.unpack("<q", data[place : place + 8].tobytes())
        place += 8
        end = place + count * sizes.get(key, 1)
        if count < 0 or end > len(data):
            raise ValueError(f"storage {key} ends at byte {end} of {len(data)}")
        storages[key] = data[place:end]
        place = end
    return content, inert, storages


def unwrap(content, path, ema):
    """(state dict, the key it sat under or None, notes). Looks at most two levels deep."""
    taken, notes = [], []
    for _ in range(3):
        if not isinstance(content, dict):
            raise UserError(f"{path}: holds a {type(content).__name__}, not a dict of tensors; save model.state_dict()")
        averages = [key for key in AVERAGES if isinstance(content.get(key), dict)]
        wrappers = [key for key in WRAPPERS if isinstance(content.get(key), dict)]
        if ema and averages:
            taken.append(averages[0])
            content, ema = content[averages[0]], False
            continue
        if any(isinstance(value, TensorRecord) for value in content.values()):
            break
        if not wrappers:
            keys = ", ".join(str(key)[:40] for key in list(content)[:5])
            hint = f"; {averages[0]} is there: ask for it with ema" if averages else ""
            raise UserError(f"{path}: no weights under its keys ({keys}); known: {', '.join(WRAPPERS)}{hint}")
        others = [key for key in (*wrappers[1:], *averages)]
        if others:
            notes.append(f"took {wrappers[0]}, not {', '.join(others)}")
        taken.append(wrappers[0])
        content = content[wrappers[0]]
    if ema:
        raise UserError(f"{path}: averaged weights were asked for, but there are none ({', '.join(AVERAGES)})")
    return content, "/".join(taken) or None, notes
