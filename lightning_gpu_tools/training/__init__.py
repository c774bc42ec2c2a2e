"""What is measured of a training, without Lightning: phases, steps, workers, memory, ranks."""
