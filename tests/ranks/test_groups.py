"""Process groups that overlap, and that come later: those that hang together vote together, and none waits for ever."""

import pytest

from tests.ranks import groups
from tests.support import pool


@pytest.fixture(scope="module")
def ranks():
    with pool.Ranks("cpu", 3) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", groups.GROUPS)
def test_ranks_in_groups_of_any_kind_have_the_numbers_of_eager(ranks, kind):
    found = ranks.run(groups.communicates, kind, timeout=60)
    assert all(equal for equal, *_ in found)
    assert all(replays > 3 and state == "captured" for _, replays, state, _ in found), found
    if kind != "apart":
        assert len({replays for _, replays, *_ in found}) == 1, found


def test_ranks_that_say_nothing_are_named(ranks):
    said = ranks.run(groups.meets_without_the_last)
    assert "ranks [2, 1, 0] meet, and nothing came from [2]" in said[0] and "from [2]" in said[1]
