"""`generate.py`: its command line and settings, prompts, output."""
