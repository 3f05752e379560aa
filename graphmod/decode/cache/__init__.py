"""Keys and values of the tokens so far."""
