"""A run's report as data, text, picture and page, and beside another one."""
