"""Evaluates the best checkpoint of a run: accuracy, balanced accuracy, loss, per class, confusion matrix.

Example:
  python -m vitplast_jax.evaluate --workdir runs/quickstart --split test

Writes evaluation.json and the confusion matrix (CSV, PNG) to the run's folder. Every example counts once, whatever the
batch size or the number of devices.
"""

from vitplast_jax import command

FLAGS = (
    command.WORKDIR,
    command.Flag("split", "train, validation or test", default="test", value="SPLIT"),
    command.Flag("batch_size", "images at once; 0: the run's eval_batch_size", default=0, value="N"),
    *command.PROCESSES,
)


def main(flags):
    from vitplast_jax.training import processes

    processes.join(flags)
    import jax

    from vitplast_jax.training.evaluation import evaluate_run

    evaluation, class_names = evaluate_run(flags.workdir, split=flags.split, batch_size=flags.batch_size)
    if jax.process_index() == 0:
        report(evaluation, class_names, flags.workdir)


def report(evaluation: dict, class_names, workdir) -> None:
    """Prints the figures and writes evaluation.json, confusion.csv and confusion.png."""
    from vitplast_jax.files import as_path, write_json, write_text
    from vitplast_jax.reports import plots, tables

    folder, matrix = as_path(workdir), evaluation["confusion"]
    counts = [sum(row) for row in matrix]
    rows = [
        {"class": name, "images": counts[label], "accuracy": evaluation["per_class"][name]}
        for label, name in enumerate(class_names)
    ]
    print(tables.text_table(rows))
    confusion = [
        {"true": name} | dict(zip(class_names, matrix[label], strict=False)) for label, name in enumerate(class_names)
    ]
    write_json(folder / "evaluation.json", evaluation)
    write_text(folder / "confusion.csv", tables.csv_text(confusion))
    title = f"{evaluation['split']}: accuracy {evaluation['accuracy']:.2%}"
    plots.plot_confusion(
        [row[: len(class_names)] for row in matrix[: len(class_names)]], class_names, folder / "confusion.png", title
    )
    print(
        f"{evaluation['split']} accuracy {evaluation['accuracy']:.2%}, balanced {evaluation['balanced_accuracy']:.2%}, "
        f"loss {evaluation['loss']:.4f} on {evaluation['count']:,} images"
        + (f" ({len(evaluation['skipped'])} unreadable files skipped)" if evaluation["skipped"] else "")
    )
    print(f"wrote {folder}/evaluation.json, confusion.csv, confusion.png")


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
