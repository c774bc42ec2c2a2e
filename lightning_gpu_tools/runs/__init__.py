"""The measurement of one training, from its start to its report."""
