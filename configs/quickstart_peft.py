"""LoRA, Adapter and VPT-deep beside their AOFT forms on digits: the best of 3 learning rates on validation, 3 seeds.

  python -m vitplast_jax.sweep --config configs/quickstart_peft.py --workdir runs/peft
  python -m vitplast_jax.sweep --config configs/quickstart_peft.py:star --workdir runs/peft_star       (AOFT*)
  python -m vitplast_jax.sweep --config configs/quickstart_peft.py:relatives --workdir runs/relatives    (the others)
  python -m vitplast_jax.report --workdir runs/peft

54, 18 and 45 runs, 40 to 150 s each on 2 busy CPU cores; a form is compiled once for its 9. README has what the
first sweep gave.
"""

from vitplast_jax.training.config import default_config

FORMS = {
    "pairs": ("peft.method=lora|adapter|vpt-deep", "peft.projection=free|ao"),
    "star": ("peft.method=lora|adapter", "peft.projection=ao", "peft.scales=True"),
    "relatives": ("peft.method=oft|boft|hra|hta|ssf",),
}


def get_config(forms="pairs"):
    """`forms`: pairs (free and AOFT), star (AOFT*) or relatives."""
    config = default_config()
    config.weights = "vit_pico_patch4_28.fashion_mnist"
    config.peft.method = "lora"
    config.sweep = (*FORMS[forms], "learning_rate=3e-3|1e-2|3e-2", "seed=0|1|2")
    config.data.name = "digits"
    config.data.crop_scale = ()
    config.data.shift = 0.1
    config.data.flip = False
    config.batch_size = 32
    config.steps = 400
    config.warmup_steps = 40
    config.optimizer = "adamw"
    config.eval_every = 100
    config.checkpoint_every = 400
    config.log_every = 40
    config.measure.protocol = "reference"
    return config
