"""What has been measured so far? Statistics of every block in constant memory; on disk, so that a kill costs seconds.

In: the rates of one tile of pairs after the other. Out: the statistics; with a folder also `measuring.npz`, from which
the same measurement goes on with the identical numbers, and on request `ratios.npz`, every single ratio. All processes
of a pod hold the same statistics; the first one writes, and all go on from what it wrote.
"""

import hashlib
import itertools
import json
import time
import zipfile
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from vitplast_jax import files, trees
from vitplast_jax.plasticity import rates
from vitplast_jax.plasticity.bounds import COMPONENTS
from vitplast_jax.training import processes

STATE, RATIOS = "measuring.npz", "ratios.npz"
# Pairs of components (indices) whose means are compared on the same pairs of images.
CONTRASTS = tuple(itertools.combinations(range(len(COMPONENTS)), 2))
_RAW_RATIOS = ".ratios.npy"
_SAVE_SECONDS = 10.0  # between two saves: what a kill may cost


class Stream:
    """The statistics of a measurement, tile by tile.

    Args:
      depth: number of blocks.
      places: indices (x, y) of the images that are compared.
      pairing, reference: decide the kind of statistics.
      folder: where the state is kept, None to keep none.
      key: identifies the measurement; a state of another one is ignored.
      ratios: keep every single ratio, in the folder.
    """

    def __init__(self, depth: int, places, *, pairing: str, reference: bool, folder, key: str, ratios: bool):
        self.places, self.pairing = places, pairing
        sizes = tuple(len(side) for side in places)

        def new_statistics(cells):
            if pairing == "all":
                return rates.AllPairsStatistics((len(cells),), *sizes)
            return rates.RateStatistics((len(cells),), reference=reference)

        self.by_block, self.overall = [new_statistics(COMPONENTS) for _ in range(depth)], new_statistics(COMPONENTS)
        self.contrasts = new_statistics(CONTRASTS)
        self.sigma, self.radius = np.full((depth, 2), np.inf), np.zeros(depth)
        self.tiles = 0
        self.folder = None if folder is None else files.as_path(folder)
        self._key, self._saved, self._writes = key, time.monotonic(), jax.process_index() == 0
        shape = (depth, len(COMPONENTS), *(sizes if pairing == "all" else sizes[:1]))
        self._ratios = None
        if self.folder is not None:
            kept = self._open_ratios(shape) if ratios and self._writes else None
            self._restore(needs_ratios=ratios and self._writes and kept is None)
            if ratios and self._writes:
                self._ratios = kept if self.tiles else self._new_ratios(shape)

    def add(self, tile: Sequence[tuple[np.ndarray, np.ndarray]], start: tuple[int, int]) -> None:
        """Adds a tile: for every block the rates and the distances of their inputs, [components, *pairs] each."""
        places = (start,) if self.pairing == "all" else ()
        total, shortest = 0.0, np.inf
        for index, (found, given) in enumerate(tile):
            self.by_block[index].update(found, given, *places)
            total, shortest = total + found.astype(np.float64), np.minimum(shortest, given)
            if self._ratios is not None:
                where = tuple(slice(s, s + size) for s, size in zip(start, found.shape[1:], strict=False))
                self._ratios[(index, slice(None), *where)] = found
        means = total / len(tile)
        self.overall.update(means, shortest, *places)
        first, second = np.transpose(CONTRASTS)
        self.contrasts.update(means[first] - means[second], np.minimum(shortest[first], shortest[second]), *places)
        self.tiles += 1
        if self.folder is not None and self._writes and time.monotonic() - self._saved > _SAVE_SECONDS:
            self.save()

    def see(self, index: int, domain: Mapping) -> None:
        """Widens the region that the inputs of a block come from: `domain` is that of a tile."""
        self.sigma[index] = np.minimum(self.sigma[index], [domain["ln1"][0], domain["ln2"][0]])
        self.radius[index] = max(self.radius[index], float(domain["mha"][1]))

    def save(self) -> None:
        """Puts the state on disk, at once."""
        if self._ratios is not None:
            self._ratios.flush()  # what the state counts must be there
        arrays = {"key": np.asarray(self._key), "tiles": np.asarray(self.tiles)}
        arrays |= {"sigma": self.sigma, "radius": self.radius}
        for name, statistics in self._statistics().items():
            arrays |= {f"{name}/{field}": value for field, value in statistics.state().items()}
        with files.replacing(self.folder / STATE) as file:
            np.savez_compressed(file, **arrays)
        self._saved = time.monotonic()

    def finish(self) -> None:
        """Writes `ratios.npz`, if it was asked for, and removes the state."""
        if self.folder is None:
            return
        if self._ratios is not None:
            self._ratios.flush()
            self._ratios = None
            _write_ratios(self.folder, self.places)
        if self._writes:
            (self.folder / STATE).unlink(missing_ok=True)
        processes.gather(0)  # what the first process wrote is there for all

    def _statistics(self) -> dict[str, rates.RateStatistics]:
        by_block = {str(index): statistics for index, statistics in enumerate(self.by_block)}
        return by_block | {"overall": self.overall, "contrasts": self.contrasts}

    def _restore(self, needs_ratios: bool) -> None:
        """Takes over the state of an earlier start, if all processes find it (and the ratios that it counts)."""
        arrays = {} if needs_ratios else self._read()
        tiles = int(arrays.get("tiles", 0))
        if (processes.gather(tiles) != tiles).any() or not tiles:
            return
        for name, statistics in self._statistics().items():
            fields = {path.partition("/")[2]: value for path, value in arrays.items() if path.startswith(f"{name}/")}
            statistics.restore(fields)
        self.sigma, self.radius, self.tiles = arrays["sigma"], arrays["radius"], int(arrays["tiles"])

    def _read(self) -> dict[str, np.ndarray]:
        """The state on disk, if it is this measurement's."""
        try:
            with (self.folder / STATE).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                return {name: file[name] for name in file.files} if str(file["key"]) == self._key else {}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return {}  # none, or a damaged one: measured anew

    def _open_ratios(self, shape):
        """The ratios of an earlier start, None where there are none of this shape."""
        try:
            kept = np.lib.format.open_memmap(files.on_disk(self.folder) / _RAW_RATIOS, mode="r+")
        except (OSError, ValueError):
            return None
        return kept if kept.shape == shape else None

    def _new_ratios(self, shape):
        raw = files.on_disk(self.folder) / _RAW_RATIOS
        return np.lib.format.open_memmap(raw, mode="w+", dtype=np.float32, shape=shape)


def _write_ratios(folder, places) -> None:
    """An npz is a zip of npy files, so the large one is copied into it without being read as a whole."""
    raw = files.on_disk(folder) / _RAW_RATIOS
    with files.replacing(folder / RATIOS) as file, zipfile.ZipFile(file, "w") as archive:
        archive.write(raw, "ratios.npy")
        for name, value in (("components", COMPONENTS), ("images_x", places[0]), ("images_y", places[1])):
            with archive.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.asarray(value), allow_pickle=False)
    raw.unlink()


def identify(settings: Mapping, params: Mapping, places, fingerprints: Sequence[str]) -> str:
    """A hash of everything that decides the numbers of a measurement: settings, weights, images, pairs, versions."""
    digest = hashlib.sha256(json.dumps([settings, fingerprints, jax.__version__], default=str).encode())
    for side in places:
        digest.update(np.ascontiguousarray(side, "<i8"))
    for path, leaf in sorted(trees.flatten(params).items()):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()
