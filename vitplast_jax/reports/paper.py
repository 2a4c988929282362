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

# words in a data set's name -> the row above; the longer name is tried first (cifar100 before cifar10)
_WORDS = {**{name: name for name in ACCURACY}, "pets": "pet", "flowers": "flowers102"}


def row_for(data: str) -> str | None:
    """The table's row for a data set named as configs name it ("cifar10_c/snow", "oxford_iiit_pet"); None if absent.

    A CIFAR-10-C corruption is the row of its own, never that of CIFAR-10.
    """
    text = data.lower().replace("-", "_")
    corrupted = "cifar10_c" in text or "cifar10_corrupted" in text
    found = [word for word in sorted(_WORDS, key=len, reverse=True) if _named(word, text)]
    found = [word for word in found if not (corrupted and word == "cifar10")]
    return _WORDS[found[0]] if found else None


def _named(word: str, text: str) -> bool:
    place = text.find(word)
    if place < 0:
        return False
    before, after = text[:place][-1:], text[place + len(word) :][:1]
    return not before.isalnum() and not after.isalnum()


def accuracy(data: str) -> dict[str, float] | None:
    """{config: accuracy as a fraction of 1} of a data set of the paper, None for any other."""
    row = row_for(data)
    return None if row is None else {c: v / 100 for c, v in zip(CONFIGS, ACCURACY[row], strict=True)}
