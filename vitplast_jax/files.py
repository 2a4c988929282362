"""Files that a reader, or a kill at any moment, finds old or new but never half written.

In: a path and what it shall hold. Out: the file, put in place at once.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A binary file to write; it takes the place of ``path`` when the context ends without an error."""
    path = Path(path)
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
