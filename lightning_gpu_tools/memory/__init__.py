"""Measurements of a training's memory: counters, recorded allocations, their replay, parts, and growth."""
