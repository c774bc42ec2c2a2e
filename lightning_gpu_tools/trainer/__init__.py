"""All code that depends on Lightning; import its classes from ``lightning_gpu_tools``."""
