"""Component finetuning on the plasticity paper's sets (arXiv 2602.06883, protocol of its section on finetuning).

  python tools/prepare_dataset.py cifar100 --output data/cifar100
  python -m vitplast_jax.train --config configs/plasticity_benchmark.py:cifar100 --workdir runs/cifar100_mha
      --config.data.path=data/cifar100 --config.trainable=mha [--config.learning_rate=3e-3] [--config.seed=42]

The argument is cifar10, cifar100, flowers102, pet, cifar10_c/CORRUPTION_SEVERITY (the paper: contrast_5,
gaussian_noise_5, motion_blur_5, snow_5, speckle_noise_5) or domainnet/DOMAIN (the paper: clipart, sketch).

The paper's grid: trainable emb, ln1, mha, ln2, fc1, fc2, all; seeds 0, 42, 3407; learning rates 1e-3, 3e-3, 1e-2, 3e-2
(domainnet: 3e-3, 1e-2, 3e-2, 6e-2). It picks the rate on the test set; here the validation set is for that. One GPU of
80 GB, or --config.microbatch=auto. Expected (ViT-B, top-1, mean of 3 seeds): cifar10 98.91 for mha and 99.02 for all,
cifar100 92.65 and 92.74, flowers102 99.03 and 99.15, pet 94.37 and 94.57. Not yet run here.
"""

from vitplast_jax.training.config import default_config


def get_config(dataset):
    steps = {"cifar10": 10_000, "cifar100": 10_000, "cifar10_c": 10_000, "domainnet": 20_000}
    steps |= {"flowers102": 5000, "pet": 4000}
    kind = dataset.partition("/")[0]
    if kind not in steps:
        raise ValueError(f"no data set is called {dataset!r}: {', '.join(steps)} (the last but one with /NAME)")
    config = default_config()
    config.weights = "hf-hub:google/vit-base-patch16-224-in21k"
    config.image_size = (224, 224)
    config.data.name = dataset
    config.data.mean = (0.5,)
    config.data.std = (0.5,)
    config.data.crop_scale = (0.08, 1.0)
    config.data.flip = True
    config.data.interpolation = "bilinear"
    config.data.resize = "shorter"
    config.data.crop_pct = 1.0
    config.data.test_interpolation = "bilinear"
    config.data.threads = 8
    config.batch_size = 512
    config.steps = steps[kind]
    config.warmup_steps = 2000
    config.optimizer = "sgd"
    config.momentum = 0.9
    config.learning_rate = 1e-2
    config.clip_norm = 1.0
    config.trainable = ("mha",)
    config.also_trainable = ("head", "final_norm")
    return config
