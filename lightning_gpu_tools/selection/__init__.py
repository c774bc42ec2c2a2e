"""Picking GPUs: what is visible, which are best, who has claimed what."""
