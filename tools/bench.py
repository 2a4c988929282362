"""Measures speed: each suite prints a table and, with --json, writes {"environment": {...}, "rows": [{...}]}.

Example:
  python tools/bench.py --suite cpu-step --json bench.json

Suites:
  cpu-step   a training step of ours (jax) and of timm's (torch, extra `parity`), the same model, batch, optimizer and
             threads, in one process, one after the other in turn; full finetuning and each component alone
             (head and final norm always train). Times are medians in seconds; ratio = ours / peer.
  input      host CPU time an image of our input pipeline, and of torchvision's usual one (PIL to 224 pixels, a torch
             DataLoader), both in one thread, in turn: 32x32 images decoded and from PNG records, 500x375 JPEGs.
             ratio = peer / ours.
"""

import os
import statistics
import time

from vitplast_jax import command
from vitplast_jax.errors import UserError

FLAGS = (
    command.Flag("suite", "cpu-step", value="NAME", required=True),
    command.Flag("model", "timm name", default="vit_base_patch16_224", value="NAME"),
    command.Flag("batch", "images a step", default=8, value="N"),
    command.Flag("repeats", "pairs of steps, after one warm-up each", default=9, value="N"),
    command.Flag("trainable", "rows to measure", default="all,ln1,mha,ln2,fc1,fc2", value="LIST"),
    command.Flag("json", "file to write", value="FILE"),
)
LEARNING_RATE, MOMENTUM, CLIP = 1e-3, 0.9, 1.0

# Which of timm's parameters make up a component: parts of their names.
TIMM_NAMES = {"ln1": ".norm1.", "mha": ".attn.", "ln2": ".norm2.", "fc1": ".mlp.fc1.", "fc2": ".mlp.fc2."}


def cpu_step(model: str, batch: int, repeats: int, trainable: list[str]) -> list[dict]:
    """Interleaved steps of both libraries on the same random batch."""
    try:
        import timm
        import torch
    except ImportError:
        raise UserError("the suite cpu-step compares with timm: pip install 'vitplast_jax[parity]'") from None
    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    for name in trainable:
        ours, theirs = our_step(model, batch, name), timm_step(model, batch, name)
        ours(), theirs()  # compilation and first touch
        times = {ours: [], theirs: []}
        for _ in range(repeats):
            for step in (ours, theirs):
                began = time.perf_counter()
                step()
                times[step].append(time.perf_counter() - began)
        ours_s, peer_s = statistics.median(times[ours]), statistics.median(times[theirs])
        ratios = sorted(a / b for a, b in zip(times[ours], times[theirs], strict=True))
        rows.append(
            {
                "model": model,
                "batch": batch,
                "dtype": "float32",
                "trainable": name,
                "method": "",
                "ours_s": round(ours_s, 4),
                "peer": f"timm {timm.__version__}, torch {torch.__version__}",
                "peer_s": round(peer_s, 4),
                "ratio": round(ours_s / peer_s, 3),
                "ratio_low": round(ratios[len(ratios) // 4], 3),
                "ratio_high": round(ratios[-1 - len(ratios) // 4], 3),
                "pairs": repeats,
            }
        )
        print(f"{name:>5}: ours {ours_s:.3f} s, timm {peer_s:.3f} s, ratio {ours_s / peer_s:.2f}", flush=True)
        del ours, theirs
    return rows


def our_step(model: str, batch: int, name: str):
    """A call that runs one step of ours to its end."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from vitplast_jax import components, models
    from vitplast_jax.training import config as settings
    from vitplast_jax.training import optim, step

    built = models.create_model(model, num_classes=10)
    selectors = ["all"] if name == "all" else [name, "head", "final_norm"]
    static, trainable, frozen = models.split(built, components.mask(models.parameters(built), selectors))
    config = settings.validate(
        {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "clip_norm": CLIP, "warmup_steps": 0}
    )
    optimizer, schedule = optim.make_optimizer(config, trainable, built.spec.depth)
    # The images arrive as the peer gets them, already floating point.
    train_step = jax.jit(
        step.make_train_step(static, optimizer, schedule, lambda images, keys: images, seed=0), donate_argnums=0
    )
    images = np.random.RandomState(0).randn(batch, *built.spec.img_size, 3).astype(np.float32)
    data = {"image": jnp.asarray(images), "label": jnp.arange(batch) % 10}
    trainable = jax.tree.map(jnp.copy, trainable)  # donated: it must not be the model's own
    state = [step.TrainState(jnp.zeros((), jnp.int32), trainable, optimizer.init(trainable))]

    def run():
        state[0], metrics = train_step(state[0], frozen, data)
        jax.block_until_ready((state[0], metrics))

    return run


def timm_step(model: str, batch: int, name: str):
    """A call that runs one step of timm's model in PyTorch."""
    import numpy as np
    import timm
    import torch

    net = timm.create_model(model, pretrained=False, num_classes=10).train()
    for path, parameter in net.named_parameters():
        always = path.startswith(("head.", "norm."))
        parameter.requires_grad_(name == "all" or always or TIMM_NAMES[name] in f".{path}")
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM)
    size = net.patch_embed.img_size
    images = torch.from_numpy(np.random.RandomState(0).randn(batch, 3, *size).astype(np.float32))
    labels = torch.arange(batch) % 10

    def run():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()

    return run


def input_suite(batch: int, repeats: int, images: int = 256) -> list[dict]:
    """Host CPU seconds an image: ours for what the device is fed, torchvision's for the same training transforms."""
    import tempfile
    from pathlib import Path

    import numpy as np
    from PIL import Image

    try:
        import torch
        import torchvision
        from torchvision import transforms
    except ImportError:
        raise UserError("the suite input compares with torchvision: pip install 'vitplast_jax[parity]'") from None
    from vitplast_jax.data import decode, memory, pipeline, prepare, prepared, preprocess, records, sources

    torch.set_num_threads(1)
    random = np.random.RandomState(0)

    def noise(height, width):  # smooth, so that it compresses as photographs do
        small = Image.fromarray(random.randint(0, 256, (height // 8, width // 8, 3), np.uint8))
        return small.resize((width, height), Image.Resampling.BICUBIC)

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )

    class Peer(torch.utils.data.Dataset):
        def __init__(self, examples, read):
            self.examples, self.read = examples, read

        def __len__(self):
            return len(self.examples)

        def __getitem__(self, index):
            return transform(self.read(self.examples[index])), 0

    augmentation = preprocess.Augmentation(crop_scale=(0.08, 1.0), flip=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        small = np.stack([np.asarray(noise(32, 32)) for _ in range(images)])
        names = tuple(map(str, range(images)))
        labels = np.arange(images, dtype=np.int32) % 2
        decoded = sources.Source("npz", "train", labels, ("a", "b"), names, images=small)
        prepare.write_records(
            folder / prepared.DATA, "bench", ["a", "b"], (("train", prepare.archives._png(x), 0) for x in small)
        )
        split = records.RecordSplit(str(folder / prepared.DATA), "train", np.zeros(images, np.int64))
        files = tuple(records.Packed(split, place) for place in range(images))
        packed = sources.Source("tfds", "train", labels, ("a", "b"), names, files=files)
        packed = memory.keep(decode.check(packed), 0)  # decodes every image anew
        photos = [folder / f"{place}.jpg" for place in range(min(images, 64))]
        for photo in photos:
            noise(375, 500).save(photo, quality=90)
        jpegs = sources.Source("folder", "train", labels[: len(photos)], ("a", "b"), names[: len(photos)],
                               files=tuple(map(str, photos)))  # fmt: skip
        cases = {
            "32x32 decoded": (decoded, small, Image.fromarray),
            "32x32 PNG records": (packed, small, Image.fromarray),
            "500x375 JPEG": (jpegs, photos, lambda path: Image.open(path).convert("RGB")),
        }
        for name, (source, examples, read) in cases.items():
            count = max(1, len(source) // batch)
            loader = torch.utils.data.DataLoader(Peer(examples, read), batch, shuffle=True, drop_last=True)
            ours = pipeline.train_batches(source, batch, 0, size=(224, 224), augmentation=augmentation, threads=1)
            times: dict[str, list] = {"ours": [], "peer": []}
            for _ in range(repeats + 1):
                theirs = iter(loader)
                for key, batches in (("ours", ours), ("peer", theirs)):
                    began = time.process_time()
                    for _ in range(count):
                        next(batches)
                    times[key].append((time.process_time() - began) / (count * batch))
            ours.close()
            ours_s, peer_s = (statistics.median(values[1:]) for values in times.values())
            rows.append(
                {
                    "model": "",
                    "batch": batch,
                    "dtype": "uint8",
                    "case": name,
                    "ours_us": round(ours_s * 1e6, 2),
                    "peer": f"torchvision {torchvision.__version__}, torch {torch.__version__}",
                    "peer_us": round(peer_s * 1e6, 2),
                    "ratio": round(peer_s / ours_s, 2),
                    "images_per_second_and_core": round(1 / ours_s),
                }
            )
    return rows


def main(flags):
    suites = ("cpu-step", "input")
    if flags.suite not in suites:
        raise UserError(f"no suite is called {flags.suite!r}; there is: {', '.join(suites)}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if flags.suite == "input":
        rows, columns = input_suite(flags.batch, flags.repeats), ("case", "ours_us", "peer_us", "ratio")
    else:
        rows = cpu_step(flags.model, flags.batch, flags.repeats, flags.trainable.split(","))
        columns = ("trainable", "ours_s", "peer_s", "ratio", "ratio_low", "ratio_high")

    from vitplast_jax.files import write_json
    from vitplast_jax.reports import tables
    from vitplast_jax.training import run

    print(tables.text_table(rows, columns))
    if flags.json:
        environment = run.environment() | {"threads": os.cpu_count(), "malloc": os.environ.get("GLIBC_TUNABLES", "")}
        write_json(flags.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    command.run(main, __doc__, FLAGS)
