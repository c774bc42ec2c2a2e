"""One file for each format of a checkpoint: how it is recognized and described, without running anything of it.

A format of one file has what :class:`~lightning_gpu_tools.checkpoints.describing.FileFormat` says. One of several files
has ``describe``, which returns how their contents become one, and says what one of its files alone is.
``torch_files`` loads what was described, by torch where the format is torch's.
"""
