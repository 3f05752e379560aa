"""Spares tests, and the copies of processes that they start, a wait that no test needs."""

import os

os.fsync = lambda handle: None  # no test loses its power, and a busy disk takes a second for a checkpoint
