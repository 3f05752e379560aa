"""Prompts on their way into the KV cache."""
