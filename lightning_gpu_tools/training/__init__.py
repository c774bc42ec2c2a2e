"""Measurements of training, independent of Lightning."""
