"""What the Python of a call reads: seen as it runs, instruction by instruction, and written into notes."""
