"""Plasticity of GPT-2 on two texts, as in the paper's appendix: 128 tokens, attention given LN1's output.

  python -m vitplast_jax.measure --config configs/gpt2.py --workdir runs/gpt2 --config.weights=FOLDER
      --config.measure.x_path=FILE --config.data.path=FILE

FOLDER: GPT-2 as transformers stores it, with its tokenizer. FILEs: one text a line (the paper: AG News, WikiText-103).
Needs the extra `text`. Expected: no bound is known for causal attention, so the rank of its bound is empty.
"""

from vitplast_jax.training.config import default_config


def get_config():
    config = default_config()
    config.model = "gpt2"
    config.data.name = "text"
    config.data.length = 128
    config.measure.protocol = "reference"
    config.measure.pairs = 12800
    config.measure.images = 0
    config.measure.batch_size = 32
    return config
