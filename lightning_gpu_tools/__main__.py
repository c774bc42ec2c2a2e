"""``python -m lightning_gpu_tools``, the same as the command ``lightning-gpu-tools``."""

from lightning_gpu_tools.cli import script

script()
