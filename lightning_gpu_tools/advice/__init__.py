"""From measurements to what holds a training up and what to change."""
