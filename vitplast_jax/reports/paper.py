"""What did the plasticity paper report? Its table of accuracies, to be printed beside ours.

Source: arXiv 2602.06883, component finetuning of ViT-B/16 (ImageNet-21k weights): top-1 test accuracy in percent, mean
over three seeds at the best learning rate, which the paper's code picks on the test split; and its linear probe.
"""

SOURCE = "arXiv 2602.06883: ViT-B/16, three seeds, learning rate picked on test"
CONFIGS = ("mha", "fc1", "fc2", "ln2", "ln1", "all", "probe")

# data set -> accuracy of each config, in the order of CONFIGS
ACCURACY = {
    "cifar10": (98.91, 99.09, 98.91, 98.72, 98.67, 99.02, 91.95),
    "cifar100": (92.65, 92.85, 92.31, 91.93, 91.43, 92.74, 65.43),
    "contrast": (97.09, 97.06, 96.28, 96.67, 96.89, 97.23, 73.25),
    "gaussian_noise": (89.41, 89.49, 88.49, 89.55, 88.99, 87.14, 49.20),
    "motion_blur": (94.72, 94.53, 94.04, 93.95, 93.25, 94.67, 59.70),
    "snow": (95.47, 95.52, 95.27, 95.51, 95.15, 95.42, 59.25),
    "speckle_noise": (90.07, 89.85, 89.22, 89.71, 89.74, 89.58, 51.15),
    "clipart": (77.31, 76.47, 76.54, 74.37, 74.65, 78.50, 42.76),
    "sketch": (69.23, 69.31, 69.49, 65.27, 65.76, 71.30, 29.08),
    "flowers102": (99.03, 99.05, 98.86, 99.21, 98.99, 99.15, 96.34),
    "pet": (94.37, 94.26, 93.98, 94.39, 94.46, 94.57, 88.33),
}

# names of the same data in configs -> the row above; CIFAR-10-C is the paper's at severity 5 alone
_CORRUPTIONS = ("contrast", "gaussian_noise", "motion_blur", "snow", "speckle_noise")
_NAMES = {name: name for name in ("cifar10", "cifar100", "flowers102", "pet")}
_NAMES |= {f"cifar10_c/{name}_5": name for name in _CORRUPTIONS}
_NAMES |= {f"domainnet/{name}": name for name in ("clipart", "sketch")}


def row_for(data: str) -> str | None:
    """The table's row for a data set as configs name it, None for any other: VTAB's CIFAR-100 is not the paper's."""
    return _NAMES.get(data.removeprefix("plasticity/"))


def accuracy(data: str) -> dict[str, float] | None:
    """{config: accuracy as a fraction of 1} of a data set of the paper, None for any other."""
    row = row_for(data)
    return None if row is None else {c: v / 100 for c, v in zip(CONFIGS, ACCURACY[row], strict=True)}
