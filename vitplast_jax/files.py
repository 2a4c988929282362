"""Files of a run, on a disk or in a bucket (gs://) alike, which a reader, or a kill at any moment, finds old or new but
never half written.

In: a path and what it shall hold. Out: the file, put in place at once. A bucket has neither folders nor locks, nothing
in it can be renamed or appended to, and an object is there, whole, once its upload has ended.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from vitplast_jax.errors import UserError

# Decision 10: TensorFlow, where it is installed, is not loaded for this; etils looks here once, at its first path.
os.environ.setdefault("EPATH_USE_TF", "0")

BUCKET = "gs://"
_FLUSH_SECONDS = 10.0  # between two uploads of a file that grows


def in_bucket(path: str | os.PathLike) -> bool:
    return os.fspath(path).startswith(BUCKET)


def as_path(path: str | os.PathLike) -> Path:
    """A path whose methods work where it lies: pathlib's, or in a bucket those of etils.epath, which are called alike.

    Raises:
      UserError: a bucket, and the package that reads them is not installed.
    """
    if isinstance(path, PurePath):
        return path
    if not in_bucket(path):
        return Path(path)
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{path}: buckets need the package gcsfs (pip install -c requirements.txt -e '.[gcs]')")
    from etils import epath

    return epath.Path(os.fspath(path))


def absolute(path: str | os.PathLike) -> Path:
    path = as_path(path)
    return path if in_bucket(path) else path.absolute()


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A binary file to write; it takes the place of ``path`` when the context ends without an error."""
    path = as_path(path)
    if in_bucket(path):
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with path.open("wb") as target:
                shutil.copyfileobj(file, target)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike, text: str):
    """Writes text as UTF-8; bytes of file names that are no UTF-8 are written as they are."""
    with replacing(path) as file:
        file.write(text.encode(errors="surrogateescape"))


def write_json(path: str | os.PathLike, value: Any):
    """Writes JSON; NaN and infinities, which JSON has not, are an error."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


class Lines:
    """A text file that grows: begun with some lines; in a bucket it is uploaded anew, not at every line."""

    def __init__(self, path: str | os.PathLike, lines: Iterable[str] = ()):
        self._path, self._lines = as_path(path), list(lines)
        self.flush()

    def write(self, line: str):
        if not in_bucket(self._path):
            with self._path.open("a") as file:
                file.write(line)
            return
        self._lines.append(line)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self):
        """Returns when every line is there to be read."""
        if self._lines is not None:
            write_text(self._path, "".join(self._lines))
        if not in_bucket(self._path):
            self._lines = None  # from now on the file itself grows
        self._flushed = time.monotonic()


def remove(path: str | os.PathLike):
    """Removes a file, or a folder with all that it holds; what is not there is no error."""
    path = as_path(path)
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif in_bucket(path):
        path.rmtree()
    else:
        shutil.rmtree(path)


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Makes a folder, and keeps others out of it as long as the context lasts, where there are locks.

    Raises:
      BlockingIOError: it is locked already.
    """
    folder = as_path(folder)
    if in_bucket(folder):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield


def check_writable(folder: str | os.PathLike, what: str):
    """Raises a UserError if nothing could be written to a folder, which need not exist."""
    folder = absolute(folder)
    if in_bucket(folder):
        mark = folder / ".writable"
        write_text(mark, "")
        mark.unlink()
        return
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "cannot be written" if existing.is_dir() else "is a file"
        raise UserError(f"{what} {folder}: {existing} {reason}; name another folder")


def on_disk(folder: str | os.PathLike) -> Path:
    """A folder on this machine's disk, for what must be mapped or is written by others: the folder itself, or one that
    stands for a bucket's, the same at every start."""
    folder = as_path(folder)
    if in_bucket(folder):
        digest = hashlib.sha256(os.fspath(folder).encode()).hexdigest()
        folder = Path(tempfile.gettempdir()) / f"vitplast_jax_{os.getuid()}_{digest[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def copy(source: str | os.PathLike, target: str | os.PathLike):
    """Copies a file, or a folder with all that it holds, to or from a bucket."""
    source, target = as_path(source), as_path(target)
    if source.is_dir():
        for entry in source.iterdir():
            copy(entry, target / entry.name)
        return
    with source.open("rb") as file, replacing(target) as copied:
        shutil.copyfileobj(file, copied)


@functools.lru_cache(maxsize=8)
def fetched(path: str) -> str:
    """The path of a copy on this machine's disk of what lies in a bucket, made once a process."""
    place = on_disk(path)
    remove(place)
    copy(path, place / as_path(path).name)
    return str(place / as_path(path).name)
