"""What does a conversion cost? Seconds and peak memory of importing, exporting and loading a file of random weights.

Each case is a process of its own, from its start to its end; the file lies in the page cache. Memory is the largest
resident set, which counts the pages of a mapped file too.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TOOL = str(Path(__file__).resolve().parent.parent / "convert_checkpoint.py")
LOAD = "import sys, jax, vitplast_jax as vp; jax.block_until_ready(vp.parameters(vp.load_model(*sys.argv[1:])))"


def convert(flags) -> list[dict]:
    """A row a case: seconds (median of --repeats), the file's bytes, peak bytes, and their ratio."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        source, imported = f"{folder}/source.safetensors", f"{folder}/imported"
        write_random(flags.model, source)
        size = os.path.getsize(source)

        def export(layout):
            return [TOOL, "export", "--checkpoint", imported, "--output", f"{folder}/{layout}", "--layout", layout]

        cases = {
            "import": [TOOL, "import", "--source", source, "--output", imported, "--model", flags.model],
            "export to timm": export("timm"),
            "export to transformers": export("hf"),
            "load_model": ["-c", LOAD, source],
        }
        rows = []
        for case, arguments in cases.items():
            runs = [measure([sys.executable, *arguments], environment) for _ in range(max(flags.repeats, 1))]
            peak = max(peak for _, peak in runs)
            row = {"model": flags.model, "batch": 0, "dtype": "float32", "case": case}
            row |= {"seconds": round(statistics.median(seconds for seconds, _ in runs), 2), "file_bytes": size}
            rows.append(row | {"peak_bytes": peak, "ratio": round(peak / size, 3)})
    return rows


def write_random(model: str, path: str) -> None:
    """A file of timm's names, at the price of the largest tensor in memory."""
    from vitplast_jax import models, trees
    from vitplast_jax.models import specs
    from vitplast_jax.weights import export

    spec = specs.spec(model)
    shapes = models.abstract_parameters(spec)
    largest = max(leaf.size for leaf in trees.flatten(shapes).values())
    drawn = np.random.default_rng(0).standard_normal(largest, dtype=np.float32)
    params = trees.map_paths(lambda _, leaf: drawn[: leaf.size].reshape(leaf.shape), shapes)
    export.write_safetensors(export.timm_tensors(params, spec)[0], path, {})


def measure(command: list[str], environment) -> tuple[float, int]:
    """(seconds, peak bytes) of a process."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - began, usage.ru_maxrss * 1024
