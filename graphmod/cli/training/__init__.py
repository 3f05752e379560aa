"""`train.py`: its command line, its settings, what follows a sweep."""
