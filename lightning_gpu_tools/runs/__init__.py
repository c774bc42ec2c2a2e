"""The measurement of one run, from its start to its report."""
