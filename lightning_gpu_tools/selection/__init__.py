"""GPU selection: visibility, ranking, and claims."""
