"""Pretrains the shipped ViT-pico on the 60,000 images of Fashion-MNIST (Debian: apt install dataset-fashion-mnist).

  python -m vitplast_jax.train --config configs/pretrain_pico.py --workdir runs/pico
  python tools/convert_checkpoint.py export --checkpoint runs/pico --output runs/pico.safetensors --layout timm
  python -m vitplast_jax.train --config configs/pretrain_pico.py:second --workdir runs/pico2
      --config.weights=runs/pico.safetensors
  python tools/convert_checkpoint.py export --checkpoint runs/pico2 --output runs/pico2.safetensors --layout timm
  python -m vitplast_jax.train --config configs/pretrain_pico.py:third --workdir runs/pico3
      --config.weights=runs/pico2.safetensors

Expected test accuracy after each round: 89.15, 89.75 and 90.74 %; about three hours in all on 2 CPU cores.
"""

from vitplast_jax.training.config import default_config


def get_config(round="first"):
    """Each round is one cosine of the learning rate, from the weights that the round before it left."""
    rounds = {
        "first": {"steps": 5000, "warmup_steps": 300, "learning_rate": 2e-3},  # 10.9 epochs of 58,800 images
        "second": {"steps": 2750, "warmup_steps": 100, "learning_rate": 1e-3, "seed": 1},  # 6, in another order
        "third": {"steps": 8000, "warmup_steps": 300, "learning_rate": 1.5e-3, "seed": 2},  # 17.4, of shifted images
    }
    if round not in rounds:
        raise ValueError(f"no round is called {round!r}: {', '.join(rounds)}")
    config = default_config()
    config.model = "vit_pico_patch4_28"
    config.data.name = "fashion_mnist"
    config.data.validation = 0.02
    config.data.crop_scale = ()
    config.data.shift = 0.08 if round == "third" else 0.0  # up to two of the 28 pixels
    config.batch_size = 128
    config.optimizer = "adamw"
    config.weight_decay = 0.05
    config.label_smoothing = 0.05
    for key, value in rounds[round].items():
        config[key] = value
    return config
