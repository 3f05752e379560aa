"""`graphmod.check` in a program of several ranks: they compare what they communicate, and none hangs."""

import pytest

from tests.ranks import orders
from tests.support import pool


@pytest.fixture(scope="module")
def ranks():
    with pool.Ranks("cpu") as ranks:
        yield ranks


def test_ranks_that_agree_are_told_so(ranks):
    for captured, collectives, text in ranks.run(orders.agrees):
        assert captured and collectives == [2, 2]
        assert "The 2 ranks communicate in the same order: 2 collectives on each." in text


@pytest.mark.parametrize(
    ("how", "other"), [("branch", "broadcast from rank 0 of (4,) float32"), ("one more", "ends here")]
)
def test_ranks_that_part_are_stopped_before_they_hang_and_both_are_told(ranks, how, other):
    for told, after in ranks.run(orders.parts, how):
        assert told == [([0], "all_reduce (sum) of (3,) float32"), ([1], other)]
        assert after == 2


def test_a_rank_that_raises_stops_those_that_would_wait_for_it(ranks):
    (told, _), (raised, _) = ranks.run(orders.parts, "raises")
    assert raised == "no data" and told[1] == ([1], "raised ValueError: no data")


def test_a_rank_that_does_not_come_is_named_in_time(ranks):
    said, _ = ranks.run(orders.alone)
    assert "rank 0 waited 1 s in all_reduce (sum) of (3,) float32 at" in said
    assert "for rank 1 (rank 1 came to none before); all ranks have to make the same check" in said
