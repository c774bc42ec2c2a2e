"""Advice from measurements: what slows a training down, and what to change."""
