"""Damaged and hostile weights of every container: one line that names the file, quickly and without much memory."""

import json
import shutil
import tracemalloc
import zipfile

import goldens
import numpy as np
import pytest

from vitplast_jax.errors import UserError
from vitplast_jax.weights import convert, export, readers, structure, view

DATA = goldens.DATA
FUZZED = ["plain.safetensors", "plain.pth", "wrapped.pth", "legacy.pt", "strided.pth", "jax.npz", "plain.npz"]
SLACK = 2**21  # bytes: Python's own objects of tiny files


def content_of(name, tmp_path):
    if name != "plain.npz":
        return (DATA / name).read_bytes()
    np.savez_compressed(tmp_path / name, **readers.read_tensors(DATA / "plain.safetensors"))
    return (tmp_path / name).read_bytes()


def damaged(content, kind, rng):
    content = bytearray(content)
    if kind == "truncated":
        return content[: rng.integers(1, len(content))]
    if kind == "flipped":
        for place in rng.integers(0, len(content), 4):
            content[place] = rng.integers(256)
    elif kind == "flipped where lengths and names are":
        for place in rng.integers(0, min(2000, len(content)), 4):
            content[place] = rng.integers(256)
    elif kind == "claims":
        place = rng.integers(0, max(len(content) - 8, 1))
        content[place : place + 8] = b"\xff" * 8
    elif kind == "a piece twice":
        begin, end = sorted(rng.integers(0, len(content), 2))
        content[end:end] = content[begin:end]
    return content


KINDS = ("truncated", "flipped", "flipped where lengths and names are", "claims", "a piece twice")


@pytest.fixture
def memory():
    """`memory()`: the most bytes that Python and numpy held since the last call."""
    tracemalloc.start()

    def peak():
        most = tracemalloc.get_traced_memory()[1] - memory_before[0]
        tracemalloc.reset_peak()
        memory_before[0] = tracemalloc.get_traced_memory()[0]
        return most

    memory_before = [tracemalloc.get_traced_memory()[0]]
    yield peak
    tracemalloc.stop()


@pytest.mark.parametrize("name", FUZZED)
def test_damaged_files(name, tmp_path, memory):
    content, rng, path, errors = content_of(name, tmp_path), np.random.default_rng(0), tmp_path / name, 0
    for case in range(100):
        path.write_bytes(damaged(content, KINDS[case % len(KINDS)], rng))
        memory()
        try:
            tensors = readers.read_tensors(path)
        except UserError as error:
            errors += 1
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert sum(array.nbytes for array in tensors.values()) < 4 * len(content)
        tensors = None
        assert memory() < 2 * len(content) + SLACK
    assert errors > 50


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Snapshot folders: transformers' ViT in two shards, GPT-2 and DINOv3 in one file, and one of ours (Orbax)."""
    root = tmp_path_factory.mktemp("folders")
    shutil.copytree(DATA / "hf", root / "sharded")
    tensors = readers.read_tensors(DATA / "hf")
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        chosen = {name: np.array(tensors[name]) for name in tensors if places[name] == shard}
        export.write_safetensors(chosen, root / "sharded" / shard, {})
    (root / "sharded" / "model.safetensors").unlink()
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name in ("gpt2_hf", "dinov3_hf"):
        shutil.copytree(DATA / name, root / name)
    spec, tree, _ = convert.load_tree(DATA / "hf")
    export.save_folder(tree, spec, root / "ours")
    return root


ODD = (None, -1, 0, 2**70, 1e400, "x", "", [], [[]], {}, {"a": 1}, True, float("nan"))


def odd_json(content, rng):
    """The JSON with one of its values replaced, wherever it stands, or a key of it dropped."""
    value = json.loads(content)
    node = value
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[rng.integers(len(keys))]
        if isinstance(node[key], dict | list) and node[key] and rng.integers(3):
            node = node[key]
            continue
        if rng.integers(4):
            node[key] = ODD[rng.integers(len(ODD))]
        else:
            del node[key]
        return json.dumps(value).encode()


@pytest.mark.parametrize("name", ["sharded", "gpt2_hf", "dinov3_hf", "ours"])
def test_damaged_folders(name, folders, tmp_path):
    rng, errors = np.random.default_rng(0), 0
    files = sorted(path.relative_to(folders / name) for path in (folders / name).rglob("*") if path.is_file())
    told = [path for path in files if path.suffix == ".json"]
    files = told if name == "ours" else files  # Orbax's own: tests/test_training.py
    shutil.copytree(folders / name, tmp_path / name)
    for case in range(40 if name == "ours" else 100):  # reading Orbax takes its time
        victim = told[rng.integers(len(told))] if case % 2 else files[rng.integers(len(files))]
        content, path = (folders / name / victim).read_bytes(), tmp_path / name / victim
        if case % 2 and content.strip():
            path.write_bytes(odd_json(content, rng))
        elif case % 10 == 0:
            path.unlink()
        else:
            path.write_bytes(damaged(content or b"x", KINDS[case // 2 % len(KINDS)], rng))
        try:
            convert.load_tree(tmp_path / name)
        except UserError as error:
            errors += 1
            assert "\n" not in str(error)
        except Exception as error:
            raise AssertionError(f"case {case}: {victim} is {path.exists() and path.read_bytes()[:300]}") from error
        path.write_bytes(content)
    assert errors > (15 if name == "ours" else 30)


def test_a_name_twice_in_a_zip(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.ones(2, np.float32))
    with zipfile.ZipFile(path) as archive:
        content = archive.read("a.npy")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(UserError, match="the name 'a.npy' occurs twice"):
        readers.read_tensors(path)


@pytest.mark.parametrize("name", ["registers", "jax"])
def test_tensors_of_any_shape_raise_user_errors_only(name, tmp_path):
    source, rng = goldens.tensors_of(name), np.random.default_rng(0)
    names = sorted(source)
    told = {"heads": 2, "gelu": "erf"}
    errors = 0
    for case in range(150):
        state = dict(source)
        victim = (
            names[rng.integers(len(names))]
            if case % 3
            else ("pos_embed" if name == "registers" else "embedding/kernel")
        )
        array = state[victim]
        shapes = [
            (),
            (0,),
            (0, 0, 0, 0),
            array.shape[::-1],
            array.shape + (1,),
            array.shape[1:],
            (3,) * (case % 6),
            (1, 5, 16),
        ]
        state[victim] = np.ones(shapes[rng.integers(len(shapes))], np.float32)
        if case % 10 == 0:
            del state[victim]
        same = victim in state and state[victim].shape == array.shape
        try:
            seen = view.View(readers.Tensors(state, "test"), "test")
            spec, _ = structure.infer(seen, told, "test")
            np.savez(tmp_path / "a.npz", **state)
            convert.load_tree(tmp_path / "a.npz", spec=spec)
        except UserError as error:
            errors += 1
            assert "\n" not in str(error)
        else:
            assert same or victim.endswith("pos_embed") or "head" in victim, victim
    assert errors > 100
