"""Images in, batches out: sources (what there is), pipeline (in which order), preprocess (what the device does).

Nothing is imported here, so that `import vitplast_jax` stays light: `from vitplast_jax.data import sources`.
"""
