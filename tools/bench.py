"""Measures speed: each suite prints a table and, with --json, writes {"environment": {...}, "rows": [{...}]}.

Example:
  python tools/bench.py --suite cpu-step --json bench.json

Suites:
  cpu-step    a training step of ours (jax) and of timm's (torch, extra `parity`), the same model, batch, optimizer and
              threads, in one process, one after the other in turn; full finetuning and each component alone
              (head and final norm always train). Times are medians in seconds; ratio = ours / peer.
  gpu         the same on an accelerator, in bfloat16, against torch.compile (max-autotune where it is a GPU) of timm's
              model with its fused attention and channels-last images: images a second, MFU, ratio = ours / peer (of
              speeds: above 1 ours is faster). Needs only jax, flax, optax, orbax-checkpoint, einops, torch and timm.
              On a machine without one it runs on the CPU, which proves that it runs and says nothing of speed.
  tpu-static  nothing is run: the TPU compiler's figures for one device of --topology, bfloat16, --batch images a chip,
              SGD with momentum and clipping (needs libtpu). Cycles are the compiler's estimate. --trainable may also
              name lora and aoft (on q and v, rank 8).
  plasticity  the paper's protocol on 16 + 16 images (--batch): ours with all 256 pairs, ours with 16, and the way the
              paper's code goes, in torch (extra `parity`), with 16 (--peer: that code itself); weights and images are
              the same, and so must be the 60 means (`largest_difference`, relative).
  plasticity-spread
              how much the estimate varies over 20 draws of --batch + --batch images of the quickstart's two data sets,
              for matched and for all pairs, which take the same forward passes.
  peft        parameters of each method without the head (the table of the AOFT paper) and, in turn, steps of AOFT-LoRA,
              LoRA (both q and v, rank 8), ln1 and, with the extra `parity`, HF peft's LoRA on timm's fused qkv: medians
              in seconds; ratio_lora, ratio_ln1, ratio_peer = this / that step, median and quartiles of the pairs;
              compiled FLOPs, also of a step that trains the qkv biases alone. --repeats=0 counts alone.
  input       host CPU time an image of our input pipeline, and of torchvision's usual one (PIL to 224 pixels, a torch
              DataLoader), both in one thread, in turn: 32x32 images decoded and from PNG records, 500x375 JPEGs.
              ratio = peer / ours.
  convert     importing, exporting and loading a file of random weights of --model, each in a process of its own:
              seconds (median of --repeats), peak memory, and its ratio to the file's size.
"""

import importlib
import os
import sys
from pathlib import Path

from vitplast_jax import command
from vitplast_jax.errors import UserError

FLAGS = (
    command.Flag("suite", "one of the above", value="NAME", required=True),
    command.Flag("model", "timm name", default="vit_base_patch16_224", value="NAME"),
    command.Flag("batch", "images a step (a chip, a side); 0: the suite's own", default=0, value="N"),
    command.Flag("repeats", "pairs of steps, after one warm-up each", default=9, value="N"),
    command.Flag("trainable", "rows to measure", default="all,ln1,mha,ln2,fc1,fc2", value="LIST"),
    command.Flag("gelu", "erf or tanh, of tpu-static", default="erf", value="NAME"),
    command.Flag("topology", "of tpu-static", default="v5e:2x4", value="CHIP:SHAPE"),
    command.Flag("slices", "of tpu-static", default=1, value="N"),
    command.Flag("fsdp", "devices that share the parameters, of tpu-static", default=1, value="N"),
    command.Flag("remat", "none, block or dots, of tpu-static", default="none", value="NAME"),
    command.Flag("parts", "in which a chip computes its images, of tpu-static", default=1, value="N"),
    command.Flag("peer", "of plasticity: a clone of github.com/ambroiseodt/vit-plasticity", value="DIR"),
    command.Flag("json", "file to write", value="FILE"),
)

# Where a suite is (module and function of tools/suites), and the columns of the table it prints.
SUITES = {
    "cpu-step": ("steps.cpu_step", "trainable ours_s peer_s ratio ratio_low ratio_high"),
    "gpu": ("steps.gpu", "trainable ours_images_per_second ours_mfu peer_images_per_second peer_mfu ratio"),
    "tpu-static": (
        "tpu_static.tpu_static",
        "trainable gelu parts flops argument_bytes temp_bytes estimated_cycles mfu compile_s",
    ),
    "plasticity": ("plasticity.plasticity", "ours_s ours_matched_s extra_pairs peer_s ratio largest_difference"),
    "peft": ("peft.peft", "method parameters trained step_s flops ratio_lora ratio_ln1 ratio_peer"),
    "input": ("input.input_pipeline", "case ours_us peer_us ratio images_per_second_and_core"),
    "convert": ("convert.convert", "model case seconds file_bytes peak_bytes ratio"),
    "plasticity-spread": ("plasticity.plasticity_spread", "component mean matched all ratio"),
}


def main(flags):
    if flags.suite not in SUITES:
        raise UserError(f"no suite is called {flags.suite!r}; there is: {', '.join(SUITES)}")
    place, columns = SUITES[flags.suite]
    module, function = place.split(".")
    tools = str(Path(__file__).resolve().parent)
    if tools not in sys.path:
        sys.path.insert(0, tools)
    rows = getattr(importlib.import_module(f"suites.{module}"), function)(flags)

    from vitplast_jax.files import write_json
    from vitplast_jax.reports import tables
    from vitplast_jax.training import run

    print(tables.text_table(rows, columns.split()))
    if flags.json:
        environment = run.environment() | {"threads": os.cpu_count(), "malloc": os.environ.get("GLIBC_TUNABLES", "")}
        write_json(flags.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
