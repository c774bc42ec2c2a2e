"""Checkpoint files: inspection, loading into models, and all-or-nothing writing."""
