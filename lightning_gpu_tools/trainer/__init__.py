"""The callbacks, one a file; import them from ``lightning_gpu_tools``."""
