"""One file for each format of a checkpoint: how it is recognized and described, without running anything of it."""
