"""Where arrays live: the device mesh, and the rules from parameter paths to shardings.

In: the number of devices along each mesh axis, trees of parameters. Out: a mesh and trees of ``NamedSharding``.
The batch is divided over both axes; parameters are divided over ``fsdp`` where a rule says so, else replicated.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vitplast_jax import trees
from vitplast_jax.errors import UserError

AXES = ("data", "fsdp")

# The first pattern that matches a whole path decides. The wide axis of a kernel is the one that is divided.
RULES = (
    (r"(.+/)?(qkv|gate|fc1)/kernel", P(None, "fsdp")),
    (r"(.+/)?(out|fc2)/kernel", P("fsdp", None)),
    (r".*", P()),
)


def make_mesh(data: int = -1, fsdp: int = 1, devices: Sequence | None = None) -> jax.sharding.Mesh:
    """A mesh with the axes ``data`` and ``fsdp`` over all devices of the run; ``data=-1`` takes what fsdp leaves.

    Over several slices of TPUs the data axis goes across them, so that only its sums leave a slice.

    Args:
      data, fsdp: devices along each axis.
      devices: those of the run by default; a rehearsal gives those of a machine that is not there.
    Raises:
      UserError: the axes do not multiply to a number of devices that is there, or cannot be cut into the slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    available = len(devices)
    if data == -1:
        data = available // fsdp
    if data < 1 or data * fsdp > available:
        raise UserError(
            f"mesh.data={data} x mesh.fsdp={fsdp} needs {max(data, 1) * fsdp} devices, there are {available}"
        )
    if data * fsdp < available and jax.process_count() > 1:
        raise UserError(f"mesh.data={data} x mesh.fsdp={fsdp} leaves devices idle: {available} are there, use them all")
    # Auto lets the compiler propagate shardings; jax.make_mesh's default, Explicit, refuses the model's reshapes.
    axis_types = (AxisType.Auto,) * len(AXES)
    slices: dict[int, list] = {}
    for device in devices[: data * fsdp]:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    shape = data // len(slices), fsdp
    if {len(group) for group in slices.values()} != {shape[0] * fsdp}:
        raise UserError(f"mesh.fsdp={fsdp} reaches across {len(slices)} slices; it must fit into one")
    parts = [_in_order(shape, axis_types, group) for group in slices.values()]
    return jax.sharding.Mesh(np.concatenate(parts), AXES, axis_types=axis_types)


def _in_order(shape: tuple[int, int], axis_types, devices: list) -> np.ndarray:
    """The devices of one slice along the axes: by the wiring of the chips, as long as each process's stay together.

    For a process holds the rows of a batch that are next to each other (decision 7: where a row is decides its draws).
    """
    wired = jax.make_mesh(shape, AXES, axis_types=axis_types, devices=devices).devices
    owners = [device.process_index for device in wired.flat]
    if owners == sorted(owners):
        return wired
    return np.asarray(sorted(devices, key=lambda device: (device.process_index, device.id))).reshape(shape)


def replicated(mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch(mesh) -> NamedSharding:
    """Rows of a batch over every device."""
    return NamedSharding(mesh, P(AXES))


def mean_over_devices(mesh, function: Callable) -> Callable:
    """``function(trainable, frozen, *rows)`` of each device's own rows, its results averaged over the devices.

    Both trees of parameters must be whole on every device.
    """

    def averaged(trainable, frozen, *rows):
        def own(*arguments):
            return jax.lax.pmean(function(*arguments), AXES)

        places = (P(), P(), *[P(AXES)] * len(rows))
        return jax.shard_map(own, mesh=mesh, in_specs=places, out_specs=P(), check_vma=False)(trainable, frozen, *rows)

    return averaged


def parameters(mesh, tree: Mapping) -> trees.Tree:
    """A sharding for each parameter; an axis that ``fsdp`` does not divide stays whole."""
    return trees.map_paths(lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh.shape["fsdp"])), tree)


def put(mesh, tree: Mapping, dtype_of: Callable[[str], str]) -> trees.Tree:
    """Arrays of the host (views of a mapped file, say), each to its own place and dtype, one after the other.

    So the host never holds a second copy of the whole, and no device more than its share.

    Args:
      mesh: where :func:`parameters` places them.
      dtype_of: the dtype of a path.
    """
    places = trees.flatten(parameters(mesh, tree))

    def place(path, leaf):
        return jax.device_put(np.asarray(leaf).astype(dtype_of(path), copy=False), places[path])

    return trees.map_paths(place, tree)


def _spec(path: str, shape: tuple[int, ...], fsdp: int) -> P:
    spec = next(spec for pattern, spec in RULES if re.fullmatch(pattern, path))
    fits = all(axis is None or size % fsdp == 0 for axis, size in zip(spec, shape, strict=False))
    return spec if fits else P()


def like(mesh, abstract, params: Mapping):
    """Shardings for a pytree (an optimizer state) whose sub-trees may mirror the tree of parameters.

    A leaf takes the sharding of the parameter whose path ends its own and whose shape it has; all others, such as
    counters, are replicated.
    """
    by_path = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            trees.flatten(params).items(), trees.flatten(parameters(mesh, params)).values(), strict=True
        )
    }

    def place(path, leaf):
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        for start in range(len(keys)):
            shape, sharding = by_path.get("/".join(keys[start:]), (None, None))
            if shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, abstract)
