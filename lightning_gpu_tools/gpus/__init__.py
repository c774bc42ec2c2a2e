"""GPU readings and metrics from the driver."""
