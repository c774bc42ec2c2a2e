"""A training run's report: as data, as text, as a picture, and beside another one."""
