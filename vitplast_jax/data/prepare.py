"""How does a benchmark get from its publisher to a folder that training reads? Once, whole or not at all.

In: a row of `data/protocols.py`, a folder to make, and files fetched by hand where the row needs them. Out: the folder
that `data/prepared.py` reads. TFDS's own builder writes the records (extra `prepare`: TensorFlow, only here), or they
are packed from an archive, for which nothing more is needed. Everything is written beside the folder under another
name and renamed at the end, so a failure leaves nothing that a later run could mistake for a prepared set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import socket
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from vitplast_jax.data import archives, decode, prepared, protocols, records
from vitplast_jax.errors import UserError
from vitplast_jax.files import write_json

RECORDS_A_SHARD = 10_000


def prepare(name: str, output: str | os.PathLike, manual: str = "", downloads: str = "", say: Callable = print) -> dict:
    """Prepares a benchmark, or finds that it is prepared; returns its manifest.

    Args:
      name: of a row of `data/protocols.py`.
      output: folder to make; may hold the same set already, or nothing.
      manual: folder with files fetched by hand: those the row names, and downloads under their publisher's names.
      downloads: folder where downloads are kept; "": beside `output`, removed when all is done.
      say: called with each line for the user.
    Raises:
      UserError: a missing extra, file or network, a damaged archive, or data that are not what the row says.
    """
    row = protocols.task(name)
    output = Path(output)
    if (output / prepared.MANIFEST).exists():
        manifest = prepared.read_manifest(str(output))
        if manifest["source"] != row.source:
            raise UserError(f"{output} holds {manifest['source']}, not {row.source}; name another --output")
        say(f"{output} holds {row.source} already; nothing to do")
        return manifest
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is no prepared data set; name another --output, or remove it")
    _check_files(row, manual)
    with _fresh(output) as folder:
        try:
            if row.source.startswith("tfds:"):
                names = _build(row, folder, manual, downloads or f"{output}.downloads")
            else:
                names = _pack(row, folder, manual)
            manifest = write_index(row, folder, names)
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # builders and archives raise whatever they like
            raise UserError(_explain(row, error, manual)) from error
        if not downloads:
            shutil.rmtree(f"{output}.downloads", ignore_errors=True)
    counts = ", ".join(f"{count:,} {split}" for split, count in manifest["splits"].items())
    say(f"prepared {row.source} in {output}: {counts}; serves {', '.join(manifest['serves'])}")
    return manifest


def _check_files(row, manual):
    if not row.files:
        if manual and not os.path.isdir(manual):
            raise UserError(f"--manual {manual}: no such folder")
        return
    present = [file for file in row.files if manual and (Path(manual) / file).exists()]
    needed = row.files[:1] if row.source.startswith("archive:") else row.files
    if not present or (row.source.startswith("tfds:") and len(present) < len(needed)):
        where = f"in --manual {manual}" if manual else "in a folder given by --manual"
        missing = " or ".join(row.files) if row.source.startswith("archive:") else ", ".join(row.files)
        raise UserError(f"{row.name} needs {missing} {where}: {row.manual} (about {row.megabytes:,} MB)")


@contextlib.contextmanager
def _fresh(output: Path):
    """A folder beside `output` that takes its place when the context ends without an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.partial."))
    try:
        yield partial
        if output.exists():
            output.rmdir()
        os.chmod(partial, 0o755)
        os.rename(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build(row, folder: Path, manual, downloads) -> dict[str, list[str]]:
    """Lets TFDS's builder write ArrayRecord to `folder`/data; returns the class names of its class features."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UserError(
            f"preparing {row.name} needs TensorFlow (training does not): pip install 'vitplast_jax[prepare]'"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # TensorFlow would reserve every accelerator it sees
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow_datasets as tfds

    _, name, version = row.source.split(":")
    work = folder / "work"
    builder = tfds.builder(f"{name}:{version}", data_dir=str(work), file_format="array_record")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it tells of every attempt; the last error says it all
    _check_network(row, builder.url_infos or {}, manual, downloads)
    builder.download_and_prepare(
        download_dir=str(downloads),
        download_config=tfds.download.DownloadConfig(manual_dir=manual or None),
        file_format="array_record",
    )
    counts = {split: info.num_examples for split, info in builder.info.splits.items()}
    if wrong := [f"{split} has {count}" for split, count in counts.items() if row.counts.get(split, count) != count]:
        raise UserError(f"{row.source} is not what the protocol names: {', '.join(wrong)}, expected {row.counts}")
    names = _names(builder.info.features)
    os.rename(builder.data_dir, folder / prepared.DATA)
    shutil.rmtree(work)
    return names


def _check_network(row, infos, manual, downloads):
    """Without any network, and with nothing fetched before, says so at once: TFDS would try for minutes."""
    present = any((Path(manual) / (info.filename or "")).is_file() for info in infos.values()) if manual else False
    if not infos or present or (os.path.isdir(downloads) and os.listdir(downloads)):
        return
    for host in {urllib.parse.urlsplit(url).hostname for url in infos}:
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, 443)
            return
    raise UserError(f"{row.name} cannot be downloaded: no network. Fetch {_downloads(row)} into a folder for --manual")


def _names(features) -> dict[str, list[str]]:
    """{feature: class names} of a TFDS feature dictionary."""
    return {
        key: list(feature.names)
        for key, feature in features.items()
        if getattr(feature, "num_classes", None) is not None
    }


def _pack(row, folder: Path, manual) -> dict[str, list[str]]:
    """Writes an archive's images to `folder`/data; returns its class names."""
    kind, _, part = row.source.removeprefix("archive:").partition("/")
    found = next(Path(manual) / file for file in row.files if (Path(manual) / file).exists())
    names, examples = archives.READERS[kind](found, part)
    if len(names) != row.classes:
        raise UserError(f"{found}: has {len(names)} classes, expected {row.classes} for {row.name}")
    counts = write_records(folder / prepared.DATA, row.name, names, examples)
    expected = {split: count for split, count in row.counts.items() if count is not None}
    if wrong := [
        f"{split} has {counts.get(split, 0)}" for split in expected if counts.get(split, 0) != expected[split]
    ]:
        raise UserError(f"{found}: {', '.join(wrong)} images, expected {row.counts} for {row.name}")
    return {"label": names}


def write_records(folder: Path, name: str, class_names: list[str], examples: Iterable[tuple[str, bytes, int]]) -> dict:
    """Writes (split, encoded image, label) as TFDS's ArrayRecord, without TensorFlow; returns the counts of splits."""
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(names=class_names)}
    )
    records_of = ((split, {"image": io.BytesIO(data), "label": label}) for split, data, label in examples)
    return write_tfds(folder, name, features, records_of)


def write_tfds(folder: Path, name: str, features, examples: Iterable[tuple[str, dict]]) -> dict[str, int]:
    """Writes (split, example) of TFDS features as ArrayRecord; images must come encoded, as streams."""
    import tensorflow_datasets as tfds

    folder.mkdir(parents=True)
    identity = tfds.core.DatasetIdentity(
        name=name.replace("/", "_").replace("-", "_"),
        version=tfds.core.Version("1.0.0"),
        data_dir=str(folder),
        module_name=__name__,
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features)
    writer = tfds.core.SequentialWriter(
        ds_info=info, max_examples_per_shard=RECORDS_A_SHARD, file_format="array_record"
    )
    counts: dict[str, int] = {}
    for split, example in examples:
        if split not in counts:
            writer.initialize_splits([split], fail_if_exists=True)
        counts[split] = counts.get(split, 0) + 1
        writer.add_examples({split: [example]})
    writer.close_all()
    return counts


def write_index(row, folder: Path, names: dict[str, list[str]]) -> dict:
    """Looks at every record once: labels of all rows that the source serves, sizes; then writes the manifest."""
    import tensorflow_datasets as tfds

    data = folder / prepared.DATA
    rows = {other.label: other for other in protocols.sharing(row.source)}
    rows[row.label] = row
    splits = {split: info.num_examples for split, info in tfds.builder_from_directory(str(data)).info.splits.items()}
    arrays = {}
    for split, count in splits.items():
        held = records.RecordSplit(str(data), split, np.zeros(count, np.int64), row.scale)
        labels = {label: np.zeros(count, np.int32) for label in rows}
        sizes, lengths = np.zeros((count, 3), np.int32), np.zeros(count, np.int64)
        for place in range(count):
            features = held.record(place)

            def values(key, features=features):
                if key not in features:
                    return np.zeros(0, np.float32)
                found = features[key]
                return np.asarray(found.int64_list.value or found.float_list.value)

            for label, kept in labels.items():
                kept[place] = protocols.RULES[label](values) if label in protocols.RULES else values(label)[0]
            lengths[place] = len(features["image"].bytes_list.value[0])
            looked = decode.look(records.Packed(held, place), place)
            sizes[place] = (0, 0, 0) if isinstance(looked, str) else looked
        arrays |= {f"{split}/labels/{label}": kept for label, kept in labels.items()}
        arrays |= {f"{split}/sizes": sizes, f"{split}/bytes": lengths}
    class_names = {}
    for label, other in rows.items():
        class_names[label] = names.get(label) or [str(i) for i in range(other.classes)]
        used = {part for found in other.parts.values() for part, _, _ in found}
        highest = max(arrays[f"{split}/labels/{label}"].max(initial=0) for split in used if split in splits)
        if len(class_names[label]) != other.classes or highest >= other.classes:
            raise UserError(
                f"{row.source}: {label} has {max(len(class_names[label]), int(highest) + 1)} classes, expected "
                f"{other.classes} for {other.name}"
            )
    np.savez_compressed(folder / prepared.INDEX, **arrays)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": prepared.FORMAT,
        "name": row.name,
        "source": row.source,
        "serves": sorted(other.name for other in rows.values() for other in protocols.sharing(row.source) or [row]),
        "splits": splits,
        "class_names": class_names,
        "licence": row.licence,
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
    }
    manifest["serves"] = sorted(set(manifest["serves"]))
    write_json(folder / prepared.MANIFEST, manifest)
    return manifest


def _explain(row, error, manual) -> str:
    """One line for whatever a builder or an archive raised."""
    words = " ".join(str(error).split())[:300]
    line = f"{row.name} could not be prepared, and nothing was left behind: {type(error).__name__}: {words}"
    network = ("ConnectionError", "DownloadError", "MaxRetryError", "NonMatchingChecksumError", "Timeout", "HTTPError")
    if any(cls.__name__.startswith(network) for cls in type(error).__mro__):
        wanted = _downloads(row)
        line += f". Fetch {wanted} by other means into a folder and name it with --manual" if wanted else ""
    elif row.manual:
        line += f". It needs {row.manual}, whole, in --manual {manual}"
    return line


def _downloads(row) -> str:
    """The files that a builder downloads, with their sizes, as their publisher names them."""
    import tensorflow_datasets as tfds

    name = row.source.split(":")[1]
    with contextlib.suppress(Exception):  # a hint must not hide the error
        infos = tfds.builder_cls(name.partition("/")[0]).url_infos
        word = name.partition("/")[0].replace("_", "-")  # some modules list the files of several sets
        infos = {url: info for url, info in infos.items() if word in url} or infos
        shown = [f"{info.filename} ({info.size:,} bytes)" for info in infos.values()]
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        return f"{', '.join(shown[:5])}{more} from {next(iter(infos)).rpartition('/')[0]}"
    return ""
