"""Packaging. Ranges let pip choose; `requirements.txt` holds the versions that were tested together.

Flax 0.12.8 and 0.12.9 fail to import on jax 0.11, so the two move as a pair: one below Python 3.12, one from there.
"""

from setuptools import find_packages, setup

setup(
    name="vitplast_jax",
    version="0.1.0",
    description="Which part of a Vision Transformer to finetune, and finetuning it, in JAX",
    license="Apache-2.0",
    packages=find_packages(include=["vitplast_jax", "vitplast_jax.*"]),
    package_data={"vitplast_jax": ["assets/*", "CHANGELOG.md"]},
    python_requires=">=3.11",
    install_requires=[
        'jax>=0.10.2,<0.11; python_version < "3.12"',
        'jax>=0.11.1,<0.13; python_version >= "3.12"',
        'flax>=0.12.8,<0.12.10; python_version < "3.12"',
        'flax>=0.12.12,<0.13; python_version >= "3.12"',
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "tensorflow-datasets>=4.9.10,<5",
        "ml-collections>=1.1.0,<2",
        "einops>=0.8.1,<0.9",
        "etils[epath]>=1.15,<2",
        "chex>=0.1.91,<0.2",
        "grain>=0.2.18,<0.3",
        "absl-py>=2.3.1,<3",
        "numpy>=2.2,<3",
        "ml_dtypes>=0.5.1,<1",
        "scipy>=1.15,<2",
        "pillow>=11.1,<14",
        "matplotlib>=3.10,<4",
        "scikit-learn>=1.6.1,<2",
        "huggingface_hub>=1.0,<3",
        "tqdm>=4.67,<5",
    ],
    extras_require={
        "test": ["pytest>=9,<10", "pytest-xdist>=3.8,<4", "ruff==0.17.6", "safetensors>=0.5,<1", "tokenizers>=0.21,<1"],
        "parity": ["torch>=2.6", "torchvision>=0.21", "timm>=1.0.15", "transformers>=5", "peft>=0.18"],
        "text": ["tokenizers>=0.21,<1"],
        "gcs": ["gcsfs>=2026.10"],  # runs in buckets
        "parquet": ["pyarrow>=19"],
        "prepare": ["tensorflow-cpu>=2.21", "importlib_resources>=6"],  # TFDS imports the second without requiring it
        "tpu": ["jax[tpu]"],
        "gpu": ["jax[cuda12]"],
    },
)
