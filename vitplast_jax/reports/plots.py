"""How do a run, a measurement and a confusion matrix look?

In: what the other rooms wrote (metric lines, a plasticity result, a matrix of counts). Out: PNG files, each written so
that a kill leaves the old picture or the new one. The only importer of matplotlib, and only inside the functions.
Colours are Okabe and Ito's; every series also has its own marker or line style, so that grey print can be read.
"""

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vitplast_jax.errors import UserError
from vitplast_jax.files import as_path, replacing

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
_GREY = "#6E6E6E"

# colour, marker and line style of each component, and of all together, the same in every picture
COMPONENT_STYLE = {
    "ln1": (_SKY, "v", (0, (1, 1))),
    "mha": (_RED, "o", "-"),
    "ln2": (_PURPLE, "^", (0, (1, 1))),
    "fc1": (_BLUE, "s", "--"),
    "fc2": (_GREEN, "D", "-."),
    "emb": (_ORANGE, "P", (0, (5, 1, 1, 1, 1, 1))),
    "all": ("black", "X", (0, (8, 2))),
}

_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#404040",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.8,
}


def _draw(png, size: tuple[float, float], fill, **style) -> None:
    """Makes a figure of `size` inches, lets `fill(figure)` draw on it and puts the PNG in place at once."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)  # a canvas of our own: no global state, no display, safe beside a user's pyplot
        fill(figure)
        with replacing(png) as file:
            figure.savefig(file, format="png", facecolor="white")


# --- training --------------------------------------------------------------------------------------------------------


def _read_lines(source) -> list[dict]:
    """Metric lines of a `metrics.jsonl`, or of mappings already in memory."""
    if not isinstance(source, (str, os.PathLike)):
        return [dict(line) for line in source]
    lines = []
    for line in as_path(source).read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while it wrote
    return [line for line in lines if isinstance(line, dict)]


def _series(lines: Sequence[Mapping], field: str, split: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one field; of a step that a resumed run logged twice, the later line counts."""
    values = {
        line["step"]: line[field]
        for line in lines
        if line.get("split") == split and isinstance(line.get(field), (int, float)) and "step" in line
    }
    steps = sorted(values)
    return np.asarray(steps, float), np.asarray([values[step] for step in steps], float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over 5 % of the points (with the window cut at both ends)."""
    width = max(1, len(values) // 40) * 2 + 1
    sums, counts = (np.convolve(a, np.ones(width), "same") for a in (values, np.ones_like(values)))
    return sums / counts


def plot_curves(lines: str | os.PathLike | Iterable[Mapping], png: str | os.PathLike, title: str = "") -> None:
    """Draws loss, accuracy and learning rate against the step.

    Args:
      lines: path of a `metrics.jsonl`, or its lines as mappings: training lines {step, loss, learning_rate, ...}
        without `split`, evaluation lines {step, split, accuracy, loss, ...}.
      png: file to write.
      title: above the picture.
    """
    rows = _read_lines(lines)
    if not any("step" in row for row in rows):
        raise UserError(f"no metric lines with a step in {lines if isinstance(lines, (str, os.PathLike)) else 'lines'}")

    def fill(figure):
        loss, accuracy, rate = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 0.8))
        steps, values = _series(rows, "loss", None)
        if len(steps) > 20:
            loss.plot(steps, values, color=_BLUE, alpha=0.25, linewidth=0.8)
            loss.plot(steps, _smooth(values), color=_BLUE, label="training (smoothed)")
        elif len(steps):
            loss.plot(steps, values, color=_BLUE, label="training")
        splits = [s for s in ("validation", "test") if any(row.get("split") == s for row in rows)]
        for split, color, marker in zip(splits, (_ORANGE, _GREEN), ("o", "D"), strict=False):
            _curve(loss, *_series(rows, "loss", split), color, marker, split)
            steps, values = _series(rows, "accuracy", split)
            _curve(accuracy, steps, values * 100, color, marker, split)
            if len(values) and np.isfinite(values).any():
                best = int(np.nanargmax(values))
                label = f"{split} best: {values[best] * 100:.2f} % at step {steps[best]:,.0f}"
                accuracy.lines[-1].set_label(label if len(values) > 1 else f"{split}: {values[best] * 100:.2f} %")
        steps, values = _series(rows, "learning_rate", None)
        rate.plot(steps, values, color=_GREY)
        rate.set_ylim(bottom=0)
        rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        loss.set(title="Loss", xlabel="step", ylim=(0, None))
        accuracy.set(title="Accuracy (%)", xlabel="step")
        rate.set(title="Learning rate", xlabel="step")
        for axes, place in ((loss, "upper right"), (accuracy, "lower right")):
            if axes.lines:
                axes.legend(loc=place)
        for axes in (loss, accuracy, rate):
            axes.margins(x=0.02)
            axes.locator_params(axis="x", nbins=5 if axes is not rate else 4)
        if title:
            figure.suptitle(title, fontsize=13, fontweight="bold")

    _draw(png, (12, 3.7), fill)


def _curve(axes, steps, values, color, marker, label):
    if len(steps):
        axes.plot(steps, values, color=color, marker=marker, markersize=5, label=label)


# --- plasticity ------------------------------------------------------------------------------------------------------


def plot_plasticity(result: Mapping, png: str | os.PathLike) -> None:
    """Draws a plasticity result: over depth with 95 % intervals, by component, and below its bounds.

    Left: mean rate of each component at each block. Middle: the blocks' means by component, in the order of the bounds'
    ranks (a theory that holds gives a falling picture), with the mean over the blocks and its interval. Right, where
    bounds are known: bounds (open markers) and largest measured ratios (filled) on a log axis.
    """
    names = [entry["component"] for entry in result["components"]]
    rows = {name: [row for row in result["rows"] if row["component"] == name] for name in names}
    bounded = any(row["bound"] is not None for row in result["rows"])

    def fill(figure):
        axes = figure.subplots(1, 3 if bounded else 2, width_ratios=(1.2, 1, 1.2) if bounded else (1.2, 1))
        _plot_depth(axes[0], rows)
        _plot_components(axes[1], result["components"], rows)
        if bounded:
            _plot_bounds(axes[2], rows)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names), handlelength=3)
        figure.suptitle(
            f"Plasticity of {result['model']}: {result['pairs']:,} {result['pairing']} pairs, "
            f"protocol: {result['protocol']}, inputs: {result['inputs']}",
            fontsize=13,
            fontweight="bold",
        )

    _draw(png, (13.5 if bounded else 9.5, 4.4), fill)


def plot_gradients(result: Mapping, png: str | os.PathLike) -> None:
    """Draws the loss gradients of a plasticity result against the plasticity, by component and block, on log axes.

    Left: norm of the gradient by the parameters; right: by the input. Titles give Spearman's rank correlation.
    """
    gradients = result["gradients"]
    means = {(row["block"], row["component"]): row["mean"] for row in result["rows"]}

    def fill(figure):
        axes = figure.subplots(1, 2)
        for place, field, words in ((axes[0], "grad_norm", "parameters"), (axes[1], "input_grad_norm", "input")):
            for name in [entry["component"] for entry in result["components"]]:
                color, marker, _ = _style(name)
                rows = [row for row in gradients["rows"] if row["component"] == name and row[field]]
                x, y = [means[row["block"], name] for row in rows], [row[field] for row in rows]
                place.scatter(x, y, color=color, marker=marker, s=34, label=name.upper(), alpha=0.85, linewidths=0)
            found = gradients["agreement"][field]["spearman"]
            shown = "not defined" if found["value"] is None else f"{found['value']:.2f}"
            if found["low"] is not None:
                shown += f" ({found['low']:.2f} to {found['high']:.2f})"
            place.set(title=f"Gradient by the {words}\nrank correlation {shown}", xscale="log", yscale="log")
            place.set(xlabel="plasticity (mean rate of change)", ylabel="norm of the loss gradient")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.suptitle(f"Plasticity and loss gradients of {result['model']}", fontsize=13, fontweight="bold")

    _draw(png, (9.5, 4.8), fill)


def _style(name: str):
    return COMPONENT_STYLE.get(name, (_GREY, "x", "-"))


def _plot_depth(axes, rows):
    for name, entries in rows.items():
        color, marker, line = _style(name)
        blocks, means = [row["block"] for row in entries], [row["mean"] for row in entries]
        axes.plot(blocks, means, color=color, marker=marker, linestyle=line, markersize=6, label=name.upper())
        if all(row["low"] is not None for row in entries):
            low, high = [row["low"] for row in entries], [row["high"] for row in entries]
            axes.fill_between(blocks, low, high, color=color, alpha=0.25, linewidth=0)
    axes.set(title="Over depth", xlabel="block", ylabel="plasticity (mean rate of change)", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _plot_components(axes, components, rows):
    order = sorted(components, key=lambda entry: (entry["bound_rank"] or 0, entry["rank"]))
    for place, entry in enumerate(order):
        color, marker, _ = _style(entry["component"])
        means = [row["mean"] for row in rows[entry["component"]]]
        axes.boxplot(
            [means],
            positions=[place],
            widths=0.6,
            patch_artist=True,
            showfliers=False,
            boxprops={"facecolor": color, "alpha": 0.3, "edgecolor": color},
            medianprops={"color": color},
            whiskerprops={"color": color},
            capprops={"color": color},
        )
        spread = np.linspace(-0.16, 0.16, len(means)) if len(means) > 1 else np.zeros(1)
        axes.scatter(place + spread, means, color=color, marker=marker, s=22, alpha=0.8, linewidths=0)
        if entry["low"] is not None:
            error = [[entry["mean"] - entry["low"]], [entry["high"] - entry["mean"]]]
            axes.errorbar([place + 0.38], [entry["mean"]], yerr=error, color="black", marker="_", capsize=3)
    labels = [f"{e['component'].upper()}\nrank {e['rank']}" for e in order]
    axes.set_xticks(range(len(order)), labels)
    axes.set(title="By component, highest bound first", ylim=(0, None))
    axes.grid(False, axis="x")


def _plot_bounds(axes, rows):
    for name, entries in rows.items():
        color, marker, line = _style(name)
        blocks = [row["block"] for row in entries]
        axes.plot(blocks, [row["max"] for row in entries], color=color, marker=marker, markersize=5, linestyle=line)
        if all(row["bound"] for row in entries):
            bounds = [row["bound"] for row in entries]
            axes.plot(blocks, bounds, color=color, marker=marker, markersize=7, linestyle=line, fillstyle="none")
    axes.set_yscale("log")
    axes.set(title="Largest ratio (filled) and bound (open)", xlabel="block")
    axes.xaxis.get_major_locator().set_params(integer=True)


# --- sweeps and probes -----------------------------------------------------------------------------------------------

_MARKERS = ("o", "s", "D", "v", "^", "P", "X", "*", "<", ">")
_COLORS = (_RED, _BLUE, _GREEN, _SKY, _PURPLE, _ORANGE, _GREY)


def _config_style(config: str, place: int):
    """Colour, marker and line of a configuration: a component's own, else the next of the list."""
    if config in COMPONENT_STYLE:
        return COMPONENT_STYLE[config]
    lines = ("-", "--", "-.", ":")
    return _COLORS[-1 - place % len(_COLORS)], _MARKERS[-1 - place % len(_MARKERS)], lines[place % len(lines)]


def plot_sweep(summary: Mapping, png: str | os.PathLike) -> None:
    """Draws a sweep, a row a task: accuracy of each configuration, its learning rates, accuracy against plasticity.

    Left: test accuracy of every seed at the chosen rate, mean and standard deviation. Middle, where the grid has
    several learning rates: mean validation accuracy against the rate. Right, where plasticity was measured: test
    accuracy against it, for components trained alone.
    """
    groups, cells = summary["groups"], summary["cells"]
    tasks = list(dict.fromkeys(group["task"] for group in groups))
    rates = len({cell.get("learning_rate") for cell in cells}) > 1
    measured = any(group["plasticity"] is not None for group in groups)
    panels = [_plot_accuracies] + [_plot_rates] * rates + [_plot_agreement] * measured

    def fill(figure):
        grid = figure.subplots(len(tasks), len(panels), squeeze=False)
        for task, row in zip(tasks, grid, strict=True):
            own = [group for group in groups if group["task"] == task]
            for panel, axes in zip(panels, row, strict=True):
                panel(axes, own, cells)
            row[0].set_title(f"{task}: test accuracy (%)" if len(tasks) > 1 else "Test accuracy (%)")

    _draw(png, (4.6 * len(panels), 0.6 + 3.5 * len(tasks)), fill, **{"text.parse_math": False})


def _cells_of(group: Mapping, cells: Sequence[Mapping]) -> list[Mapping]:
    """The finished runs of a configuration on a task, at every learning rate."""
    keys = [key for key in group if key in cells[0] and ("." in key or key not in _OF_A_RUN)]
    return [cell for cell in cells if cell["state"] == "finished" and all(cell[key] == group[key] for key in keys)]


# columns that a run and its group both have, but which do not say which group it is
_OF_A_RUN = ("learning_rate", "seconds", "parameters", "grad_norm")


def _plot_accuracies(axes, groups, cells):
    for place, group in enumerate(groups):
        color, marker, _ = _config_style(group["config"], place)
        runs = [c for c in _cells_of(group, cells) if c.get("learning_rate") in (None, group["learning_rate"])]
        seeds = [100 * cell["test_accuracy"] for cell in runs if cell["test_accuracy"] is not None]
        axes.scatter([place + 0.18] * len(seeds), seeds, s=14, color=_GREY, alpha=0.7, linewidths=0)
        error = None if group["std"] is None else [100 * group["std"]]
        axes.errorbar(
            [place - 0.08], [100 * group["accuracy"]], yerr=error, color=color, marker=marker, markersize=8, capsize=4
        )
    long = max(len(group["config"]) for group in groups) > 5
    names = [group["config"] for group in groups]
    axes.set_xticks(range(len(groups)), names, rotation=30 if long else 0, ha="right" if long else "center")
    axes.grid(False, axis="x")
    axes.margins(x=0.08)


def _plot_rates(axes, groups, cells):
    for place, group in enumerate(groups):
        color, marker, line = _config_style(group["config"], place)
        by_rate: dict[float, list] = {}
        for cell in _cells_of(group, cells):
            if cell["validation_accuracy"] is not None:
                by_rate.setdefault(cell["learning_rate"], []).append(100 * cell["validation_accuracy"])
        rates = sorted(by_rate)
        means = [np.mean(by_rate[rate]) for rate in rates]
        axes.plot(rates, means, color=color, marker=marker, linestyle=line, markersize=6, label=group["config"])
    asked = sorted({cell["learning_rate"] for cell in cells})
    axes.set_xscale("log")
    axes.set_xticks(asked, [f"{rate:g}" for rate in asked])
    axes.minorticks_off()
    axes.set(title="Validation accuracy (%)", xlabel="learning rate")
    axes.legend(ncols=2, fontsize=9, handlelength=3)


def _plot_agreement(axes, groups, cells):
    for place, group in enumerate(groups):
        if group["plasticity"] is not None:
            color, marker, _ = _config_style(group["config"], place)
            at = (group["plasticity"], 100 * group["accuracy"])
            axes.plot(*at, color=color, marker=marker, markersize=9, linestyle="none")
            axes.annotate(group["config"], at, xytext=(7, 4), textcoords="offset points")
    axes.set(title="Accuracy (%) against plasticity", xlabel="plasticity of the component")
    axes.margins(0.15)


def plot_probe(result: Mapping, png: str | os.PathLike) -> None:
    """Draws a linear probe: accuracy after each component over depth, a panel a pooling.

    The paper's own place (last block's output, mean over tokens) is the last point of the line "block".
    """
    rows = result["rows"]
    split = "test" if rows[0]["test"] is not None else "validation"
    poolings = list(dict.fromkeys(row["pooling"] for row in rows))

    def fill(figure):
        panels = figure.subplots(1, len(poolings), sharey=True, squeeze=False)[0]
        for pooling, axes in zip(poolings, panels, strict=True):
            for place, name in enumerate(dict.fromkeys(row["component"] for row in rows)):
                own = [row for row in rows if (row["component"], row["pooling"]) == (name, pooling)]
                color, marker, line = _config_style(name, place)
                values = [100 * row[split] for row in own]
                blocks = [row["block"] for row in own]
                axes.plot(blocks, values, color=color, marker=marker, linestyle=line, markersize=6, label=name)
            pooled = "mean over tokens" if pooling == "mean" else "class token"
            axes.set(title=pooled, xlabel="block", ylabel=f"{split} accuracy (%)")
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, handlelength=3)
        figure.suptitle(f"Linear probe of {result['model']} on {result['protocol']['data']}", fontweight="bold")

    _draw(png, (5.2 * len(poolings), 4.4), fill, **{"text.parse_math": False})


# --- evaluation ------------------------------------------------------------------------------------------------------


def plot_confusion(matrix, class_names: Sequence[str], png: str | os.PathLike, title: str = "") -> None:
    """Draws a confusion matrix: rows are the true classes, shades are shares of a row, cells show counts if they fit.

    Args:
      matrix: [c, c] counts, `matrix[true, predicted]`.
      class_names: c names.
      png: file to write.
      title: above the picture.
    """
    matrix = np.asarray(matrix)
    count = len(class_names)
    if matrix.shape != (count, count):
        raise UserError(
            f"the confusion matrix has shape {matrix.shape}, expected ({count}, {count}) for {count} classes"
        )
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)
    names = [str(name) if len(str(name)) <= 18 else f"{str(name)[:17]}…" for name in class_names]
    side = min(4.2 + 0.42 * count, 18.0)
    step = max(1, -(-count // 40))  # more names than that cannot be read

    def fill(figure):
        axes = figure.subplots()
        picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        ticks = range(0, count, step)
        long = max(map(len, names)) > 3
        axes.set_xticks(ticks, [names[i] for i in ticks], rotation=45 if long else 0, ha="right" if long else "center")
        axes.set_yticks(ticks, [names[i] for i in ticks])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        if count <= 25:
            size = 10 if count <= 12 else 7
            for (row, column), value in np.ndenumerate(matrix):
                if value:
                    color = "white" if shares[row, column] > 0.55 else "#202020"
                    axes.text(column, row, f"{int(value)}", ha="center", va="center", color=color, fontsize=size)
        correct = np.trace(matrix) / max(matrix.sum(), 1)
        heading = f"{title}\n" if title else ""
        axes.set_title(f"{heading}{int(np.trace(matrix)):,} of {int(matrix.sum()):,} correct ({correct * 100:.2f} %)")
        axes.set(xlabel="predicted", ylabel="true")
        figure.colorbar(picture, ax=axes, shrink=0.7, label="share of the true class")

    _draw(png, (side + 0.8, side), fill, **{"text.parse_math": False})


# --- adapters --------------------------------------------------------------------------------------------------------


def plot_angles(angles: Mapping[str, np.ndarray], png: str | os.PathLike, title: str = "") -> None:
    """Draws how angles (degrees) between rows or columns of matrices are spread, one line for each name."""
    styles = [(_BLUE, "-"), (_RED, "--"), (_GREEN, "-."), (_PURPLE, ":"), (_ORANGE, (0, (5, 1))), (_SKY, (0, (1, 1)))]

    def fill(figure):
        axes = figure.subplots()
        edges = np.linspace(0, 180, 91)
        for index, (name, values) in enumerate(angles.items()):
            color, line = styles[index % len(styles)]
            density, _ = np.histogram(values, edges, density=True) if len(values) else (np.zeros(90), edges)
            axes.plot((edges[1:] + edges[:-1]) / 2, density, color=color, linestyle=line, label=name)
        axes.axvline(90, color=_GREY, linewidth=1)
        axes.set(xlabel="angle (degrees)", ylabel="density", title=title, xlim=(0, 180))
        axes.set_xticks(range(0, 181, 30))
        axes.legend()

    _draw(png, (6.4, 4.0), fill)
