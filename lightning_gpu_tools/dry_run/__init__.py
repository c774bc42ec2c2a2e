"""Dry runs: the first steps of an unmodified training on simulated GPUs, to measure the memory that it needs."""
