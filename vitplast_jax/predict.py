"""Names what is on images: the best checkpoint of a run on a file or on a folder with all its subfolders.

Example:
  python -m vitplast_jax.predict --workdir runs/mine --images photos/ --output predictions.csv

One line an image: file, class name, probability, and the five likeliest classes. Images are decoded and resized as in
evaluation; files that cannot be read are listed.
"""

from vitplast_jax import command

FLAGS = (
    command.WORKDIR,
    command.Flag("images", "an image file, or a folder", value="PATH", required=True),
    command.Flag("output", "CSV file to write; empty: print", value="FILE.csv"),
)


def main(flags):
    from vitplast_jax.errors import UserError
    from vitplast_jax.files import as_path
    from vitplast_jax.training.evaluation import predict_images

    if flags.output and as_path(flags.output).is_dir():  # said before the work, not after it
        raise UserError(f"--output {flags.output} is a folder; name a file")
    rows, unreadable = predict_images(flags.workdir, flags.images)
    report(rows, unreadable, flags.output)


def report(rows: list[dict], unreadable: list[str], output: str) -> None:
    """Prints one line an image, or writes them as CSV; names the files that could not be read."""
    import sys

    from vitplast_jax.errors import UserError
    from vitplast_jax.files import write_text
    from vitplast_jax.reports import tables

    flat = []
    for row in rows:
        top = {}
        for place, (name, probability) in enumerate(row["top"], start=1):
            top |= {f"class_{place}": name, f"probability_{place}": probability}
        flat.append({"file": row["file"], "class": row["class"], "probability": row["probability"], **top})
    for line in unreadable:
        print(f"unreadable: {line}", file=sys.stderr)
    if not rows:
        raise UserError(f"none of the {len(unreadable)} images could be read")
    if not output:
        print(tables.text_table(flat))
        return
    try:
        write_text(output, tables.csv_text(flat))
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror})") from None
    print(f"wrote {len(rows)} predictions to {output}" + (f"; {len(unreadable)} unreadable" if unreadable else ""))


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
