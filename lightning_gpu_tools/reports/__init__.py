"""A run's report as data, text, picture and page, and its comparison with another one."""
