"""Measures the plasticity of every component of every block, its bounds, and recommends what to train.

Example:
  python -m vitplast_jax.measure --config configs/quickstart.py --workdir runs/measure
  python -m vitplast_jax.measure --run runs/quickstart --workdir runs/after         (that run's best checkpoint)

Compares images of the pretraining data (config.measure.x_name; else the sample shipped with the weights) with the test
split of config.data. Prints the table and the ranking; writes plasticity.json, plasticity.csv and plasticity.png.
"""

from vitplast_jax import command

FLAGS = (
    command.Flag("config", "config file; :ARG is passed to its get_config", value="configs/X.py[:ARG]"),
    command.Flag("run", "measure this run's best checkpoint instead of a config's start", value="DIR"),
    command.Flag("workdir", "folder for the results", value="DIR", required=True),
)


def main(flags):
    if bool(flags.config) == bool(flags.run):
        raise command.UsageError(
            "give either --config FILE (the weights it starts from) or --run DIR (what it trained)"
        )
    _check_writable(flags.workdir)
    result = measure_config(flags.config) if flags.config else measure_run(flags.run, flags.overrides)
    save(result, flags.workdir)


def measure_config(config) -> dict:
    """The plasticity of the weights that a config starts from."""
    from vitplast_jax import models
    from vitplast_jax.training import config as settings
    from vitplast_jax.training.start import load_start

    if config.peft.method:  # its start is that of the base weights
        described = config.to_dict()
        config = settings.validate({**described, "trainable": ("all",), "peft": {}})
    downstream = _downstream(config)
    start = load_start(config, downstream.class_names)
    return _measure(models.build(start.spec, start.params), config, downstream)


def measure_run(folder, overrides=()) -> dict:
    """The plasticity of a run's best checkpoint, with the data of its config; ``overrides`` may set ``measure.*``."""
    from vitplast_jax import peft
    from vitplast_jax.training import config as settings
    from vitplast_jax.training.run import load_run

    run = load_run(folder)
    config = run.config.to_dict()
    for key, value in overrides:
        group, _, name = key.partition(".")
        if group != "measure":
            raise command.UsageError(f"--config.{key}: with --run only config.measure.* may be set")
        config["measure"] = {**config["measure"], name: settings.read(key, value)}
    config = settings.validate(config)
    # The bounds are those of plain kernels, so what can be merged is.
    return _measure(peft.merge(run.model), config, _downstream(config))


def save(result: dict, workdir) -> None:
    """Prints a result and writes its three files."""
    from pathlib import Path

    from vitplast_jax.errors import UserError
    from vitplast_jax.files import write_json, write_text
    from vitplast_jax.plasticity.select import trainable_line
    from vitplast_jax.reports import plots, tables

    print(describe(result))
    print(f"\n{tables.plasticity_table(result)}\n")
    for note in (result["notes"].get(key) for key in ("pairs", "excluded_pairs")):
        if note:
            print(f"note: {note}")
    print(f"recommendation: {trainable_line(result['recommendation'])}")
    print(f"  {result['recommendation']['reason']}")
    folder = Path(workdir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plasticity.json", result)
        write_text(folder / "plasticity.csv", tables.csv_text(result["rows"]))
        plots.plot_plasticity(result, folder / "plasticity.png")
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be written ({error.strerror}); name another folder") from None
    print(f"wrote {folder}/plasticity.json, plasticity.csv, plasticity.png")


def describe(result: dict) -> str:
    """One line: what was compared with what."""
    images = f"{result['images_x']} pretraining images, {result['images_y']} downstream images"
    return (
        f"{result['model']}: {result['pairs']:,} {result['pairing']} pairs ({images}), "
        f"protocol={result['protocol']}, inputs={result['inputs']}"
    )


def _check_writable(workdir) -> None:
    """Says before the measurement, not after it, that its results could not be kept."""
    import os
    from pathlib import Path

    from vitplast_jax.errors import UserError

    folder = Path(workdir).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "cannot be written" if existing.is_dir() else "is a file"
        raise UserError(f"--workdir {workdir}: {existing} {reason}; name another folder")


def _measure(model, config, downstream) -> dict:
    import jax.numpy as jnp

    from vitplast_jax import models, trees
    from vitplast_jax.plasticity import measure

    settings = config.measure
    params = trees.map_paths(lambda _, leaf: jnp.asarray(leaf, jnp.float32), models.parameters(model))
    return measure(
        models.with_parameters(model, params),
        _pretraining(config),
        downstream,
        protocol=settings.protocol,
        inputs=settings.inputs,
        pairing=settings.pairing,
        pairs=settings.pairs,
        images=settings.images,
        batch_size=settings.batch_size,
        seed=config.seed,
        progress=True,
    )


def _downstream(config):
    from vitplast_jax.errors import UserError
    from vitplast_jax.training import inputs

    data = config.data
    source = inputs.load_split(config, "test")
    if source is None:
        raise UserError(f"config.data: {data.name} {data.path} has no test split, whose images are compared")
    return source


def _pretraining(config):
    """Images of the pretraining data: a source, or the sample that ships beside the weights (NAME.sample.npz)."""
    import os

    from vitplast_jax.data import decode, sources
    from vitplast_jax.errors import UserError

    settings = config.measure
    if settings.x_name:
        source = sources.load(settings.x_name, settings.x_path or None, "train", validation=0)
        return decode.check(source, config.data.unreadable, config.data.threads)
    hint = "say which pretraining images to compare with: --config.measure.x_name=NAME --config.measure.x_path=PATH"
    if not config.weights:
        raise UserError(f"config.weights is empty, so no sample of pretraining images comes with them; {hint}")
    from vitplast_jax.weights.convert import resolve

    path = os.fspath(resolve(config.weights))
    sample = os.path.splitext(path)[0] + ".sample.npz"
    if not os.path.isfile(sample):
        raise UserError(f"{config.weights} ships no sample of its pretraining images ({sample}); {hint}")
    return _read_sample(sample)


def _read_sample(path: str):
    import zipfile

    import numpy as np

    from vitplast_jax.errors import UserError

    try:
        with np.load(path, allow_pickle=False) as arrays:
            images = arrays["images"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not an npz with an array 'images' ({error}); install vitplast_jax again") from None
    return images


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
