"""Products of few rows with the weights of linear layers, as compiled decode steps compute them."""
