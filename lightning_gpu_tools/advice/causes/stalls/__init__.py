"""Causes of stalls: training makes no progress."""
