"""What the command cannot check."""


class Unusable(Exception):
    """What was asked for cannot be checked; the text is one sentence."""
