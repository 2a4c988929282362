"""How large is the loss gradient of each component, and of what it is given, and does it follow the plasticity?

In: a model with its head, labelled downstream images. Out: norms by block and component, and their rank agreement with
the plasticity. The paper's claim that plasticity permits larger gradients (arXiv 2602.06883), tested.

  grad_norm        norm of the gradient, of a batch's mean loss, by all parameters of one component of one block
  input_grad_norm  Frobenius norm of the gradient of an image's loss by that component's input [n, d], in its place in
                   the forward pass (FC1's and FC2's are those of the natural inputs)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vitplast_jax import components, models, sharding, trees
from vitplast_jax.errors import UserError
from vitplast_jax.plasticity import agreement, block_pass, rates
from vitplast_jax.plasticity import pairs as pairing_rules
from vitplast_jax.plasticity.bounds import COMPONENTS
from vitplast_jax.training.step import cross_entropy

# Where a block keeps the module of a component; of a gated MLP the up projection, as in the bounds.
_MODULES = {
    "ln1": ("norm1",),
    "mha": ("attn",),
    "ln2": ("norm2",),
    "fc1": ("mlp", "fc1"),
    "fc2": ("mlp", "fc2"),
}


@jax.custom_vjp
def _watch(x, probe):
    """Returns x [b, ...]; the "gradient" by `probe` [b] is the squared norm of the gradient by each x[i]."""
    return x


def _watch_backward(_, gradient):
    squares = jnp.square(gradient.astype(jnp.float32))
    return gradient, squares.sum(tuple(range(1, gradient.ndim)))


_watch.defvjp(lambda x, probe: (x, None), _watch_backward)


class _Watched:
    """A module whose input is watched; in everything else the module itself."""

    def __init__(self, module, probe):
        self._module, self._probe = module, probe

    def __call__(self, x, *args, **options):
        return self._module(_watch(x, self._probe), *args, **options)

    def __getattr__(self, name):
        return getattr(self._module, name)


def _watch_block(block, probes) -> None:
    """Puts a watch before every component of a block."""
    for component, probe in probes.items():
        *above, name = _MODULES[component]
        owner = functools.reduce(getattr, above, block)
        vars(owner)[name] = _Watched(getattr(owner, name), probe)  # past the module's own bookkeeping


@functools.lru_cache(maxsize=4)
def make_gradient_pass(template: block_pass.Template, prepare: pairing_rules.Prepare, mesh):
    """Compiles (params, images, places, labels) -> (loss, grad norms [blocks, components], input norms
    [blocks, components, b]) of one batch."""

    def norms(params, images, places, labels):
        depth, count = len(params["blocks"]), labels.shape[0]

        def mean_loss(blocks, probes):
            model = models.with_parameters(template.module, {**params, "blocks": blocks})
            for index in range(depth):
                _watch_block(model.blocks[index], probes[index])
            return cross_entropy(model(prepare(images, places)), labels).mean()

        probes = {index: {name: jnp.zeros(count) for name in COMPONENTS} for index in range(depth)}
        loss, (grads, squares) = jax.value_and_grad(mean_loss, argnums=(0, 1))(params["blocks"], probes)
        sums = {(index, name): jnp.zeros(()) for index in range(depth) for name in COMPONENTS}
        for path, leaf in trees.flatten(grads, "blocks").items():
            component, block = components.locate(path)
            if (block, component) in sums:
                sums[block, component] += jnp.square(leaf.astype(jnp.float32)).sum()
        by_component = jnp.stack([jnp.stack([sums[index, name] for name in COMPONENTS]) for index in range(depth)])
        by_input = jnp.stack([jnp.stack([squares[index][name] for name in COMPONENTS]) for index in range(depth)])
        return loss, jnp.sqrt(by_component), count * jnp.sqrt(by_input)  # of the mean loss -> of each image's

    return jax.jit(norms, out_shardings=sharding.replicated(mesh))


def measure_gradients(model, data, *, images: int = 0, batch_size: int = 64, seed: int = 0, mesh=None) -> dict:
    """Norms of the loss gradients of every component of every block on downstream images.

    Args:
      model: a ViT whose head has the data's classes.
      data: a Source with labels.
      images: at most so many, drawn without replacement; 0: all. Whole batches only.
      batch_size: images of one gradient: it decides `grad_norm`.
      seed: of the draw.
      mesh: as in :func:`vitplast_jax.plasticity.measure`.
    Returns:
      {images, batch_size, batches, loss, rows: [{block, component, grad_norm, grad_norm_low, grad_norm_high,
      input_grad_norm, input_grad_norm_low, input_grad_norm_high}]}: means over batches and over images with their 95 %
      intervals; of a single batch None.
    """
    spec = model.spec
    mesh = sharding.make_mesh(1) if mesh is None else mesh
    side = pairing_rules.open_images(data, spec, spec.preprocessing, "y")
    if side.labels is None or not spec.num_classes:
        raise UserError("loss gradients need labelled images and a model with a head")
    if int(side.labels.max()) >= spec.num_classes:
        raise UserError(f"label {int(side.labels.max())} does not exist: {spec.name} has {spec.num_classes} classes")
    most = min(side.count, images or side.count)
    batch_size = min(batch_size, most) // mesh.size * mesh.size
    if not batch_size:
        raise UserError(f"{most} images cannot be shared by {mesh.size} devices; give more, or set config.mesh.data=1")
    order = np.random.default_rng([seed, 4]).permutation(side.count)[: most // batch_size * batch_size]
    run = make_gradient_pass(block_pass.make_template(model), side.prepare, mesh)
    params = jax.device_put(models.parameters(model), sharding.replicated(mesh))
    losses, weights, inputs = [], [], []
    with jax.default_matmul_precision("highest"):
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            batch = (side.read(places), places.astype(np.int32), side.labels[places])
            batch = [jax.make_array_from_callback(a.shape, sharding.batch(mesh), a.__getitem__) for a in batch]
            loss, by_component, by_input = run(params, *batch)
            losses.append(float(loss))
            weights.append(np.asarray(by_component, np.float64))
            inputs.append(np.asarray(by_input, np.float64))
    weights, inputs = np.stack(weights, -1), np.concatenate(inputs, -1)
    if not (np.isfinite(weights).all() and np.isfinite(inputs).all()):
        raise UserError("a loss gradient is NaN or infinite; check the weights and the images")
    columns = {"grad_norm": _mean_and_interval(weights), "input_grad_norm": _mean_and_interval(inputs)}
    rows = [
        {"block": b, "component": name}
        | {
            f"{field}{end}": None if np.isnan(values[b, k]) else float(values[b, k])
            for field, triple in columns.items()
            for end, values in zip(("", "_low", "_high"), triple, strict=True)
        }
        for b in range(weights.shape[0])
        for k, name in enumerate(COMPONENTS)
    ]
    return {
        "images": len(order),
        "batch_size": batch_size,
        "batches": len(losses),
        "loss": float(np.mean(losses)),
        "rows": rows,
    }


def _mean_and_interval(values: np.ndarray):
    """(mean, low, high) over the last axis."""
    count, mean = values.shape[-1], values.mean(-1)
    std = values.std(-1, ddof=1) if count > 1 else np.full(mean.shape, np.nan)
    return mean, *rates.matched_interval(mean, std, count)


def add_gradients(result: dict, gradients: dict, split: str) -> dict:
    """A plasticity result with the gradients and their rank agreement with the plasticity."""
    found = {(row["block"], row["component"]): row for row in gradients["rows"]}
    rows = [row | {"grad_norm": found[row["block"], row["component"]]["grad_norm"]} for row in result["rows"]]
    blocks = 1 + max(row["block"] for row in rows)

    def table(entries, field):
        return np.array([entry[field] for entry in entries]).reshape(blocks, -1)

    plasticity = table(rows, "mean")
    agreements = {
        field: agreement.rank_agreement(plasticity, table(gradients["rows"], field))
        for field in ("grad_norm", "input_grad_norm")
    }
    notes = result["notes"] | {
        "grad_norm": f"of the loss on {gradients['images']} images of the {split} split, by batches of "
        f"{gradients['batch_size']}; in a model whose head is new it depends on the head's draw"
    }
    return result | {
        "rows": rows,
        "gradients": {"split": split, **gradients, "agreement": agreements},
        "notes": notes,
    }
