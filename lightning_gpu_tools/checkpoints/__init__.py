"""Checkpoint files: what is in them, whose weights they hold, and how they are written whole or not at all."""
