"""Checkpoint files: their contents, the models that their weights fit, and all-or-nothing writing."""
