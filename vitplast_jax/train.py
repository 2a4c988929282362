"""Finetunes (or pretrains) a Vision Transformer: trains the components that `trainable` names, keeps the rest frozen.

Example:
  python -m vitplast_jax.train --config configs/quickstart.py --workdir runs/quickstart --config.trainable=mha,fc1@0-2

--config.trainable=auto measures the plasticity first and trains what it recommends under config.budget.{params,flops}.

The same command continues a run that was stopped; SIGTERM lets it save at the next step and exit with status 143. The
folder then holds config.json, metrics.jsonl, results.json, the curves as a PNG, and checkpoints/ (latest and best).
"""

from vitplast_jax import command

FLAGS = (
    command.CONFIG,
    command.WORKDIR,
    command.Flag("overwrite", "discard the run that the workdir holds", default=False),
    *command.PROCESSES,
)


def main(flags):
    from vitplast_jax.training import processes

    processes.join(flags)
    config, chosen = flags.config, None
    if "auto" in config.trainable:
        config, chosen = choose(config, flags.workdir, flags.overwrite)

    from vitplast_jax.training.loop import train_and_evaluate

    results = train_and_evaluate(config, flags.workdir, overwrite=flags.overwrite, chosen=chosen)
    report(results, flags.workdir)


def choose(config, workdir, overwrite: bool):
    """Measures and says what to train, once a run -> (config that names it, record of the choice)."""
    import jax

    from vitplast_jax.plasticity import experiments
    from vitplast_jax.reports import plasticity

    config, chosen, result = experiments.resolve_auto(config, workdir, overwrite)
    if result is not None and jax.process_index() == 0:
        print(plasticity.describe(result))
        plasticity.save(result, workdir)
    return config, chosen


def report(results: dict, workdir) -> None:
    """Draws the curves and prints the summary line."""
    import jax

    from vitplast_jax.files import as_path
    from vitplast_jax.reports import plots

    if jax.process_index():
        return
    folder, counted = as_path(workdir), results["parameters"]
    trained = ", ".join(results["trainable"])
    plots.plot_curves(
        folder / "metrics.jsonl", folder / "curves.png", title=f"{results['protocol']['data']}: {trained}"
    )
    split = "test" if results["test"] else "validation"
    measured = (
        f"{split} accuracy {results[split]['accuracy']:.2%} on {results[split]['count']:,} images"
        if results[split]
        else "no test or validation data"
    )
    print(
        f"{measured} (step {results['best_step']}); trained {trained}: "
        f"{counted['trainable']:,} of {counted['total']:,} parameters in {results['seconds']:.0f} s"
    )
    print(f"wrote {folder}/results.json, metrics.jsonl, curves.png, checkpoints/")


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
