"""Measures the plasticity of every component of every block, its bounds, and recommends what to train.

Example:
  python -m vitplast_jax.measure --config configs/quickstart.py --workdir runs/measure
  python -m vitplast_jax.measure --run runs/quickstart --workdir runs/after         (before and after that run)

Compares images of the pretraining data (config.measure.x_name; else the sample shipped with the weights) with the test
split of config.data; config.measure.distribution and config.measure.split take others. Prints the table, the costs and
the recommendation under config.budget; writes plasticity.json, plasticity.csv and plasticity.png. The same command goes
on with a measurement that was stopped. --config.measure.gradients=True adds the norms of the loss gradients,
--config.measure.ratios=True every single ratio (ratios.npz), --config.measure.sizes=56 rates and bounds at that size.

GPT-2 is measured on two text files, one text a line:
  python -m vitplast_jax.measure --config configs/gpt2.py --workdir runs/gpt2 --config.weights=FOLDER
      --config.measure.x_path=FILE --config.data.path=FILE
"""

from vitplast_jax import command

FLAGS = (
    command.Flag("config", "config file; :ARG is passed to its get_config", value="configs/X.py[:ARG]"),
    command.Flag("run", "measure this run's best checkpoint, and what it started from", value="DIR"),
    command.Flag("workdir", "folder for the results", value="DIR", required=True),
    *command.PROCESSES,
)


def main(flags):
    if bool(flags.config) == bool(flags.run):
        raise command.UsageError(
            "give either --config FILE (the weights it starts from) or --run DIR (what it trained)"
        )
    for key, _ in flags.overrides if flags.run else ():
        if key.partition(".")[0] not in ("measure", "budget"):
            raise command.UsageError(f"--config.{key}: with --run only config.measure.* and budget.* may be set")
    from vitplast_jax import files
    from vitplast_jax.training import processes

    files.check_writable(flags.workdir, "--workdir")

    processes.join(flags)
    processes.check_shared(flags.workdir, "--workdir")
    import jax

    from vitplast_jax.plasticity import experiments
    from vitplast_jax.reports import plasticity

    if flags.config:
        result = experiments.measure_config(flags.config, flags.workdir)
    else:
        result = experiments.measure_run(flags.run, flags.overrides, flags.workdir)
    if jax.process_index():
        return
    print(plasticity.describe(result))
    names = plasticity.save(result, flags.workdir)
    print(f"wrote {flags.workdir}/{', '.join(names)}")


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
