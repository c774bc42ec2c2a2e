"""The driver: what it says of the GPUs, read once or sampled in the background."""
