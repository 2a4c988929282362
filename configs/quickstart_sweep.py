"""Does plasticity predict? 7 component configurations x 4 learning rates x 2 seeds, on two tasks: digits, and digits
that are turned and lie among fragments of others (data/clutter.py), which are harder.

  python -m vitplast_jax.sweep --config configs/quickstart_sweep.py --workdir runs/sweep
  python -m vitplast_jax.report --workdir runs/sweep

Sized to end within 20 minutes on 2 idle CPU cores: training is short, so accuracies lie below the quickstart's.
"""

from vitplast_jax.training.config import default_config


def get_config():
    config = default_config()
    config.weights = "vit_pico_patch4_28.fashion_mnist"
    config.sweep = (
        "data.name=digits|digits_cluttered",
        "trainable=mha|fc1|fc2|ln1|ln2|emb|all",
        "learning_rate=2e-3|6e-3|2e-2|6e-2",
        "seed=0|1",
    )
    config.data.crop_scale = ()
    config.data.shift = 0.1
    config.data.flip = False
    config.batch_size = 32
    config.steps = 60
    config.warmup_steps = 6
    config.optimizer = "adamw"
    config.eval_every = 60
    config.checkpoint_every = 60
    config.log_every = 10
    config.measure.protocol = "reference"
    return config
