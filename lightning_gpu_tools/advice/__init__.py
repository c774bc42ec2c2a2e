"""Advice from measurements: what slows training down, and what to change."""
