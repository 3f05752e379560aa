"""`serve.py`: its command line and settings, the server's life."""
