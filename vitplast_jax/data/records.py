"""Where is an encoded image that is no file of its own? In a tar shard, a Parquet column or an ArrayRecord split.

In: the container. Out: `Packed`, which stands where a path stands (`Source.files`): `read()` gives the bytes of the
image as a file would hold them, `str()` a name for messages. Containers are opened when first read.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from vitplast_jax.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """One image of a container: the container and the place in it."""

    holder: Any
    place: int

    def read(self) -> bytes:
        return self.holder.read(self.place)

    def __str__(self) -> str:
        return self.holder.name(self.place)

    @property
    def size(self) -> int:
        """Bytes of the encoded image."""
        return self.holder.size(self.place)

    @property
    def scale(self) -> int:
        """What the stored pixels are multiplied by."""
        return getattr(self.holder, "scale", 1)


def open_binary(file) -> IO[bytes]:
    """A stream over a path or a `Packed`."""
    return io.BytesIO(file.read()) if isinstance(file, Packed) else open(file, "rb")


def size_of(file) -> int | None:
    """Bytes of a file or a `Packed`, None where there is no such file."""
    if isinstance(file, Packed):
        return file.size
    return os.path.getsize(file) if os.path.exists(file) else None


class TarShard:
    """Members of an uncompressed tar file, read by offset: [(name, offset, bytes), ...]."""

    def __init__(self, path: str, members: Sequence[tuple[str, int, int]]):
        self._path, self._members = path, members

    def read(self, place: int) -> bytes:
        _, offset, size = self._members[place]
        with open(self._path, "rb") as file:
            data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise UserError(f"{self.name(place)}: the shard is shorter than when it was opened")
        return data

    def name(self, place: int) -> str:
        return f"{self._path}: {self._members[place][0]}"

    def size(self, place: int) -> int:
        return self._members[place][2]


class ParquetColumn:
    """A column of encoded images of one Parquet file, held in memory as encoded."""

    def __init__(self, path: str, column):
        self._path, self._column = path, column  # a pyarrow ChunkedArray of binary

    def read(self, place: int) -> bytes:
        return self._column[place].as_py()

    def name(self, place: int) -> str:
        return f"{self._path}: row {place}"

    def size(self, place: int) -> int:
        return len(self._column[place].as_buffer())


class RecordSplit:
    """One split of a TFDS folder in ArrayRecord format, read through `as_data_source`, without TensorFlow."""

    def __init__(self, folder: str, split: str, sizes: np.ndarray, scale: int = 1, feature: str = "image"):
        self._folder, self._split, self._sizes, self._feature = folder, split, sizes, feature
        self.scale = scale
        self._records, self._lock = None, threading.Lock()

    def record(self, place: int):
        """The features of a record: a protocol buffer's map of names."""
        from tensorflow_datasets.proto import tf_example_pb2

        if self._records is None:
            with self._lock:
                self._records = self._records or open_records(self._folder, self._split)
        return tf_example_pb2.Example.FromString(self._records[place]).features.feature

    def read(self, place: int) -> bytes:
        return self.record(place)[self._feature].bytes_list.value[0]

    def name(self, place: int) -> str:
        return f"{self._folder}: {self._split} record {place}"

    def size(self, place: int) -> int:
        return int(self._sizes[place])


def open_records(folder: str, split: str):
    """The undecoded records of a split. (Decoding every feature, as TFDS does by default, takes ten times as long.)"""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(folder)
    return builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
