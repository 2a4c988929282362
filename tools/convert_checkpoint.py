"""Converts weights: any known file into a checkpoint of ours, a checkpoint of ours into others' files.

    python tools/convert_checkpoint.py import --source FILE|DIR|hf-hub:ID --output DIR [--model NAME] [--verify]
    python tools/convert_checkpoint.py export --checkpoint DIR --output PATH --layout timm|hf|peft
    python tools/convert_checkpoint.py inspect --source FILE|DIR|hf-hub:ID [--model NAME]

`import` writes a folder with an Orbax checkpoint and model.json; with --verify it compares with the installed peer
first (timm, transformers: the extra `parity`), writes nothing and exits 1 where they differ. `export` takes a run's
folder or an imported one: the adapter of a run is merged for timm and hf, and written as it is for peft (LoRA alone;
--base says in whose names). `inspect` says what a source holds. Nothing in a source is ever run.
"""

import os
import sys

from vitplast_jax import command, files
from vitplast_jax.command import Flag, UsageError
from vitplast_jax.errors import UserError

SOURCE = Flag("source", "weights: a file, a folder or hf-hub:ID", value="FILE|DIR|hf-hub:ID", required=True)
MODEL = Flag("model", "a name of timm, transformers or a hub, where the weights do not say their model", value="NAME")
EMA = Flag("ema", "take the averaged weights of a training checkpoint", default=False)


def import_(flags):
    from vitplast_jax.weights import convert, export, places

    spec, tree, report = convert.load_tree(flags.source, spec=flags.model or None, ema=flags.ema)
    print("\n".join(report.lines()), flush=True)
    if flags.verify:
        from vitplast_jax.weights import verify

        result = verify.verify(flags.source, spec, tree, report)
        print(result.line(), flush=True)
        if not result.passed:
            raise UserError(f"{flags.source}: the converted model differs from {result.peer}; nothing was written")
    source = places.identity(flags.source)
    export.save_folder(tree, spec, flags.output, report.class_names, source)
    print(f"written        {flags.output}")


def export_(flags):
    from vitplast_jax.weights import export

    if flags.layout not in ("timm", "hf", "peft"):
        raise UsageError(f"--layout is {flags.layout!r}; expected timm, hf or peft")
    if flags.layout == "peft":
        return _export_adapter(flags)
    spec, tree, class_names = _checkpoint(flags.checkpoint)
    save = {"timm": export.save_timm, "hf": export.save_hf}[flags.layout]
    save(tree, spec, flags.output, class_names)
    print(f"written        {flags.output} ({spec.name}, {flags.layout} layout)")


def _export_adapter(flags):
    from vitplast_jax import peft
    from vitplast_jax.training import run

    if not (files.as_path(flags.checkpoint) / "config.json").exists():
        raise UserError(f"{flags.checkpoint}: the peft layout is for the folder of a run that trained an adapter")
    found = run.load_run(flags.checkpoint)
    peft.save_hf_peft(found.model, flags.output, flags.base)
    print(f"written        {flags.output} ({found.spec.name}, peft layout for {flags.base})")


def _checkpoint(folder):
    """(spec, tree, class names) of an imported folder or of a run's."""
    from vitplast_jax.weights import convert

    place = files.as_path(folder)
    if (place / "model.json").exists():
        spec, tree, report = convert.load_tree(folder)
        return spec, tree, report.class_names
    if (place / "config.json").exists() and (place / "checkpoints").is_dir():
        from vitplast_jax import models, peft
        from vitplast_jax.training import run

        found = run.load_run(folder)
        return found.spec, models.parameters(peft.merge(found.model)), found.class_names
    raise UserError(f"{folder}: neither a run's folder (config.json, checkpoints/) nor an imported one (model.json)")


def inspect(flags):
    from vitplast_jax.weights import convert, places, readers

    try:
        print("\n".join(convert.load_tree(flags.source, spec=flags.model or None, ema=flags.ema)[2].lines()))
    except UserError:
        path = places.resolve(flags.source)
        if os.path.isdir(os.path.join(path, convert.CHECKPOINT)):
            raise
        tensors = readers.read_tensors(path, flags.ema)
        print(f"container      {tensors.container}" + (f" under {tensors.wrapper!r}" if tensors.wrapper else ""))
        for note in tensors.notes:
            print(f"note           {note}")
        for name in sorted(tensors)[:20]:
            print(f"tensor         {name} {list(tensors[name].shape)} {tensors[name].dtype}")
        if len(tensors) > 20:
            print(f"               and {len(tensors) - 20} more")
        raise


COMMANDS = {
    "import": (
        import_,
        (
            SOURCE,
            Flag("output", "folder to write", value="DIR", required=True),
            MODEL,
            EMA,
            Flag("verify", "compare with the installed peer first; exit 1 above the tolerance", default=False),
        ),
    ),
    "export": (
        export_,
        (
            Flag("checkpoint", "a run's folder or an imported one", value="DIR", required=True),
            Flag("output", "file (timm) or folder (hf) to write", value="PATH", required=True),
            Flag("layout", "whose names and layout", value="timm|hf|peft", required=True),
            Flag("base", "of peft: in whose names (hf: transformers 5)", default="timm", value="timm|hf|hf4"),
        ),
    ),
    "inspect": (inspect, (SOURCE, MODEL, EMA)),
}


def main(argv):
    name = argv[0] if argv else ""
    if name in COMMANDS:
        function, flags = COMMANDS[name]
        command.run(function, __doc__, flags, argv[1:])
    if name in ("--help", "-h"):
        print(__doc__.strip())
        sys.exit(0)
    print(f"error: expected import, export or inspect, not {name!r} (--help)", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
