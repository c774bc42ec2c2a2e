"""What is measured of a training, whatever drives it: its phases, GPU gaps, workers, memory, ranks."""
