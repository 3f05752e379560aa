"""The seeds of samples and prompts. Standard library only."""

_SAMPLE_STRIDE = 0x9E3779B97F4A7C15  # so that sample 1 of seed 0 is not sample 0 of seed 1
_PROMPT_STRIDE = 0xBF58476D1CE4E5B9  # another one, so that sample 0 of prompt 1 is not sample 1 of prompt 0


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def prompt_seed(seed: int, number: int) -> int:
    """The seed of prompt `number` of a call that was given one for all. The first prompt's is the seed itself, so that
    a prompt alone draws what it draws with a seed of its own."""
    return _int64(seed + number * _PROMPT_STRIDE)


def sample_seed(seed: int, number: int) -> int:
    """The seed of sample `number` of a prompt; that of the first is the prompt's own."""
    return _int64(seed + number * _SAMPLE_STRIDE)
