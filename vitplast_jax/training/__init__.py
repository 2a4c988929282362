"""Training: config, optimizer, step, checkpoints, metrics and the loop that joins them."""
