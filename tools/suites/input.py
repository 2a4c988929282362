"""What does the host pay for an image? Our pipeline, whose device crops and resizes, beside torchvision's usual one."""

import os
import statistics
import tempfile
import time
from pathlib import Path

from vitplast_jax.errors import UserError


def input_pipeline(flags, images: int = 256) -> list[dict]:
    """Host CPU seconds an image: ours for what the device is fed, torchvision's for the same training transforms."""
    import numpy as np
    from PIL import Image

    try:
        import torch
        import torchvision
        from torchvision import transforms
    except ImportError:
        raise UserError("the suite input compares with torchvision: pip install 'vitplast_jax[parity]'") from None
    from vitplast_jax.data import decode, memory, pipeline, prepare, prepared, preprocess, records, sources

    os.environ["JAX_PLATFORMS"] = "cpu"
    batch, repeats = flags.batch or 8, flags.repeats
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
        jpegs = sources.Source(
            "folder", "train", labels[: len(photos)], ("a", "b"), names[: len(photos)], files=tuple(map(str, photos))
        )
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
