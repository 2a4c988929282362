"""Linear probing: what the features of the weights that a config starts from, or of a run, tell about its classes.

Example:
  python -m vitplast_jax.probe --config configs/quickstart.py --workdir runs/probe
  python -m vitplast_jax.probe --run runs/quickstart --workdir runs/probe_after     (its best checkpoint, on its data)

A logistic regression on pooled features, after each component of each block, averaged over all tokens and of the class
token; --config.probe.places=last takes the paper's place alone: the output of the last block before the final norm,
averaged over all tokens. Writes probe.json, probe.csv, probe.md and probe.png.
"""

from vitplast_jax import command

FLAGS = (
    command.Flag("config", "config file; :ARG is passed to its get_config", value="configs/X.py[:ARG]"),
    command.Flag("run", "probe this run's best checkpoint", value="DIR"),
    command.WORKDIR,
    *command.PROCESSES,
)


def main(flags):
    if bool(flags.config) == bool(flags.run):
        raise command.UsageError("give either --config FILE (the weights it starts from) or --run DIR (its result)")
    for key, _ in flags.overrides if flags.run else ():
        if key.partition(".")[0] != "probe":
            raise command.UsageError(f"--config.{key}: with --run only config.probe.* may be set")
    from vitplast_jax.training import processes

    processes.join(flags)
    from vitplast_jax.training import probing

    report(probing.probe_run(flags.run, flags.overrides) if flags.run else probing.probe(flags.config), flags.workdir)


def report(result: dict, workdir) -> None:
    """Prints the table and writes the files of a probe."""
    import jax

    from vitplast_jax.errors import UserError
    from vitplast_jax.files import as_path, write_json, write_text
    from vitplast_jax.reports import paper, plots, tables

    if jax.process_index():
        return
    folder, rows = as_path(workdir), result["rows"]
    # The paper probes pretrained weights, so nothing of it stands beside a run.
    reported = None if "run" in result else (paper.accuracy(result["protocol"]["data"]) or {}).get("probe")
    result = {**result, "paper": reported}
    try:
        write_json(folder / "probe.json", result)
        write_text(folder / "probe.csv", tables.csv_text(rows))
        write_text(folder / "probe.md", tables.markdown_table(rows))
        plots.plot_probe(result, folder / "probe.png")
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be written ({error.strerror}); name another folder") from None
    print(tables.text_table(rows, [name for name in rows[0] if name not in ("width", "iterations", "converged")]))
    slow = sum(not row["converged"] for row in rows)
    if slow:
        print(f"note: {slow} of {len(rows)} classifiers had not converged ({result['protocol']['classifier']})")
    measured = [f"{s} accuracy {result[s]['accuracy']:.2%}" for s in ("test", "validation") if result[s]]
    beside = "" if reported is None else f" (paper: {reported:.2%}, {paper.SOURCE})"
    print(f"last block, mean over tokens: {', '.join(measured)}{beside}")
    print(f"wrote {folder}/probe.json, probe.csv, probe.md, probe.png")


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
