"""What does a plasticity result say to its reader? The text for a terminal, and the files of a measurement's folder.

In: a plasticity result. Out: `plasticity.json`, `plasticity.csv` (its rows), `plasticity.png`, and with gradients
`plasticity_gradients.png`.
"""

import os
from collections.abc import Mapping

from vitplast_jax.errors import UserError
from vitplast_jax.files import as_path, write_json, write_text
from vitplast_jax.plasticity.select import trainable_line
from vitplast_jax.reports import plots, tables

_DISTRIBUTIONS = {
    "tasks": "{images_x} pretraining {what}, {images_y} downstream {what}",
    "downstream": "{images_x} and {images_y} other downstream {what}",
    "class": "{images_x} downstream images with as many of the same class",
    "perturbation": "{images_x} downstream images, each with a perturbation of norm {radius_of_perturbation:g}",
}


def describe(result: Mapping) -> str:
    """The text for a terminal: what was compared, the tables, the costs, the recommendation."""
    what = "sequences" if "gpt2" in result["model"] else "images"
    images = _DISTRIBUTIONS[result["distribution"]].format(**result, what=what)
    parts = [
        f"{result['model']}: {result['pairs']:,} {result['pairing']} pairs ({images}), "
        f"protocol={result['protocol']}, inputs={result['inputs']}",
        "",
        tables.plasticity_table(result),
        "",
    ]
    if "choices" in result:
        parts += ["what it costs to train each (with head and final norm where they train):", _costs(result), ""]
    if "difference" in result:
        parts += [f"before and after the run {result['run']} (step {result['step']}):", _difference(result), ""]
    if "gradients" in result:
        parts += [_agreement(result["gradients"]), ""]
    if "sizes" in result:
        parts += ["rates and mean bounds against the number of tokens:", tables.text_table(result["sizes"]), ""]
    notes = (result["notes"].get(key) for key in ("pairs", "excluded_pairs", "mha_bound"))
    parts += [f"note: {note}" for note in notes if note]
    parts += [f"recommendation: {trainable_line(result['recommendation'])}", f"  {result['recommendation']['reason']}"]
    return "\n".join(parts)


def _costs(result: Mapping) -> str:
    rows = [
        {
            "trainable": ",".join(choice["trainable"]),
            "plasticity": choice["mean"],
            "parameters": choice["parameters"],
            "FLOPs of full": f"{choice['flops']:.0%}",
            "optimizer MB": choice["optimizer_bytes"] / 1e6,
            "all-reduce MB": choice["allreduce_bytes"] / 1e6,
            "fits": "yes" if choice["fits"] else "no",
        }
        for choice in result["choices"]["components"]
    ]
    return tables.text_table(rows)


def _difference(result: Mapping) -> str:
    columns = ("component", "before", "after", "difference", "low", "high")
    return tables.text_table(result["difference"]["components"], columns)


def _agreement(gradients: Mapping) -> str:
    """How well the plasticity and the gradients agree in their order."""
    words = {"grad_norm": "gradient by the parameters", "input_grad_norm": "gradient by the input"}
    rows = [
        {"plasticity against": words[field], "rank correlation": name, **found[name]}
        for field, found in gradients["agreement"].items()
        for name in ("spearman", "kendall")
    ]
    cells = gradients["agreement"]["grad_norm"]
    heading = f"order of {cells['cells']} components of {cells['blocks']} blocks (95 % intervals from drawing blocks):"
    return f"{heading}\n{tables.text_table(rows)}"


def save(result: Mapping, workdir: str | os.PathLike) -> list[str]:
    """Writes the files of a result and returns their names."""
    folder = as_path(workdir)
    try:
        write_json(folder / "plasticity.json", result)
        write_text(folder / "plasticity.csv", tables.csv_text(result["rows"]))
        plots.plot_plasticity(result, folder / "plasticity.png")
        names = ["plasticity.json", "plasticity.csv", "plasticity.png"]
        if "gradients" in result:
            plots.plot_gradients(result, folder / "plasticity_gradients.png")
            names.append("plasticity_gradients.png")
    except OSError as error:
        raise UserError(f"--workdir {workdir} cannot be written ({error.strerror}); name another folder") from None
    return names
