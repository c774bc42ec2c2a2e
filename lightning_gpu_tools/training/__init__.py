"""What is measured of a training, without Lightning."""
