"""Causes of out-of-memory errors. All sizes are in bytes."""
