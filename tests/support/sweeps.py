"""Combinations of values, of which the tests of each change take those that hold each value once, or each pair."""

import itertools

import pytest


def sweep(pairs=False, **values):
    """Parametrizes a test with all combinations; `slow` are those of values, or of `pairs` of values, that others have
    already."""
    least, most = (which(map(len, values.values())) for which in (min, max))
    quick = {tuple(number % len(one) for one in values.values()) for number in range(most)}
    rows = []
    for numbers in itertools.product(*(range(len(one)) for one in values.values())):
        is_quick = sum(numbers) % least == 0 if pairs else numbers in quick
        row = [[*one][number] for one, number in zip(values.values(), numbers, strict=True)]
        rows.append(pytest.param(*row, marks=[] if is_quick else pytest.mark.slow))
    return pytest.mark.parametrize([*values], rows)
