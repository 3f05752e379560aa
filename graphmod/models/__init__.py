"""What transformers models do, as their own code says it when it runs."""
