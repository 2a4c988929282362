"""Which benchmark is which? One row a task: where the data come from, how they are split, what the pixels go through.

In: a task's name (`cifar10`, `cifar10_c/contrast_5`, `fgvc/cub`, `vtab/dtd`, ...). Out: a `Task`. Tables only: nothing
is read or imported here. `tools/prepare_dataset.py` writes what a row names, `data/prepared.py` reads it.

Splits are parts of the source's own splits: ("train", 0, 800) is the source's first 800 training examples, None is the
end. Where a row has no part for validation, `data.validation` holds a share of train out by seed (ORACLES A3). VTAB-1k
is 800 examples to train on and 200 to choose by; with `data.validation=0` train is all 1000, and the test comes once.
The parts are those of google-research/task_adaptation, whose order of examples is that of TFDS for the same version.
"""

from __future__ import annotations

import dataclasses

from vitplast_jax.errors import UserError

Part = tuple[str, int, int | None]


@dataclasses.dataclass(frozen=True)
class Pixels:
    """What a protocol does to pixels; the configs set the same values, and a run's results repeat them.

    crop: "resized" (RandomResizedCrop, 8 to 100 % of the area), "plain" (the shorter side to size / crop_pct, then a
    random window) or "none" (squashed). mean, std: (): those that the weights were trained with.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: str
    flip: bool
    interpolation: str
    test_resize: str
    test_crop_pct: float


# ORACLES A3: the weights' 0.5/0.5; RandomResizedCrop, flip; Resize(224) and CenterCrop.
PLASTICITY = Pixels((0.5,), (0.5,), "resized", True, "bilinear", "shorter", 1.0)
# ORACLES B2, recipe: resize to 256, random crop of 224, flip.
FGVC = Pixels((), (), "plain", True, "bicubic", "shorter", 0.875)
# ORACLES B2, recipe: resize to 224, bicubic, nothing else.
VTAB = Pixels((), (), "none", False, "bicubic", "squash", 1.0)


@dataclasses.dataclass(frozen=True)
class Task:
    """One row.

    benchmark: plasticity, pretraining, fgvc, vtab or other.
    source: "tfds:NAME[/CONFIG]:VERSION", or "archive:KIND/PART" for what TFDS does not have or orders differently.
    counts: examples of each split of the source; None where the publisher gives no reliable number.
    classes: how many.
    parts: {"train" | "validation" | "test": parts of the source's splits}; "all" is divided by seed, `test` of it held
      out for the test.
    label: an integer feature, or the name of a rule in RULES.
    scale: what stored pixels are multiplied by (dSprites stores 0 and 1).
    manual: what must be fetched by hand into --manual DIR; empty where TFDS downloads it.
    files: names in --manual DIR that must be there; for an archive the first that exists is read.
    """

    name: str
    benchmark: str
    source: str
    counts: dict[str, int | None]
    classes: int
    parts: dict[str, tuple[Part, ...]]
    pixels: Pixels
    licence: str
    megabytes: int
    label: str = "label"
    test: float = 0.0
    scale: int = 1
    manual: str = ""
    files: tuple[str, ...] = ()

    @property
    def few(self) -> bool:
        """Whether this is a 1000-example task, whose validation part belongs to train once the choice is made."""
        return self.benchmark == "vtab"

    def describe(self) -> dict:
        """What must agree before two results of this task may be compared (PITFALLS R24)."""
        parts = {
            split: "+".join(f"{part}[{first or ''}:{'' if last is None else last}]" for part, first, last in found)
            for split, found in self.parts.items()
        }
        kind = "1k" if self.few else "full"
        return {"task": self.name, "source": self.source, "size": kind, "label": self.label, "parts": parts}


def _closest(distance: float, edges: tuple[float, ...]) -> int:
    """The index of the last edge below a distance."""
    return max(place for place, edge in enumerate(edges) if edge < distance)


def _clevr_count(values) -> int:
    return len(values("objects/size")) - 3


def _clevr_distance(values) -> int:
    nearest = values("objects/pixel_coords").reshape(-1, 3)[:, 2].min()
    return _closest(nearest, (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def _kitti_distance(values) -> int:
    vehicles = values("objects/type") < 3  # car, van, truck
    away = values("objects/location").reshape(-1, 3)[:, 2][vehicles]
    return _closest(min([*away.tolist(), 1000.0]), (-100.0, 8.0, 20.0, 999.0))


def _dsprites_x(values) -> int:
    return int(values("label_x_position")[0] // (32 / 16))


def _dsprites_orientation(values) -> int:
    return int(values("label_orientation")[0] // (40 / 16))


# How a label is made of the features of a record: `values(name)` is a flat array of the feature's numbers.
RULES = {
    "clevr_count": _clevr_count,
    "clevr_distance": _clevr_distance,
    "kitti_distance": _kitti_distance,
    "dsprites_x": _dsprites_x,
    "dsprites_orientation": _dsprites_orientation,
}

WHOLE = {"train": (("train", 0, None),), "test": (("test", 0, None),)}
_IMAGENET_TERMS = "ImageNet terms of access (research)"
CORRUPTIONS = (
    *("brightness", "contrast", "defocus_blur", "elastic_transform", "fog", "frost", "gaussian_blur"),
    *("gaussian_noise", "glass_blur", "impulse_noise", "jpeg_compression", "motion_blur", "pixelate", "saturate"),
    *("shot_noise", "snow", "spatter", "speckle_noise", "zoom_blur"),
)
DOMAINS = {"clipart": 1270, "infograph": 4030, "painting": 3670, "quickdraw": 440, "real": 5740, "sketch": 2540}  # MB


def _plasticity_rows():
    """Paper A: eleven sets, of which CIFAR-10-C and DomainNet are offered whole, and ImageNet's validation images."""
    row = {"benchmark": "plasticity", "pixels": PLASTICITY}
    counts = {"train": 50_000, "test": 10_000}
    for classes in (10, 100):
        source = f"tfds:cifar{classes}:3.0.2"
        yield Task(f"cifar{classes}", source=source, counts=counts, classes=classes, parts=WHOLE, **row,
                   licence="not stated", megabytes=165)  # fmt: skip
    for corruption in CORRUPTIONS:
        for severity in range(1, 6):
            part = f"{corruption}_{severity}"
            yield Task(f"cifar10_c/{part}", source=f"archive:cifar10_c/{part}", counts={"whole": 10_000}, classes=10,
                       parts={"all": (("whole", 0, None),)}, test=0.2, **row, licence="CC BY 4.0", megabytes=2918,
                       manual="CIFAR-10-C.tar from zenodo.org/records/2535967, or the folder unpacked from it",
                       files=("CIFAR-10-C", "CIFAR-10-C.tar"))  # fmt: skip
    for domain, megabytes in DOMAINS.items():
        yield Task(f"domainnet/{domain}", source=f"archive:domainnet/{domain}", counts={"whole": None}, classes=345,
                   parts={"all": (("whole", 0, None),)}, test=0.2, **row, licence="fair use notice of its authors",
                   megabytes=megabytes, files=(domain, f"{domain}.zip"),
                   manual=f"{domain}.zip (the cleaned version where there is one) from ai.bu.edu/M3SDA, or the folder "
                   "unpacked from it")  # fmt: skip
    yield Task("flowers102", source="tfds:oxford_flowers102:2.1.1", classes=102, **row, licence="not stated",
               counts={"train": 1020, "validation": 1020, "test": 6149}, megabytes=329,
               parts=WHOLE | {"validation": (("validation", 0, None),)})  # fmt: skip
    yield Task("pet", source="tfds:oxford_iiit_pet:4.0.0", counts={"train": 3680, "test": 3669}, classes=37,
               parts=WHOLE, **row, licence="CC BY-SA 4.0", megabytes=774)  # fmt: skip
    yield Task("imagenet_val", "pretraining", "tfds:imagenet2012:5.1.0", {"validation": 50_000}, 1000,
               {"train": (("validation", 0, None),)}, PLASTICITY, _IMAGENET_TERMS, 6400,
               files=("ILSVRC2012_img_val.tar",),
               manual="ILSVRC2012_img_val.tar from image-net.org/download-images (after registering)")  # fmt: skip
    yield Task("fashion_mnist_tfds", "other", "tfds:fashion_mnist:3.0.1", {"train": 60_000, "test": 10_000}, 10,
               WHOLE, PLASTICITY, "MIT", 30)  # fmt: skip


def _fgvc_rows():
    """Paper B's five fine-grained sets; validation is held out of train by seed, except for flowers."""
    flowers = {"train": 1020, "validation": 1020, "test": 6149}
    rows = (
        ("cub", "tfds:caltech_birds2011:0.2.0", {"train": 5994, "test": 5794}, 200, "non-commercial research", 1100),
        ("flowers", "tfds:oxford_flowers102:2.1.1", flowers, 102, "not stated", 329),
        ("dogs", "tfds:stanford_dogs:0.2.0", {"train": 12_000, "test": 8580}, 120, _IMAGENET_TERMS, 778),
        ("cars", "tfds:cars196:2.1.0", {"train": 8144, "test": 8041}, 196, "non-commercial research", 1900),
    )
    for name, source, counts, classes, licence, megabytes in rows:
        own = {"validation": (("validation", 0, None),)} if "validation" in counts else {}
        yield Task(f"fgvc/{name}", "fgvc", source, counts, classes, WHOLE | own, FGVC, licence, megabytes)
    yield Task("fgvc/nabirds", "fgvc", "archive:nabirds", {"train": 23_929, "test": 24_633}, 555, WHOLE, FGVC,
               "non-commercial research", 9500, files=("nabirds",),
               manual="the folder nabirds unpacked from nabirds.tar.gz (dl.allaboutbirds.org/nabirds)")  # fmt: skip


def _vtab_rows():
    """VTAB-1k, 19 tasks in the order Natural 7, Specialized 4, Structured 8."""
    pets, camelyon = {"train": 3680, "test": 3669}, {"train": 262_144, "validation": 32_768, "test": 32_768}
    clevr = {"train": 70_000, "validation": 15_000, "test": 15_000}
    norb, sprites = {"train": 24_300, "test": 24_300}, {"train": 737_280}
    flowers = {"train": 1020, "validation": 1020, "test": 6149}
    retinopathy = (
        "sample.zip, test.zip, trainLabels.csv and sampleSubmission.csv from kaggle.com/c/diabetic-retinopathy-"
    )
    # name, source, counts, classes, label, where validation and where the test start, licence, megabytes
    rows = (
        ("caltech101", "caltech101:3.0.2", {"train": 3060, "test": 6084}, 102, "label", ("train", 2754), None,
         "CC BY 4.0", 132),
        ("cifar100", "cifar100:3.0.2", {"train": 50_000, "test": 10_000}, 100, "label", ("train", 45_000), None,
         "not stated", 161),
        ("dtd", "dtd:3.0.1", {"train": 1880, "validation": 1880, "test": 1880}, 47, "label", None, None,
         "research only", 596),
        ("flowers", "oxford_flowers102:2.1.1", flowers, 102, "label", None, None, "not stated", 329),
        ("pets", "oxford_iiit_pet:4.0.0", pets, 37, "label", ("train", 2944), None, "CC BY-SA 4.0", 774),
        ("svhn", "svhn_cropped:3.1.0", {"train": 73_257, "test": 26_032, "extra": 531_131}, 10, "label",
         ("train", 65_931), None, "non-commercial", 1500),
        ("sun397", "sun397/tfds:4.0.0", {"train": 76_128, "validation": 10_875, "test": 21_750}, 397, "label", None,
         None, "not stated", 36_900),
        ("camelyon", "patch_camelyon:2.0.0", camelyon, 2, "label", None, None, "CC0", 7500),
        ("eurosat", "eurosat/rgb:2.0.0", {"train": 27_000}, 10, "label", ("train", 16_200), ("train", 21_600),
         "MIT", 90),
        ("resisc45", "resisc45:3.0.0", {"train": 31_500}, 45, "label", ("train", 18_900), ("train", 25_200),
         "not stated", 407),
        ("retinopathy", "diabetic_retinopathy_detection/btgraham-300:3.0.0",
         {"sample": 10, "train": 35_126, "validation": 10_906, "test": 42_670}, 5, "label", None, None,
         "competition rules", 90_000),
        ("clevr_count", "clevr:3.1.0", clevr, 8, "clevr_count", ("train", 63_000), ("validation", 0), "CC BY 4.0",
         18_000),
        ("clevr_dist", "clevr:3.1.0", clevr, 6, "clevr_distance", ("train", 63_000), ("validation", 0), "CC BY 4.0",
         18_000),
        ("dmlab", "dmlab:2.0.1", {"train": 65_550, "validation": 22_628, "test": 22_735}, 6, "label", None, None,
         "Apache-2.0", 2810),
        ("kitti", "kitti:3.3.0", {"train": 6347, "validation": 423, "test": 711}, 4, "kitti_distance", None, None,
         "CC BY-NC-SA 3.0", 11_700),
        ("dspr_loc", "dsprites:2.0.0", sprites, 16, "dsprites_x", ("train", 589_824), ("train", 663_552),
         "Apache-2.0", 26),
        ("dspr_ori", "dsprites:2.0.0", sprites, 16, "dsprites_orientation", ("train", 589_824), ("train", 663_552),
         "Apache-2.0", 26),
        ("snorb_azim", "smallnorb:2.0.0", norb, 18, "label_azimuth", ("test", 0), ("test", 12_150), "not stated", 251),
        ("snorb_ele", "smallnorb:2.0.0", norb, 9, "label_elevation", ("test", 0), ("test", 12_150), "not stated", 251),
    )  # fmt: skip
    manual = {
        "resisc45": ("the folder NWPU-RESISC45 unpacked from NWPU-RESISC45.rar", ("NWPU-RESISC45",)),
        "retinopathy": (
            f"{retinopathy}detection, unpacked to sample/, train/, test/ and the two files",
            ("train", "test", "trainLabels.csv"),
        ),
    }
    for name, source, counts, classes, label, chosen, tested, licence, megabytes in rows:
        start = chosen or ("validation", 0)
        parts = {
            "train": (("train", 0, 800),),
            "validation": ((start[0], start[1], start[1] + 200),),
            "test": ((*(tested or ("test", 0)), None),),
        }
        how, files = manual.get(name, ("", ()))
        yield Task(f"vtab/{name}", "vtab", f"tfds:{source}", counts, classes, parts, VTAB, licence, megabytes, label,
                   scale=255 if label.startswith("dsprites") else 1, manual=how, files=files)  # fmt: skip


TASKS: dict[str, Task] = {row.name: row for rows in (_plasticity_rows, _fgvc_rows, _vtab_rows) for row in rows()}


def task(name: str) -> Task:
    """The row of a name; UserError names the nearest that exist."""
    if name not in TASKS:
        import difflib

        near = difflib.get_close_matches(name, TASKS, 3, 0.4) or [*TASKS][:3]
        raise UserError(
            f"no benchmark is called {name!r}; did you mean {', '.join(near)}? (data/protocols.py lists all)"
        )
    return TASKS[name]


def sharing(source: str) -> list[Task]:
    """The rows that one prepared source serves."""
    return [row for row in TASKS.values() if row.source == source]
