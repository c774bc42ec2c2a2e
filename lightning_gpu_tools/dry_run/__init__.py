"""Dry runs: an unmodified training on GPUs that are not there, to learn how much memory it needs."""
