"""Which tensors does this file hold?

In: a path (safetensors, npz, torch zip, legacy torch pickle, or a folder with one of them, sharded or not).
Out: `Tensors`, a dict from the file's own tensor names to numpy arrays, with the container's name and notes.

Bytes are memory-mapped wherever the container stores them plainly, so a 2.5 GB file costs no memory until it is used.
Every length that a file claims is checked against the file's size before anything is allocated; no code from a file
is ever run (see `torch_pickle`); a damaged file is one `UserError`.
"""

import json
import math
import os
import struct
import zipfile
import zlib

import ml_dtypes
import numpy as np

from vitplast_jax.errors import UserError
from vitplast_jax.weights import torch_pickle

SAFETENSORS_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
FOLDER_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_EXPANSION = 64  # how many times its own size a compressed file may claim to hold


class Tensors(dict):
    """name -> numpy array. `container`: how the file was read. `wrapper`: the key it sat under, or None. `notes`: tuple
    of one-line remarks for the report. `metadata`: what the file says of itself (safetensors), name -> text."""

    def __init__(self, arrays, container, wrapper=None, notes=(), metadata=None):
        super().__init__(arrays)
        self.container = container
        self.wrapper = wrapper
        self.notes = tuple(notes)
        self.metadata = dict(metadata or {})


def read_tensors(path, ema=False):
    """The tensors of a weights file or of a folder that holds one.

    Args:
        path: a file, or a folder with `model.safetensors` (or its index, or `pytorch_model.bin`).
        ema: take the averaged weights of a training checkpoint (`state_dict_ema`), which is an error if it has none.
    Returns: `Tensors`. Arrays are read-only views of the file where the container allows it.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        path = _file_of_folder(path)
    if path.endswith(".index.json"):
        return _read_sharded(path, ema)
    data = _map_file(path)
    container = _container(path, data)
    try:
        tensors = _READERS[container](data, path, ema)
    except UserError:
        raise
    except Exception as error:  # a damaged file can make a parser raise anything: one line instead of its traceback
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise UserError(f"{path}: damaged or truncated {container} file ({reason}); get it again") from error
    if not tensors:
        raise UserError(f"{path}: holds no tensors; expected a file of weights")
    return tensors


def _file_of_folder(folder):
    for name in FOLDER_NAMES:
        candidate = os.path.join(folder, name)
        if os.path.isfile(candidate):
            return candidate
    if os.path.isdir(os.path.join(folder, "checkpoints")):
        raise UserError(
            f"{folder}: is a run's folder; make weights of it with tools/convert_checkpoint.py export "
            f"--checkpoint {folder} --output FILE.safetensors --layout timm"
        )
    found = sorted(f for f in os.listdir(folder) if f.endswith((".safetensors", ".npz", ".pth", ".pt", ".bin")))
    if len(found) == 1:
        return os.path.join(folder, found[0])
    what = (
        f"several weights files ({', '.join(found[:5])}); name one" if found else f"none of {', '.join(FOLDER_NAMES)}"
    )
    raise UserError(f"{folder}: the folder holds {what}")


def _map_file(path):
    """The file as a read-only uint8 array over a memory map."""
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file; give a weights file, a folder, a shipped name or hf-hub:ID")
    try:
        if os.path.getsize(path) == 0:
            raise UserError(f"{path}: the file is empty; get it again")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _container(path, data):
    """Which kind of file this is, by its bytes; names lie too often."""
    head = data[:512].tobytes()
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head[:1] == b"\x80" and torch_pickle.LEGACY_MAGIC in head[:32]:
        return "legacy torch"
    if head.startswith(b"\x93NUMPY"):
        raise UserError(f"{path}: is a single array (npy); expected many named ones: npz, safetensors or a torch file")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and head[8:9] != b"{":
        raise UserError(f"{path}: is a pickle, but none that torch wrote; expected safetensors, npz or a torch file")
    if len(head) > 8 and (head[8:9] == b"{" or path.endswith(".safetensors")) and not _is_text(head):
        return "safetensors"
    if _is_text(head):
        text = head.lstrip().lower()
        if text.startswith(b"version https://git-lfs"):
            raise UserError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull`")
        kind = "a web page (a failed download?)" if text.startswith(b"<") else "a text file"
        raise UserError(f"{path}: is {kind}, not weights; expected safetensors, npz or a torch file")
    raise UserError(
        f"{path}: is no weights file that can be read (safetensors, npz, torch); truncated or another format"
    )


def _is_text(head):
    return head[:8].isascii() and not any(byte < 9 for byte in head[:8])


# ---------------------------------------------------------------------------------------------------- safetensors


def _read_safetensors(data, path, ema):
    if ema:
        raise UserError(f"{path}: averaged weights were asked for, but a safetensors file holds one set of weights")
    size = len(data)
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(size - 8, MAX_HEADER):
        raise UserError(f"{path}: truncated safetensors file: its header claims {length} bytes of {size}; get it again")
    header = json.loads(data[8 : 8 + length].tobytes().decode("utf-8"), object_pairs_hook=_unique)
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    arrays, spans = {}, []
    for name, entry in header.items():
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in SAFETENSORS_DTYPES:
            raise UserError(f"{path}: {name} has dtype {dtype!r}; known: {', '.join(SAFETENSORS_DTYPES)}")
        if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
            raise ValueError(f"{name} has a shape or offset that is no natural number")
        dtype = np.dtype(SAFETENSORS_DTYPES[dtype])
        if end > len(body):
            raise UserError(f"{path}: truncated: {name} ends at byte {end} of {len(body)}; get it again")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {end - begin} bytes for shape {shape} of {dtype}")
        spans.append((begin, end, name))
        arrays[name] = _view(body, begin, dtype, shape)
    place = 0
    for begin, end, name in sorted(spans):
        if begin != place:
            raise ValueError(
                f"{name} {'overlaps the tensor before it' if begin < place else 'leaves a hole before it'}"
            )
        place = end
    if place != len(body):
        raise ValueError(f"{len(body) - place} bytes after the last tensor")
    return Tensors(arrays, "safetensors", metadata=metadata if isinstance(metadata, dict) else {})


def _unique(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return result


def _view(data, begin, dtype, shape):
    dtype = np.dtype(dtype)
    flat = data[begin : begin + math.prod(shape) * dtype.itemsize]
    return flat.view(dtype).reshape(tuple(shape))


def _read_sharded(index_path, ema):
    folder = os.path.dirname(index_path)
    try:
        with open(index_path, encoding="utf-8") as file:
            weight_map = json.load(file, object_pairs_hook=_unique)["weight_map"]
        places = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index_path}: no index of shards ({type(error).__name__}: {error}); get it again") from error
    shards = sorted(set(places.values()))
    for shard in shards:
        if shard != os.path.basename(shard) or shard in ("", ".", ".."):
            raise UserError(f"{index_path}: names the shard {shard!r}; a shard must lie beside its index")
    read = {shard: read_tensors(os.path.join(folder, shard), ema) for shard in shards}
    missing = [name for name, shard in places.items() if name not in read[shard]]
    if missing:
        raise UserError(f"{index_path}: {len(missing)} tensors are not in their shards, e.g. {', '.join(missing[:5])}")
    kinds = sorted({tensors.container for tensors in read.values()})
    notes = [note for tensors in read.values() for note in tensors.notes]
    arrays = {name: read[shard][name] for name, shard in places.items()}
    return Tensors(arrays, f"{'+'.join(kinds)} ({len(shards)} shards)", notes=notes)


# ---------------------------------------------------------------------------------------------------------- zip


def _read_zip(data, path, ema):
    """npz and torch's zip: the members say which."""
    with zipfile.ZipFile(path) as archive:
        members = _unique([(info.filename, info) for info in archive.infolist()])
        claimed = sum(info.file_size for info in members.values())
        if claimed > MAX_EXPANSION * len(data) + 2**20:
            raise UserError(f"{path}: claims to hold {claimed} bytes, {claimed // len(data)} times its size; not read")

        def member(name):
            return _member_bytes(archive, members[name], data)

        pickles = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) == 1:
            return _read_torch_zip(path, pickles[0], members, member, ema)
        if any(name.endswith(".npy") for name in members):
            if ema:
                raise UserError(f"{path}: averaged weights were asked for, but an npz file holds one set of weights")
            arrays = {n[:-4]: _read_npy(member(n), path, n[:-4]) for n in members if n.endswith(".npy")}
            return Tensors(arrays, "npz")
    raise UserError(f"{path}: is a zip file without arrays (.npy) and without a torch pickle; expected npz or torch")


def _member_bytes(archive, info, data):
    """A member's bytes as uint8: a view of the map where it is stored plainly, else decompressed."""
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as file:  # zipfile stops at the claimed size and checks the sum
            return np.frombuffer(file.read(info.file_size), np.uint8)
    start = info.header_offset
    signature, name_length, extra_length = struct.unpack("<4s22xHH", data[start : start + 30].tobytes())
    if signature != b"PK\x03\x04" or info.flag_bits & 1:
        raise ValueError(f"member {info.filename}: no plain local header")
    start += 30 + name_length + extra_length
    content = data[start : start + info.file_size]
    if len(content) != info.file_size:
        raise ValueError(f"member {info.filename} ends after {len(content)} of {info.file_size} bytes")
    # 0 where torch was told to leave the sums out (torch.serialization.set_crc32_options).
    if info.CRC and zlib.crc32(content) != info.CRC:
        raise ValueError(f"member {info.filename}: its bytes differ from their checksum")
    return content


def _read_npy(content, path, name):
    file = torch_pickle.ByteReader(content)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"{name}: npy version {version}")
    if dtype.hasobject:
        raise UserError(f"{path}: {name} holds Python objects, which could run code; expected arrays of numbers")
    if dtype == np.dtype("V2"):  # numpy writes bfloat16 as nameless 2-byte items
        dtype = np.dtype(ml_dtypes.bfloat16)
    if dtype.kind not in "fiub" and dtype != ml_dtypes.bfloat16:
        raise UserError(f"{path}: {name} has dtype {dtype}; expected numbers")
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"{name}: {len(content) - file.tell()} bytes for shape {shape} of {dtype}")
    array = _view(content, file.tell(), dtype, shape[::-1] if fortran else shape)
    return array.T if fortran else array


def _read_torch_zip(path, pickle_name, members, member, ema):
    root = pickle_name[: -len("data.pkl")]
    if root + "byteorder" in members and member(root + "byteorder").tobytes() != b"little":
        raise UserError(f"{path}: was saved on a big-endian machine; save it again on a little-endian one")
    content, inert = torch_pickle.load(member(pickle_name).tobytes())
    storages = {}

    def storage(key):
        if key not in storages:
            name = f"{root}data/{key}"
            if name not in members:
                raise ValueError(f"storage {key!r} is missing")
            storages[key] = member(name)
        return storages[key]

    return _from_state(content, storage, inert, "torch zip", path, ema)


def _read_legacy(data, path, ema):
    content, inert, storages = torch_pickle.load_legacy(data)
    return _from_state(content, storages.__getitem__, inert, "legacy torch", path, ema)


def _from_state(content, storage, inert, container, path, ema):
    """Finds the state dict in what was unpickled and gives its tensors their bytes."""
    content, wrapper, notes = torch_pickle.unwrap(content, path, ema)
    arrays, others = {}, []
    for name, value in content.items():
        if isinstance(value, torch_pickle.TensorRecord):
            arrays[str(name)] = value.array(storage(value.key))
        else:
            others.append(str(name)[:60])
    if others:
        notes.append(f"not tensors, left out: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}")
    if inert:
        notes.append(f"classes of the pickle that were not run: {', '.join(sorted(inert)[:10])}")
    return Tensors(arrays, container, wrapper, notes)


_READERS = {"safetensors": _read_safetensors, "zip": _read_zip, "legacy torch": _read_legacy}
