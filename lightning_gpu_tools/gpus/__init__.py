"""What the driver says of the GPUs."""
