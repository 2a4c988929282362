"""Images that a list, a Parquet file or tar shards name: the readers behind `table`, `parquet` and `tar`.

In: a file, or a folder of files that are named after their split (train.csv, test-00000-of-00002.parquet, train/0.tar).
Out: a Source as of a folder of images. Labels are matched by name: texts as they are, or whole numbers, which a Hugging
Face schema or a classes.txt beside the files may give names. The classes are those of train; an unknown one elsewhere
is an error that names it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import tarfile

import numpy as np

from vitplast_jax.data import folder, records, sources
from vitplast_jax.data.decode import is_image
from vitplast_jax.errors import UserError

PATH_COLUMNS = ("path", "file", "file_name", "filename", "image")
LABEL_COLUMNS = ("label", "class", "target")
IMAGE_COLUMNS, CLASSES_FILE = ("image", "img"), "classes.txt"


@dataclasses.dataclass
class Listed:
    """Examples of one split as a file lists them; labels are texts."""

    ids: list[str] = dataclasses.field(default_factory=list)
    files: list = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)

    def add(self, identifier, file, label):
        self.ids.append(identifier)
        self.files.append(file)
        self.labels.append(label)


def load_table(name, path, split, validation, seed):
    """CSV with a header, or JSONL: path (relative to the list's folder), label, and maybe split."""
    _need(path, name, "a .csv or .jsonl file with the columns path and label, or a folder of train.csv, test.csv")
    parts: dict[str, Listed] = {}
    for file, part in _files(path, (".csv", ".jsonl"), name):
        root = os.path.dirname(os.path.abspath(file))
        for line, row in _rows(file):
            where = f"{file}:{line}"
            image, label = (_column(row, names, where) for names in (PATH_COLUMNS, LABEL_COLUMNS))
            own = _split_named(row["split"], where) if row.get("split") else part
            parts.setdefault(own, Listed()).add(image, os.path.join(root, image), label)
    return _source(name, path, split, parts, None, validation, seed)


def _rows(file):
    """(line number, {column: value}) of a CSV or JSONL file."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            if file.endswith(".jsonl"):
                for line, text in enumerate(stream, 1):
                    if text.strip():
                        row = json.loads(text)
                        if not isinstance(row, dict):
                            raise ValueError("a line is no object")
                        yield line, row
            else:
                reader = csv.DictReader(stream)
                for row in reader:
                    yield reader.line_num, row
    except (ValueError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read as {os.path.splitext(file)[1][1:].upper()}: {error}") from None


def _column(row, names, where):
    for name in names:
        if row.get(name) not in (None, ""):
            return str(row[name])
    raise UserError(f"{where}: has no {names[0]}; expected a column called {' or '.join(names)}")


def load_parquet(name, path, split, validation, seed):
    """Parquet with a column of encoded images (bytes, or {bytes, path} as the hub writes them) and one of labels."""
    _need(path, name, "a .parquet file, or a folder of train-*.parquet, test-*.parquet")
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError:
        raise UserError("reading Parquet needs pyarrow: pip install pyarrow") from None
    parts, class_names = {}, None
    for file, part in _files(path, (".parquet",), name):
        try:
            table = parquet.read_table(file)
        except (ArrowException, OSError) as error:
            raise UserError(f"{file}: cannot be read as Parquet: {' '.join(str(error).split())}") from None
        image = next((key for key in IMAGE_COLUMNS if key in table.column_names), None)
        label = next((key for key in LABEL_COLUMNS if key in table.column_names), None)
        if image is None or label is None:
            raise UserError(f"{file}: has the columns {', '.join(table.column_names)}; expected image and label")
        column = table[image]
        if types.is_struct(column.type):
            column = _bytes_of(column, file)
        if not (types.is_binary(column.type) or types.is_large_binary(column.type)) or column.null_count:
            raise UserError(f"{file}: column {image} is {column.type}, expected encoded images (bytes) in every row")
        if table[label].null_count:
            raise UserError(f"{file}: column {label} has {table[label].null_count} rows without a value")
        class_names = class_names or _hub_names(table.schema.metadata, label)
        holder = records.ParquetColumn(file, column)
        listed = parts.setdefault(part, Listed())
        stem = os.path.basename(file)
        for place, text in enumerate(table[label].to_pylist()):
            listed.add(
                f"{stem}/{place}", records.Packed(holder, place), _label(text, class_names, f"{file}: row {place}")
            )
    return _source(name, path, split, parts, class_names, validation, seed)


def _bytes_of(column, file):
    fields = [field.name for field in column.type]
    if "bytes" not in fields:
        raise UserError(f"{file}: the image column has the fields {', '.join(fields)}, expected bytes")
    place = fields.index("bytes")
    from pyarrow import chunked_array

    return chunked_array([chunk.flatten()[place] for chunk in column.chunks], column.type[place].type)


def _hub_names(metadata, label):
    """Class names in the schema that the Hugging Face hub writes, or None."""
    try:
        return list(json.loads((metadata or {})[b"huggingface"])["info"]["features"][label]["names"])
    except (KeyError, ValueError, TypeError):
        return None


def load_tar(name, path, split, validation, seed):
    """Uncompressed tar shards in WebDataset's manner (KEY.jpg beside KEY.cls or KEY.json), or of CLASS/IMAGE."""
    _need(path, name, "a .tar file, or a folder of train-*.tar, test-*.tar")
    parts = {}
    root = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    class_names = None
    if os.path.isfile(os.path.join(root, CLASSES_FILE)):
        with open(os.path.join(root, CLASSES_FILE), encoding="utf-8") as file:
            class_names = [line.strip() for line in file if line.strip()]
    for file, part in _files(path, (".tar",), name):
        images, texts = _members(file)
        holder = records.TarShard(file, images)
        listed = parts.setdefault(part, Listed())
        for place, (member, _, _) in enumerate(images):
            key = member.rpartition("/")[0] + "/" + member.rpartition("/")[2].partition(".")[0]
            text = texts.get(key)
            if text is None:
                text = member.split("/")[-2] if "/" in member.removeprefix("./") else None
            if text is None:
                raise UserError(f"{file}: {member} has no label: expected {key.lstrip('/')}.cls, .json or CLASS/IMAGE")
            where = f"{file}: {member}"
            listed.add(
                f"{os.path.basename(file)}/{member}", records.Packed(holder, place), _label(text, class_names, where)
            )
    return _source(name, path, split, parts, class_names, validation, seed)


def _members(file):
    """([(name, offset, bytes)] of images, {key: label text}) of a tar file."""
    images, texts = [], {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                parent, _, base = member.name.rpartition("/")
                key, _, suffix = base.partition(".")
                if not member.isfile() or base.startswith("."):
                    continue
                if is_image(base):
                    images.append((member.name, member.offset_data, member.size))
                elif suffix in ("cls", "json"):
                    text = tar.extractfile(member).read().decode("utf-8").strip()
                    if suffix == "json":
                        found = json.loads(text)
                        text = next((str(found[key]) for key in LABEL_COLUMNS if key in found), None)
                    if text is not None:
                        texts[f"{parent}/{key}"] = text
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{file}: cannot be read as an uncompressed tar file: {error}") from None
    except (ValueError, TypeError) as error:  # of json and of decoding
        raise UserError(f"{file}: a label cannot be read: {error}") from None
    return images, texts


def _need(path, name, what):
    if not path:
        raise UserError(f"data.name={name} needs data.path: {what}")
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file or folder (data.path); expected {what}")


def _files(path, suffixes, name):
    """(file, split or "all") for a file, or for the files of a folder and of its folders for splits."""
    if os.path.isfile(path):
        return [(path, "all")]
    found = []
    for parent, below, names in os.walk(path):
        below.sort()
        for base in sorted(names):
            if base.endswith(suffixes) and not base.startswith("."):
                relative = os.path.relpath(os.path.join(parent, base), path)
                found.append((os.path.join(parent, base), _split_of(relative)))
    if not found:
        raise UserError(f"{path}: has no {' or '.join(suffixes)} file (data.name={name})")
    whole = [file for file, part in found if part == "all"]
    if whole and len(whole) < len(found):
        raise UserError(f"{whole[0]}: its name tells no split, while others in {path} do; rename or remove it")
    return found


def _split_of(relative):
    """The split that a file's name or folder begins with, or "all"."""
    for piece in relative.replace(os.sep, "/").split("/"):
        stem = piece.lower().replace("_", "-").partition("-")[0].partition(".")[0]
        for split, words in folder.ALIASES.items():
            if stem in words:
                return split
    return "all"


def _split_named(text, where):
    for split, words in folder.ALIASES.items():
        if str(text).lower() in words:
            return split
    raise UserError(f"{where}: split is {text!r}, expected train, validation or test")


def _label(value, class_names, where):
    """A label as text: a name, or the name of a number."""
    text = str(value)
    if class_names is None or text in class_names:
        return text
    if text.isdigit() and int(text) < len(class_names):
        return class_names[int(text)]
    raise UserError(f"{where}: label {text!r} is none of the {len(class_names)} classes")


def _source(name, path, split, parts, class_names, validation, seed):
    """One split of {"train" | "validation" | "test" | "all": Listed}, as of a folder of images."""
    base = "all" if "all" in parts else "train"
    if base == "all" and len(parts) > 1 or base not in parts:
        held = ", ".join(sorted(parts)) or "no examples"
        raise UserError(f"{path}: has {held}; expected train (and validation, test) or no splits at all")
    if class_names is None:
        texts = set(parts[base].labels)
        class_names = sorted(texts, key=int) if all(text.isdigit() for text in texts) else sorted(texts)
    if len(class_names) < 2:
        raise UserError(f"{path}: only one class, {class_names[0]!r}; expected two at least")
    place = {text: label for label, text in enumerate(class_names)}
    if unknown := sorted({text for listed in parts.values() for text in listed.labels} - set(place)):
        raise UserError(
            f"{path}: unknown class {', '.join(map(repr, unknown[:5]))}; train has {', '.join(class_names[:5])}"
        )
    listed = parts.get(split, parts[base])
    labels = np.asarray([place[text] for text in listed.labels], np.int32)
    if split in parts and split != "train":
        indices = np.arange(len(labels))
    elif split == "test" and base == "train":
        return None
    else:
        held = 0.0 if "validation" in parts else validation
        test = sources.TEST_SHARE if base == "all" else 0.0
        indices = sources.split_indices(labels, split, held, seed, test, stratified=True)
        if indices is None:
            return None
    return sources.Source(
        name=name,
        split=split,
        labels=labels[indices],
        class_names=tuple(class_names),
        ids=tuple(listed.ids[i] for i in indices),
        files=tuple(listed.files[i] for i in indices),
    )
