"""DataLoader settings: the search for better ones, and the hand-over to them."""
