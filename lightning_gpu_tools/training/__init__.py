"""Watching a fit: the GPUs from a background thread, the training's phases from its own."""
