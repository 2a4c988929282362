"""Reports what a run, a sweep, or a folder of runs found: tables, figures, and one HTML page that needs nothing else.

Example:
  python -m vitplast_jax.report --workdir runs/sweep
  python -m vitplast_jax.report --workdir runs/quickstart

Of a run: report.html, report.md, report.csv, curves.png. Of a sweep, or a folder whose subfolders are runs:
report.html, table.csv and table.md (each configuration at the learning rate that validation chose, tests between
configurations, rank agreement), cells.csv, summary.json, sweep.png. The paper's numbers stand beside ours where it has
the data set.
"""

from vitplast_jax import command

FLAGS = (command.WORKDIR,)


def main(flags):
    from vitplast_jax.reports import overview

    names = overview.write_report(flags.workdir)
    print(f"wrote {flags.workdir}/{', '.join(names)}")


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
