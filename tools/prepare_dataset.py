"""Prepares a benchmark once: a folder of ArrayRecord files that training reads without TensorFlow.

Example:
  pip install -c requirements.txt -e ".[prepare]"
  python tools/prepare_dataset.py cifar100 --output data/cifar100
  python tools/prepare_dataset.py imagenet_val --output data/imagenet_val --manual DIR
  python -m vitplast_jax.train --config configs/plasticity_benchmark.py:cifar100 --workdir runs/cifar100
      --config.data.path=data/cifar100

NAME is a row of vitplast_jax/data/protocols.py; --list prints them with licence, size and what must be fetched by hand.
A set that several rows share is prepared once and serves them all.
"""

import sys

from vitplast_jax import command

FLAGS = (
    command.Flag("name", "the benchmark; may stand alone, as the first argument", value="NAME"),
    command.Flag("output", "folder to make", value="DIR"),
    command.Flag("manual", "folder of files fetched by hand", value="DIR"),
    command.Flag("downloads", "where downloads are kept (default: removed at the end)", value="DIR"),
    command.Flag("list", "print the benchmarks and what they need", default=False),
)


def main(flags):
    from vitplast_jax.data import prepare, protocols

    if flags.list:
        for row in protocols.TASKS.values():
            by_hand = f"; by hand: {row.manual}" if row.manual else ""
            print(
                f"{row.name:28} {row.source:45} {row.classes:4} classes {row.megabytes:6,} MB  {row.licence}{by_hand}"
            )
        return
    if not flags.name or not flags.output:
        raise command.UsageError("name a benchmark and --output DIR (--list shows the benchmarks)")
    prepare.prepare(flags.name, flags.output, flags.manual, flags.downloads)


def named(arguments: list[str]) -> list[str]:
    """The arguments with NAME, where it stands first, as --name=NAME."""
    if arguments and not arguments[0].startswith("-"):
        return [f"--name={arguments[0]}", *arguments[1:]]
    return arguments


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS, named(sys.argv[1:]))
