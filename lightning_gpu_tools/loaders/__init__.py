"""Find, try out and set the settings of DataLoaders while they are in use."""
