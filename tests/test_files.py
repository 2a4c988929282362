import json
import os

import pytest

from vitplast_jax import files


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "results.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        files.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_what_fails_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), files.replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_others_may_read_it(tmp_path):
    files.write_text(tmp_path / "x", "\u00e4")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "\u00e4" and os.stat(tmp_path / "x").st_mode & 0o777 == 0o644
