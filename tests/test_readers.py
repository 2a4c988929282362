"""Weights files: every container holds the same tensors, and no damaged or hostile file does worse than one line."""

import io
import json
import os
import pickle
import struct
import time
import zipfile

import goldens
import ml_dtypes
import numpy as np
import pytest

from vitplast_jax.errors import UserError
from vitplast_jax.weights import export, readers

DATA = goldens.DATA


@pytest.fixture(scope="module")
def plain():
    """The tensors of the tiny model that all torch files hold, read by the format's own library."""
    safetensors = pytest.importorskip("safetensors.numpy")
    return safetensors.load_file(DATA / "plain.safetensors")


def assert_same(tensors, expected, prefix=""):
    assert {name.removeprefix(prefix) for name in tensors} == set(expected)
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, expected[name.removeprefix(prefix)], err_msg=name)


def test_safetensors(plain):
    tensors = readers.read_tensors(DATA / "plain.safetensors")
    assert tensors.container == "safetensors"
    assert_same(tensors, plain)


@pytest.mark.parametrize("name", ["plain.pth", "parameters.pth", "strided.pth"])
def test_torch_zip(name, plain):
    tensors = readers.read_tensors(DATA / name)
    assert tensors.container == "torch zip" and tensors.wrapper is None and tensors.notes == ()
    assert_same(tensors, plain)


def test_legacy_torch(plain):
    tensors = readers.read_tensors(DATA / "legacy.pt")
    assert tensors.container == "legacy torch" and tensors.wrapper == "model"
    assert_same(tensors, plain)


def test_training_checkpoint_names_classes_that_were_not_run(plain):
    tensors = readers.read_tensors(DATA / "wrapped.pth")
    assert tensors.wrapper == "model"
    assert "argparse.Namespace" in tensors.notes[0] and "pathlib.PurePosixPath" in tensors.notes[0]
    assert_same(tensors, plain)


def test_average_only_when_asked(plain):
    tensors = readers.read_tensors(DATA / "averaged.pth")
    assert tensors.wrapper == "state_dict" and tensors.notes == ("took state_dict, not state_dict_ema",)
    assert_same(tensors, plain, "module.")
    averaged = readers.read_tensors(DATA / "averaged.pth", ema=True)
    assert averaged.wrapper == "state_dict_ema"
    assert_same(averaged, {name: array + 1 for name, array in plain.items()}, "module.")


@pytest.mark.parametrize("name", ["plain.pth", "plain.safetensors"])
def test_average_that_is_not_there(name):
    with pytest.raises(UserError, match="averaged weights were asked for"):
        readers.read_tensors(DATA / name, ema=True)


def test_bfloat16_of_torch_keeps_its_bits(plain):
    tensors = readers.read_tensors(DATA / "bfloat16.pth")
    for name, array in tensors.items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, plain[name].astype(ml_dtypes.bfloat16))


def test_bfloat16_of_npz_and_safetensors_keeps_its_bits(tmp_path):
    bits = np.array([0x3F80, 0xC000, 0x0001, 0x7F7F], np.uint16)
    array = bits.view(ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", x=array)
    export.write_safetensors({"x": array}, tmp_path / "a.safetensors", {})
    for file in ("a.npz", "a.safetensors"):
        read = readers.read_tensors(tmp_path / file)["x"]
        assert read.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(read.view(np.uint16), bits)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save, tmp_path):
    arrays = {
        "a/b": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "s": np.float32(3),
    }
    save(tmp_path / "a.npz", **arrays)
    tensors = readers.read_tensors(tmp_path / "a.npz")
    assert tensors.container == "npz"
    assert_same(tensors, arrays)


def test_shards(plain, tmp_path):
    names = sorted(plain)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(places.values()):
        export.write_safetensors({n: plain[n] for n in names if places[n] == shard}, tmp_path / shard, {})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same(readers.read_tensors(tmp_path), plain)
    index.write_text(json.dumps({"weight_map": places | {names[0]: "../elsewhere.safetensors"}}))
    with pytest.raises(UserError, match="must lie beside its index"):
        readers.read_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": places | {"more": places[names[0]]}}))
    with pytest.raises(UserError, match="1 tensors are not in their shards, e.g. more"):
        readers.read_tensors(tmp_path)


def test_own_safetensors_are_read_by_the_library(plain, tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    export.write_safetensors(plain, tmp_path / "x.safetensors", {"a": "b"})
    assert_same(library.load_file(tmp_path / "x.safetensors"), plain)


def test_flipped_byte_is_seen_and_missing_sums_are_not_missed(plain, tmp_path):
    content = bytearray((DATA / "plain.pth").read_bytes())
    pattern = plain["pos_embed"].tobytes()
    damaged = content.replace(pattern, pattern[:-1] + bytes([pattern[-1] ^ 1]))
    path = tmp_path / "a.pth"
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="differ from their checksum"):
        readers.read_tensors(path)
    with zipfile.ZipFile(DATA / "plain.pth") as archive:
        sums = {struct.pack("<I", info.CRC) for info in archive.infolist() if info.CRC}
    for value in sums:  # as torch.serialization.set_crc32_options(False) leaves them
        content = content.replace(value, b"\0\0\0\0")
    path.write_bytes(content)
    assert_same(readers.read_tensors(path), plain)


# ------------------------------------------------------------------------------------------------- what is no weights


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>Sign in</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"these are words", "a text file"),
        (b"\x93NUMPY\x01\x00" + b"x" * 99, "single array"),
        (b"\x80\x04\x95\x00\x01\x02\x03\x04\x05\x06", "none that torch wrote"),
        (b"\x01\x02", "truncated or another format"),
        (b"PK\x03\x04" + b"x" * 99, "damaged or truncated zip"),
    ],
)
def test_files_of_another_kind(content, message, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        readers.read_tensors(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_such_file_and_no_weights_in_a_folder(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        readers.read_tensors(tmp_path / "x.pth")
    with pytest.raises(UserError, match="holds none of model.safetensors"):
        readers.read_tensors(tmp_path)


def safetensors_bytes(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        safetensors_bytes({"a": ENTRY | {"shape": [2**40], "data_offsets": [0, 2**42]}}, b"x" * 8),
        safetensors_bytes({"a": ENTRY | {"shape": [3]}}, b"x" * 8),
        safetensors_bytes({"a": ENTRY | {"shape": [-2]}}, b"x" * 8),
        safetensors_bytes({"a": ENTRY | {"shape": [2.0]}}, b"x" * 8),
        safetensors_bytes({"a": ENTRY | {"data_offsets": [8, 0]}}, b"x" * 8),
        safetensors_bytes({"a": ENTRY | {"dtype": "F33"}}, b"x" * 8),
        safetensors_bytes({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, b"x" * 12),
        safetensors_bytes({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, b"x" * 20),
        safetensors_bytes({"a": ENTRY}, b"x" * 12),
        safetensors_bytes(b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2), b"x" * 8),
        safetensors_bytes(b'{"a": ' + b"[" * 100_000),
        safetensors_bytes({"a": 3}),
        safetensors_bytes(b"[]"),
        safetensors_bytes({}),
    ],
)
def test_safetensors_that_lie(content, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError):
        readers.read_tensors(path)


# ---------------------------------------------------------------------------------------------------- hostile pickles


class Attack:
    """Writes a file when it is unpickled the ordinary way."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def torch_zip(path, pickled, **members):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)


def test_pickle_that_would_run_code_does_not(tmp_path):
    target = tmp_path / "ran"
    path = tmp_path / "a.pth"
    content = pickle.dumps({"state_dict": {"a": Attack(target)}}, protocol=2)
    torch_zip(path, content)
    with pytest.raises(UserError, match="no weights"):
        readers.read_tensors(path)
    assert not target.exists()
    pickle.loads(content)  # it is a real attack: this is what must never happen
    assert target.exists()


@pytest.mark.parametrize("name", ["eval", "exec", "getattr", "__import__"])
def test_builtins_become_inert(name, tmp_path):
    path = tmp_path / "a.pth"
    torch_zip(path, b"\x80\x02}X\x01\x00\x00\x00acbuiltins\n" + name.encode() + b"\nX\x03\x00\x00\x001/0\x85Rs.")
    with pytest.raises(UserError, match="no tensors|no weights"):
        readers.read_tensors(path)


def test_npz_with_objects_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([Attack(tmp_path / "ran")], dtype=object))
    with pytest.raises(UserError, match="could run code"):
        readers.read_tensors(tmp_path / "a.npz")
    assert not (tmp_path / "ran").exists()


def tensor_pickle(numel, offset, shape, strides):
    """{"a": tensor} as torch pickles it, with any numbers."""

    class Storage:
        pass

    class Rebuild:
        def __reduce__(self):
            return (len, (Storage(), offset, shape, strides, False, {}))

    class Pickler(pickle._Pickler):
        def persistent_id(self, item):
            return ("storage", float, "0", "cpu", numel) if isinstance(item, Storage) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump({"a": Rebuild()})
    content = file.getvalue()
    for module in (b"__builtin__", b"builtins"):
        content = content.replace(b"c" + module + b"\nlen\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
        content = content.replace(b"c" + module + b"\nfloat\n", b"ctorch\nFloatStorage\n")
    return content


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (5,), (1,)),
        (3, (2,), (1,)),
        (0, (2, 2), (3, 1)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (2**40,), (0,)),
        (0, (2**40, 0), (1, 1)),
        (0, (2,), (1, 1)),
        (0, (2.0,), (1,)),
        (0, ("2",), (1,)),
    ],
)
def test_tensors_that_leave_their_storage(offset, shape, strides, tmp_path):
    path = tmp_path / "a.pth"
    torch_zip(path, tensor_pickle(4, 0, (2, 2), (2, 1)), **{"data/0": np.arange(4, dtype=np.float32).tobytes()})
    np.testing.assert_array_equal(readers.read_tensors(path)["a"], [[0, 1], [2, 3]])
    torch_zip(path, tensor_pickle(4, offset, shape, strides), **{"data/0": np.arange(4, dtype=np.float32).tobytes()})
    with pytest.raises(UserError):
        readers.read_tensors(path)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x05\x96" + struct.pack("<Q", 2**34) + b"x.",  # BYTEARRAY8 of 16 GB
        b"\x80\x04\x8e" + struct.pack("<Q", 2**34) + b"x.",  # BINBYTES8 of 16 GB
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of 2 billion places
        b"\x80\x02K\x01p99999999999\n.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.",  # a frame longer than any file
    ],
)
def test_pickles_that_claim_memory(opcodes, tmp_path):
    path = tmp_path / "a.pth"
    torch_zip(path, opcodes)
    start = time.perf_counter()
    with pytest.raises(UserError):
        readers.read_tensors(path)
    assert time.perf_counter() - start < 2


def test_zip_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\0" * 2**26)
    with pytest.raises(UserError, match="times its size"):
        readers.read_tensors(path)


def test_transposed_matrices_are_copied_by_tiles():
    for array in (np.arange(300 * 129.0).reshape(300, 129).T, np.arange(24).reshape(2, 3, 4).T, np.arange(6)[::2]):
        copy = export.contiguous(array)
        assert copy.flags.c_contiguous and copy.dtype == array.dtype
        np.testing.assert_array_equal(copy, array)


def test_a_runs_folder_is_no_folder_of_weights(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="is a run's folder; make weights of it with tools/convert_checkpoint"):
        readers.read_tensors(tmp_path)
