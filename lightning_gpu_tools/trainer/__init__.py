"""All that knows Lightning; import its classes from ``lightning_gpu_tools``."""
