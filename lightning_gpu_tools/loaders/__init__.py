"""DataLoader settings: the search for better ones, and switching to them."""
