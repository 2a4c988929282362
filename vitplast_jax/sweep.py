"""Runs a grid of runs, one after another: every combination of the values that config.sweep names.

Example:
  python -m vitplast_jax.sweep --config configs/quickstart_sweep.py --workdir runs/sweep
  python -m vitplast_jax.sweep --config configs/quickstart.py --workdir runs/rates
      --config.sweep="trainable=mha|ln1,ln2|all,learning_rate=1e-3|3e-3,seed=0|1"

The same command continues a sweep that was stopped: finished runs are kept, an interrupted one goes on, failed ones are
tried again. The folder then holds cells/ (an ordinary run folder each), sweep.json (the state of every cell), table.csv
and table.md (mean and spread over seeds at the learning rate that validation chose, tests, and how plasticity, gradient
norm and accuracy agree), cells.csv, summary.json, sweep.png, and plasticity/ of each task.
"""

from vitplast_jax import command

FLAGS = (
    command.CONFIG,
    command.WORKDIR,
    command.Flag("plasticity", "measure the plasticity of each task's start as well", default=True),
    *command.PROCESSES,
)


def main(flags):
    from vitplast_jax.errors import UserError
    from vitplast_jax.files import as_path
    from vitplast_jax.training import processes

    processes.join(flags)
    from vitplast_jax.training import grid
    from vitplast_jax.training.shared import Shared

    cells, shared = grid.make_cells(flags.config), Shared()
    grid.check_starts(cells, shared)
    folder = as_path(flags.workdir)
    failed = train_cells(cells, folder, shared)
    if flags.plasticity:
        measure_tasks(cells, folder)
    report(folder)
    if failed:
        raise UserError(f"{len(failed)} of {len(cells)} runs failed, first {failed[0]}; the same command tries again")


def train_cells(cells, folder, shared) -> list[str]:
    """Runs the cells with a progress bar and one line each; returns a line for each that failed."""
    import sys

    import jax
    from tqdm import tqdm

    from vitplast_jax.training import grid

    failed, before = [], 0
    first = jax.process_index() == 0
    with tqdm(total=len(cells), unit="run", desc="sweep", dynamic_ncols=True, disable=None if first else True) as bar:
        for number, outcome in enumerate(grid.run_cells(cells, folder, shared), start=1):
            name, results = outcome.cell.name, outcome.results
            bar.update()
            before += outcome.before
            if outcome.error is not None:
                failed.append(f"{name}: {outcome.error}")
                tqdm.write(f"failed: {failed[-1]}", file=sys.stderr)
            elif not outcome.before and first:
                splits = [
                    f"{split} {results[split]['accuracy']:.4f}" for split in ("validation", "test") if results[split]
                ]
                tqdm.write(f"{number}/{len(cells)} {name}: {', '.join(splits)} ({outcome.seconds:.1f} s)")
    if before and first:
        print(f"{before} of {len(cells)} runs had been finished before")
    return failed


def measure_tasks(cells, folder) -> None:
    """Measures the plasticity of each task's start, unless that is done; says where it cannot be."""
    import sys

    import jax

    from vitplast_jax.errors import UserError
    from vitplast_jax.plasticity import experiments
    from vitplast_jax.reports import collect, plasticity
    from vitplast_jax.training import grid

    tasks, starts = collect.task_keys(cells[0].values), {}
    for cell in cells:
        named = {key: grid.text_of(value) if isinstance(value, tuple) else value for key, value in cell.values.items()}
        starts.setdefault(collect.task_name(named, tasks), cell.config)
    for name, config in starts.items():
        place = folder / "plasticity" / name
        if (place / "plasticity.json").exists():
            continue
        try:
            result = experiments.measure_config(config, place)
            if jax.process_index() == 0:
                plasticity.save(result, place)
        except UserError as error:
            print(f"note: plasticity was not measured: {error}", file=sys.stderr)


def report(folder) -> None:
    """Writes the tables and prints the main one."""
    import jax

    from vitplast_jax.reports import collect

    if jax.process_index():
        return
    summary = collect.summarise(folder)
    names = collect.save(summary, folder)
    if summary["groups"]:
        print(collect.text(summary))
    for row in summary["agreement"]:
        if row["spearman"] is not None and row["spearman_low"] is not None:
            print(
                f"{row['task']}: {row['of']} with {row['with']}: Spearman {row['spearman']:.2f} "
                f"(95 % {row['spearman_low']:.2f} to {row['spearman_high']:.2f}, {row['items']} components)"
            )
    print(f"wrote {folder}/{', '.join(names)}")


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
