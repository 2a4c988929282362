"""Finetunes on your own images: DIR/train/CLASS/*.jpg (and test/, validation/), or DIR/CLASS/*.jpg split by seed.

  python -m vitplast_jax.train --config configs/folder.py:vit_base_patch16_224 --workdir runs/mine
      --config.data.path=DIR [--config.weights=FILE or hf-hub:ID]

Real weights: one GPU of 16 GB or more (bfloat16); without --config.weights they come from the Hugging Face hub. Without
an argument: a demonstration with the small shipped model (28x28 pixels), minutes on a CPU.
"""

from vitplast_jax.training.config import default_config


def get_config(model=""):
    config = default_config()
    config.data.name = "folder"
    config.optimizer = "adamw"
    config.trainable = ("mha",)
    config.warmup_steps = 100
    config.steps = 1000
    config.eval_every = 100
    config.checkpoint_every = 100
    if model:
        config.model = model
        config.weights = f"hf-hub:timm/{model}" + ("" if "." in model else ".augreg_in21k")
        config.batch_size = 64
        config.learning_rate = 1e-4
        config.compute_dtype = "bfloat16"
        config.frozen_dtype = "bfloat16"
        config.data.threads = 8
    else:
        print(
            "A demonstration: the shipped model sees 28x28 pixels and knows only clothes. With real weights:\n"
            "  python -m vitplast_jax.train --config configs/folder.py:vit_base_patch16_224"
            " --config.weights=FILE --config.data.path=DIR --workdir DIR"
        )
        config.weights = "vit_pico_patch4_28.fashion_mnist"
        config.batch_size = 64
        config.learning_rate = 3e-3
        config.data.crop_scale = (0.5, 1.0)
    return config
