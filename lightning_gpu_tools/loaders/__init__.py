"""DataLoader settings: trials of other settings, and the hand-over to the best ones."""
