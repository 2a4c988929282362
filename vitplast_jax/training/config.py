"""Which settings does a run have, what may each hold, and is this set of them sound?

In: a ConfigDict (a config file's `get_config()`, overrides applied), or the mapping read from a run's `config.json`.
Out: `default_config()`, every key with its default; `validate(config)`, a checked, locked copy with every value in one
canonical form (selector fields are tuples, image sizes are (height, width)), or one UserError that names every problem.

`FIELDS` is the one table: a key's default, what it may hold, and what it means. Values are read by the same rules
from a command line (text) and from Python, so `--config.steps=1e3` and `config.steps = 1000` agree. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vitplast_jax.errors import UserError

if TYPE_CHECKING:  # the speed suites run where ml_collections is not installed
    from ml_collections import ConfigDict

_SELECTOR = re.compile(r"[a-z_][a-z0-9_]*(@\d+(-\d+)?)?")


@dataclasses.dataclass(frozen=True)
class Field:
    """One key. `read` turns any spelling of a value into the value, or raises ValueError."""

    default: Any
    read: Callable[[Any], Any]
    allowed: str
    meaning: str


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)  # not through float: a seed of 2**53 + 1 stays what it is
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _items(value: Any) -> tuple:
    """`a,b`, `(a, b)`, `['a', 'b']` as text, or a sequence whose texts may hold commas themselves."""
    if isinstance(value, str):
        parts = (part.strip().strip("'\"") for part in value.strip().strip("()[]").split(","))
        return tuple(part for part in parts if part)
    if isinstance(value, (tuple, list)):
        return tuple(item for part in value for item in (_items(part) if isinstance(part, str) else (part,)))
    return (value,)


def whole(default: int, low: int, meaning: str, high: int | None = None, other: int | None = None) -> Field:
    """A whole number from `low` (to `high`), or the special value `other`."""

    def read(value: Any) -> int:
        number = _whole(value)
        if number != other and (number < low or (high is not None and number > high)):
            raise ValueError
        return number

    allowed = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
    return Field(default, read, allowed + (f", or {other}" if other is not None else ""), meaning)


def number(default: float, allowed: str, inside: Callable[[float], bool], meaning: str) -> Field:
    """A finite real number for which `inside` holds."""

    def read(value: Any) -> float:
        result = _number(value)
        if not inside(result):
            raise ValueError
        return result

    return Field(float(default), read, f"a number, {allowed}", meaning)


def text(default: str, meaning: str, allowed: str = "text", pattern: str = r"[^\n\0]*") -> Field:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError
        return value

    return Field(default, read, allowed, meaning)


def choice(default: str, options: tuple[str, ...], meaning: str) -> Field:
    def read(value: Any) -> str:
        if value not in options:
            raise ValueError
        return value

    between = " or " if len(options) < 6 else ", "
    return Field(default, read, between.join(f'"{option}"' for option in options), meaning)


def switch(default: bool, meaning: str) -> Field:
    words = {"true": True, "false": False, "1": True, "0": False}

    def read(value: Any) -> bool:
        result = value if isinstance(value, bool) else words.get(str(value).lower())
        if result is None:
            raise ValueError
        return result

    return Field(default, read, "True or False", meaning)


def numbers(default: tuple, lengths: tuple[int, ...], allowed: str, inside: Callable[..., bool], meaning: str) -> Field:
    """A tuple of numbers, of one of the given lengths, for which `inside(*numbers)` holds."""

    def read(value: Any) -> tuple[float, ...]:
        result = tuple(_number(item) for item in _items(value))
        if len(result) not in lengths or (result and not inside(*result)):
            raise ValueError
        return result

    return Field(default, read, allowed, meaning)


def image_size(meaning: str) -> Field:
    """(): the model's own; one number: a square; `224,160` or `224x160`: height and width."""

    def read(value: Any) -> tuple[int, ...]:
        value = value.replace("x", ",") if isinstance(value, str) else value
        result = tuple(_whole(item) for item in _items(value))
        result = () if result == (0,) else result * 2 if len(result) == 1 else result
        if len(result) not in (0, 2) or any(side < 1 for side in result):
            raise ValueError
        return result

    return Field((), read, "() for the model's own, 224, or height,width as in 224,160", meaning)


def steps_range(meaning: str) -> Field:
    """(): none; `from,to` with 1 <= from < to."""

    def read(value: Any) -> tuple[int, ...]:
        result = tuple(_whole(item) for item in _items(value))
        if len(result) not in (0, 2) or (result and not 1 <= result[0] < result[1]):
            raise ValueError
        return result

    return Field((), read, "() or from,to with 1 <= from < to", meaning)


def selectors(default: tuple[str, ...], meaning: str, empty: bool = False) -> Field:
    def read(value: Any) -> tuple[str, ...]:
        result = _items(value)
        if (not result and not empty) or not all(isinstance(s, str) and _SELECTOR.fullmatch(s) for s in result):
            raise ValueError
        return result

    return Field(default, read, "component selectors such as mha,fc1@0-5", meaning)


def factors(meaning: str) -> Field:
    """`selector=factor` texts, as in ("head=10", "ln1@0-5=0.1")."""

    def read(value: Any) -> tuple[str, ...]:
        result = _items(value)
        for item in result:
            selector, equals, factor = item.partition("=") if isinstance(item, str) else ("", "", "")
            if not (equals and _SELECTOR.fullmatch(selector) and _number(factor) >= 0):
                raise ValueError
        return result

    return Field((), read, "selector=factor texts such as head=10,ln1@0-5=0.1, factors from 0", meaning)


_AXIS = re.compile(r"\s*(?P<key>[a-z][a-z0-9_.]*)\s*=(?P<values>.*)", re.DOTALL)


def axes(meaning: str) -> Field:
    """Axes of a grid, ``KEY=VALUE|VALUE``: every value in the spelling that KEY itself takes on a command line.

    A comma parts two axes where a KEY= follows it, so ``trainable=ln1,ln2|all,seed=0|1`` has two.
    """

    def read(value: Any) -> tuple[str, ...]:
        result = []
        for text in [value] if isinstance(value, str) else value:
            result += re.split(r",(?=[\s'\"]*[a-z][a-z0-9_.]*=)", text.strip("()[]") if text[:1] in "([" else text)
        parts, result = [part.strip().strip("'\"") for part in result if part.strip()], []
        for part in parts:
            key, values = split_axis(part)
            result.append(f"{key}={'|'.join(values)}")
        if len({split_axis(axis)[0] for axis in result}) < len(result):
            raise ValueError
        return tuple(result)

    allowed = "KEY=VALUE|VALUE texts, each KEY once, as in trainable=mha|fc1,seed=0|1"
    return Field((), read, allowed, meaning)


def split_axis(text: str) -> tuple[str, list[str]]:
    """``"KEY=VALUE|VALUE"`` -> (KEY, the values as text); ValueError if it is none."""
    match = _AXIS.fullmatch(text)
    if not match:
        raise ValueError(text)
    return match["key"], [given.strip() for given in match["values"].split("|")]


def targets(meaning: str) -> Field:
    def read(value: Any) -> tuple[str, ...]:
        result = _items(value)
        if not all(isinstance(s, str) and _SELECTOR.fullmatch(s) for s in result):
            raise ValueError
        return result

    return Field((), read, "targets such as q,v@0-5 or mha,ffn", meaning)


def wholes(low: int, allowed: str, meaning: str) -> Field:
    def read(value: Any) -> tuple[int, ...]:
        result = tuple(_whole(item) for item in _items(value))
        if any(number < low for number in result):
            raise ValueError
        return result

    return Field((), read, f"whole numbers from {low}, {allowed}or ()", meaning)


def _crop(low: float, high: float) -> bool:
    return 0 < low <= high


PEFT_METHODS = ("", "lora", "adapter", "vpt-shallow", "vpt-deep", "oft", "boft", "hra", "hta", "ssf")

FIELDS: dict[str, Field] = {
    "seed": whole(0, 0, "of the head, the data order and every random draw", high=2**32 - 1),
    "model": text("", "name as in timm; empty: what the weights say"),
    "weights": text("", "file, folder, hf-hub:ID or the name of a shipped model; empty: random start"),
    "image_size": image_size("size the model sees"),
    "num_classes": whole(0, 0, "0: as many as the data have"),
    "data.name": text(
        "",
        "digits, folder, table, parquet, tar, npz, idx, fashion_mnist, tfds, or a benchmark: vtab/dtd; measure: text",
    ),
    "data.path": text("", "where the data lie"),
    "data.validation": number(0.2, "from 0, below 1", lambda x: 0 <= x < 1, "share of train held out to choose by"),
    "data.split_seed": whole(42, 0, "of that split", high=2**32 - 1),
    "data.crop_scale": numbers(
        (0.08, 1.0),
        (0, 2),
        "low,high with 0 < low <= high <= 1, or () for no crop",
        lambda low, high: _crop(low, high) and high <= 1,
        "area of the random crop",
    ),
    "data.crop_ratio": numbers((0.75, 4 / 3), (2,), "low,high with 0 < low <= high", _crop, "its width over height"),
    "data.shift": number(0.0, "from 0 to 0.5", lambda x: 0 <= x <= 0.5, "largest random shift, as a share of the side"),
    "data.flip": switch(True, "random left-right flips"),
    "data.window": number(
        0.0, "from 0 to 1", lambda x: 0 <= x <= 1, "random window as a share of the shorter side (224 of 256: 0.875)"
    ),
    "data.jitter": numbers(
        (), (0, 3), "three numbers from 0, or ()", lambda *x: min(x) >= 0, "brightness, contrast, saturation"
    ),
    "data.mixup": number(0.0, "from 0", lambda x: x >= 0, "alpha of mixup; 0: off"),
    "data.cutmix": number(0.0, "from 0", lambda x: x >= 0, "alpha of CutMix; 0: off"),
    "data.class_weights": choice("none", ("none", "balanced"), "of the loss; balanced: rare classes count more"),
    "data.resize": choice("", ("", "shorter", "squash"), "of evaluation; empty: the model's own"),
    "data.crop_pct": number(
        0.0, "from 0", lambda x: x >= 0, "of evaluation: size over shorter side; 0: the model's own"
    ),
    "data.test_interpolation": choice("", ("", "bilinear", "bicubic"), "of evaluation; empty: the model's own"),
    "data.interpolation": choice("bilinear", ("bilinear", "bicubic"), "of the training crop"),
    "data.mean": numbers((), (0, 1, 3), "1 or 3 numbers, or () for the model's own", lambda *x: True, "normalisation"),
    "data.std": numbers(
        (), (0, 1, 3), "1 or 3 numbers above 0, or () for the model's own", lambda *x: min(x) > 0, "normalisation"
    ),
    "data.unreadable": choice("fail", ("fail", "skip"), "what a broken image file does"),
    "data.threads": whole(2, 1, "that decode image files"),
    "data.cache_gb": number(
        2.0, "from 0", lambda x: x >= 0, "decoded images of a split are kept in memory if they fit"
    ),
    "data.tokenizer": text("", "of texts: tokenizer.json, or its folder; empty: it lies beside the weights"),
    "data.length": whole(128, 2, "words of a sequence, where the data are texts"),
    "batch_size": whole(512, 1, "images a step, over all devices"),
    "microbatch": text("", "images at once; auto: the most that fit", '"", "auto" or a number', r"|auto|[1-9]\d*"),
    "accumulation": whole(1, 1, "parts in which a batch is computed; the gradient is the mean over the batch"),
    "steps": whole(10000, 1, "optimizer steps"),
    "warmup_steps": whole(2000, 0, "of linear warm-up; cosine to 0 follows"),
    "learning_rate": number(1e-2, "above 0", lambda x: x > 0, "the peak"),
    "optimizer": choice("sgd", ("sgd", "adamw"), ""),
    "momentum": number(0.9, "from 0, below 1", lambda x: 0 <= x < 1, "of sgd"),
    "weight_decay": number(0.0, "from 0", lambda x: x >= 0, "of trained kernels; decoupled with adamw, L2 with sgd"),
    "clip_norm": number(1.0, "from 0", lambda x: x >= 0, "global gradient norm over trained leaves; 0: off"),
    "label_smoothing": number(0.0, "from 0, below 1", lambda x: 0 <= x < 1, ""),
    "eval_every": whole(500, 1, "steps between validations"),
    "checkpoint_every": whole(500, 1, "steps between checkpoints"),
    "log_every": whole(20, 1, "steps between lines of metrics.jsonl"),
    "eval_batch_size": whole(512, 1, "images at once in evaluation"),
    "trainable": selectors(("all",), "what trains; auto: what measure recommends; all, with peft.method: it alone"),
    "also_trainable": selectors(("head", "final_norm"), "what trains besides", empty=True),
    "learning_rate_factors": factors("of the learning rate, by selector"),
    "weight_decay_factors": factors("of the weight decay, by selector"),
    "layer_decay": number(1.0, "above 0, up to 1", lambda x: 0 < x <= 1, "rate of a block over that of the next"),
    "drop_path": number(0.0, "from 0, below 1", lambda x: 0 <= x < 1, "of the last block; linear over depth"),
    "dropout": number(0.0, "from 0, below 1", lambda x: 0 <= x < 1, ""),
    "peft.method": choice("", PEFT_METHODS, "what is attached"),
    "peft.rank": whole(8, 1, "of LoRA; width of an adapter; number of prompts; block size of OFT; reflections of HRA"),
    "peft.ranks": wholes(0, "one for each block, ", "of each block, where they differ; 0 leaves a block out"),
    "peft.targets": targets("where; (): the method's own (lora q,v; adapter ffn; oft, boft, hra qkv)"),
    "peft.projection": choice("free", ("free", "ao"), "ao: each matrix is made from one vector (AOFT)"),
    "peft.scales": switch(False, "AOFT*'s lambda"),
    "peft.start": choice("zero", ("zero", "plain", "scale"), "of ao: changes nothing; the formula; a tenth of it"),
    "peft.normalize": switch(False, "AO vectors are divided by their norm"),
    "peft.preset": choice("", ("", "formula", "count-single", "count-tied"), "a row of the AOFT paper"),
    "peft.alpha": number(0.0, "from 0", lambda x: x >= 0, "LoRA's delta is times alpha / rank; 0: the rank"),
    "peft.dropout": number(0.0, "from 0, below 1", lambda x: 0 <= x < 1, "of what an adapter sees"),
    "peft.position": choice("after", ("after", "before", "parallel"), "of an adapter, to its sublayer"),
    "peft.tied": switch(False, "an adapter's up projection is its down projection transposed"),
    "peft.bias": switch(True, "an adapter's projections have biases"),
    "peft.activation": choice("gelu", ("gelu", "none"), "of an adapter"),
    "compute_dtype": choice("float32", ("float32", "bfloat16"), "of products; norms, softmax and loss stay float32"),
    "frozen_dtype": choice("float32", ("float32", "bfloat16"), "in which frozen weights are kept"),
    "mesh.data": whole(-1, 1, "devices that share the batch; -1: all that are left", other=-1),
    "mesh.fsdp": whole(1, 1, "devices that share the parameters"),
    "probe.places": choice("all", ("all", "last"), "after each component of each block, or the paper's place alone"),
    "sweep": axes("the grid of runs of sweep"),
    "remat": choice(
        "none",
        ("none", "block", "dots"),
        "recompute activations by block (dots: all but products): less memory, more time",
    ),
    "scan": switch(False, "compile equal blocks once, as a loop: a faster start, for a copy of their weights"),
    "profile": steps_range("trace steps from, up to but without, to; the trace goes to the workdir's profile/"),
    "compilation_cache": text("", "folder that keeps compiled programs for the next start; empty: none"),
    "measure.protocol": choice("ours", ("ours", "reference"), "reference: as the paper's code"),
    "measure.inputs": choice("embedding", ("embedding", "block", "natural"), "what every component is given"),
    "measure.pairing": choice("matched", ("matched", "all"), "which pairs of images are compared"),
    "measure.distribution": choice(
        "tasks", ("tasks", "downstream", "class", "perturbation"), "pretraining with downstream images, or others"
    ),
    "measure.radius": number(1.0, "above 0", lambda x: x > 0, "norm of the perturbation of a normalised image"),
    "measure.split": choice("test", ("test", "validation", "train"), "of the downstream data"),
    "measure.pairs": whole(0, 0, "at most so many; 0: all that the images give"),
    "measure.x_name": text("", "pretraining data; empty: the sample shipped with the model"),
    "measure.x_path": text("", "where they lie"),
    "measure.images": whole(256, 0, "of each side, 0: all"),
    "measure.sizes": wholes(1, "", "further image sizes at which rates and bounds are compared, as in 224,384"),
    "measure.batch_size": whole(64, 1, "images at once"),
    "measure.ratios": switch(False, "also write every single ratio (ratios.npz)"),
    "measure.gradients": switch(False, "also measure the loss gradients"),
    "budget.params": whole(0, 0, "parameters that measure and trainable=auto may choose; 0: any number"),
    "budget.flops": number(0.0, "from 0 to 1", lambda x: 0 <= x <= 1, "share of a full finetuning step's; 0: any"),
}


def _nested(flat: Mapping[str, Any]) -> ConfigDict:
    from ml_collections import ConfigDict

    tree: dict[str, Any] = {}
    for key, value in flat.items():
        group, _, name = key.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[name] = value
    return ConfigDict(tree).lock()


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        if hasattr(value, "items"):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def default_config() -> ConfigDict:
    """Every key with its default; locked, so that a config file cannot add a key that nothing reads."""
    return _nested({key: field.default for key, field in FIELDS.items()})


def unknown_key(key: str) -> str:
    """The sentence for a key that does not exist, with the nearest that does (`data.nmae`, and `nmae` alone)."""
    leaves = {name.rpartition(".")[2]: name for name in FIELDS}
    near = difflib.get_close_matches(key, FIELDS, 1) or [
        leaves[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], leaves, 1)
    ]
    if any(name.startswith(f"{key}.") for name in FIELDS):
        hint = f"is a group of {', '.join(name for name in FIELDS if name.startswith(f'{key}.'))}"
    else:
        hint = "does not exist; " + (f"did you mean config.{near[0]}?" if near else "--help lists the keys")
    return f"config.{key} {hint}"


def read(key: str, value: Any) -> Any:
    """The canonical value of `key`, from text or from Python; UserError says what is allowed."""
    if key not in FIELDS:
        raise UserError(unknown_key(key))
    try:
        return FIELDS[key].read(value)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"config.{key} is {value!r}; allowed: {FIELDS[key].allowed}") from None


def _conflicts(v: dict[str, Any]) -> list[str]:
    """What no single value shows."""
    found = []
    if v["batch_size"] % v["accumulation"]:
        found.append(
            f"config.accumulation is {v['accumulation']}, which does not divide config.batch_size {v['batch_size']}"
        )
    if v["microbatch"].isdigit():
        if v["accumulation"] != 1:
            found.append("config.microbatch and config.accumulation say the same thing twice; set one")
        elif v["batch_size"] % int(v["microbatch"]):
            found.append(
                f"config.microbatch is {v['microbatch']}, which does not divide config.batch_size {v['batch_size']}"
            )
    for key, values in map(split_axis, v["sweep"]):
        if key == "sweep" or key not in FIELDS:
            known = key in FIELDS
            found.append("config.sweep: " + ("a grid cannot be an axis of itself" if known else unknown_key(key)))
            continue
        for given in values:
            try:
                read(key, given)
            except UserError as error:
                found.append(f"config.sweep: {error}")
    if v["warmup_steps"] > v["steps"]:
        found.append(f"config.warmup_steps is {v['warmup_steps']}, more than config.steps {v['steps']}")
    if v["profile"] and v["profile"][1] > v["steps"]:
        found.append(f"config.profile ends at step {v['profile'][1]}, after config.steps {v['steps']}")
    if not v["peft.method"]:
        lone = [key for key in FIELDS if key.startswith("peft.") and v[key] != FIELDS[key].default]
        found += [f"config.{key} changes nothing without config.peft.method" for key in lone]
    if v["data.window"] and v["data.crop_scale"]:
        found.append("config.data.window and config.data.crop_scale are two ways to crop; set crop_scale to ()")
    if bool(v["data.mean"]) != bool(v["data.std"]):
        found.append("config.data.mean and config.data.std are given together or not at all")
    return found


def validate(config: Mapping[str, Any] | ConfigDict) -> ConfigDict:
    """A new, checked, locked config; keys that are not given take their defaults.

    Raises:
      UserError: one line with every problem: the key, its value, what is allowed.
    """
    values, problems = {key: field.default for key, field in FIELDS.items()}, []
    for key, value in _flat(config).items():
        try:
            values[key] = read(key, value)
        except UserError as error:
            problems.append(str(error))
    problems = problems or _conflicts(values)
    if problems:
        raise UserError("; ".join(problems))
    if values["peft.method"] and not any(selector.startswith("peft") for selector in values["trainable"]):
        beside = () if values["trainable"] == FIELDS["trainable"].default else values["trainable"]
        values["trainable"] = ("peft", *beside)
    return _nested(values)


def to_json(config: ConfigDict) -> str:
    """The text of a run's `config.json`: nested, in the table's order, tuples as lists."""
    return json.dumps(config.to_dict(), indent=2) + "\n"
