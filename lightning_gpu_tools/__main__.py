"""``python -m lightning_gpu_tools``, the same as the command ``lightning-gpu-tools``."""

import sys

from lightning_gpu_tools.cli import main

sys.exit(main())
