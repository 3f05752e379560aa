"""Several ranks: steps and layers that communicate have eager's numbers, and all ranks decide alike."""

import pytest
import torch

from graphmod.ranks.reducer import uses_alone
from tests.ranks import habits, programs
from tests.support.processes import finished
from tests.support.ranks import Ranks
from tests.support.settings import ROOT

TWO_GPUS = torch.cuda.device_count() > 1


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    if request.param == "cuda" and not TWO_GPUS:
        pytest.skip("no two GPUs")
    with Ranks(request.param) as ranks:
        yield ranks


KINDS = [("own", "step"), ("ddp", "step"), ("ddp", "layers"), ("fsdp", "step"), ("tp", "step")]
QUICK_KINDS = [("ddp_own_buffers", "step"), ("fsdp_whole", "step"), ("fsdp_bf16", "step")]
QUICK_KINDS += [("fsdp", "layers"), ("tp", "layers")]
SLOW_KINDS = [("fsdp_whole", "layers"), ("fsdp_bf16", "layers")]


@pytest.mark.parametrize(
    ("kind", "how", "microbatches"),
    [
        *((*one, 3) for one in (*KINDS, *QUICK_KINDS)),
        *((*one, 1) for one in KINDS),
        *(pytest.param(*one, 3, marks=pytest.mark.slow) for one in SLOW_KINDS),
        *(pytest.param(*one, 1, marks=pytest.mark.slow) for one in (*QUICK_KINDS, *SLOW_KINDS)),
    ],
)
def test_training_has_the_numbers_of_eager(ranks, kind, how, microbatches):
    for equal, changing, stats in ranks.run(programs.trains_as_eager, kind, how, microbatches):
        assert equal and changing
        kept = programs.STEPS // 2  # those of warm-up calls are fewer than half
        assert all(state == "captured" and replays > kept and not why for state, replays, why in stats), stats


def test_layers_around_sharded_modules_are_eager_and_say_so(ranks):
    for equal, _, stats in ranks.run(programs.trains_as_eager, "fsdp_inside", "layers", 1):
        assert equal
        assert all(state == "disabled" and not replays and "whole step" in said for state, replays, said in stats), (
            stats
        )


def test_gradients_are_the_mean_over_ranks(ranks):
    assert ranks.run(programs.averages) == ["captured"] * 2


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "sharded"])
@pytest.mark.parametrize("how", programs.PARTS)
def test_a_rank_that_goes_another_way_takes_the_others_along(ranks, how, sharded):
    found = ranks.run(programs.parts_ways, how, sharded)
    assert all(equal for equal, *_ in found)
    replays = {one[1] for one in found}
    assert len(replays) == 1, found  # of no rank alone
    if how in ("shape", "scale", "moved", "fails", "fails_inside", "fails_late", "reset"):
        assert replays.pop() > 8
    other = 1 if how == "reset" else 0
    assert any(f"rank {1 - other} does" in one or "another rank" in one for one in found[other][3]), found


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"static_graph": True}, None),
        ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, None),
    ],
    ids=["unused", "static", "small buckets"],
)
def test_what_is_not_supported_stays_eager(ranks, settings, why):
    for state, said in ranks.run(programs.refuses, settings):
        assert (state, why in said) == ("disabled", True) if why else (state, said) == ("captured", "")


@pytest.mark.parametrize("layers", [False, True], ids=["step", "layers"])
@pytest.mark.parametrize(
    "habit",
    [
        *("looks meanwhile", "reentrant", "reentrant twice", "static unused", "unfrozen", "small buckets", "terms"),
        *("hooked", "terms in one bucket", "static accumulated"),
    ],
)
def test_habits_have_the_numbers_of_eager(ranks, habit, layers):
    if habit == "looks meanwhile" and (ranks.device == "cuda" or torch.__version__ < "2.12"):
        pytest.skip("eager raises there: the broadcast of buffers counts as a change of what the backward needs")
    for equal, replays, why in ranks.run(habits.as_eager, habit, layers):
        assert equal
        counts = habit == "static accumulated" and not layers  # which a step may not do as it runs
        assert replays > 5 or "reentrant" in habit or counts, why


@pytest.mark.parametrize(("habit", "said"), [("sparse", "sparse gradients"), ("replicate", "DistributedDataParallel")])
def test_other_reductions_stay_eager(ranks, habit, said):
    if habit == "sparse" and ranks.device == "cuda":
        pytest.skip("eager raises there: NCCL has no sparse sums")
    for equal, replays, why in ranks.run(habits.as_eager, habit, False):
        assert equal and not replays and said in why


@pytest.mark.parametrize("kind", ["inside", "fully_shard", "tensor parallelism"])
def test_compiled_models_are_captured_on_several_ranks(ranks, kind):
    for equal, state, replays, why in ranks.run(habits.compiles, kind):
        assert equal and (state, replays) == ("captured", 7), why


@pytest.mark.parametrize("kind", ["own loop", "full_iteration"])
def test_a_compiled_backward_has_a_piece_for_each_bucket_of_gradients(ranks, kind):
    for eager, captured, equal in ranks.run(habits.compiles_in_pieces, kind):
        assert equal and eager == captured and min(eager) > 2, (eager, captured)


def test_layers_that_are_compiled_one_by_one_stay_whole(ranks):
    """Though each of these three has more parameters than a bucket."""
    for _, captured, _ in ranks.run(habits.compiles_in_pieces, "per_layer"):
        assert max(captured) == 3


def test_split_embeddings_and_losses_are_captured(ranks):
    for equal, state, replays, why in ranks.run(habits.splits_the_vocabulary):
        assert equal and (state, replays) == ("captured", 7), why


def test_a_compiled_reducer_stays_eager_and_is_told_where_to_compile(ranks):
    for equal, state, _, why in ranks.run(habits.compiles, "around"):
        assert equal and state == "disabled" and "DistributedDataParallel(torch.compile(model))" in why


@pytest.mark.parametrize("grads", [False, True])
def test_a_rank_may_look_at_the_module_inside_alone(ranks, grads):
    assert ranks.run(habits.looks_alone, grads) == [True, True]


@pytest.mark.parametrize("how", ["early", "late"])
def test_join_stays_eager_or_is_refused(ranks, how):
    for equal, why in ranks.run(habits.joins, how):
        assert equal and "join()" in why


@pytest.mark.parametrize("inside", [True, False])
def test_evaluations_of_what_is_inside_are_captured_and_others_are_told_so(ranks, inside):
    """DistributedDataParallel notes in each forward whether it has to give ranks the same buffers in the next."""
    for said in ranks.run(habits.evaluates, inside):
        assert inside or all("ddp.module(...)" in why for _, why in said)
        assert not inside or said == [("captured", "")] * 2


def test_messages_between_two_ranks_are_repeated(ranks):
    assert ranks.run(habits.sends) == [(True, "captured")] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_votes_are_of_all_ranks_on_one_machine_and_on_several(ranks, hosts):
    first, second = ranks.run(programs.votes, hosts)
    assert first == second
    assert first == [tuple(sorted((index % 3, 2 * index % 3))) for index in range(60)]


def test_shapes_that_a_dtensor_finds_in_the_recorded_call_are_no_hazard(ranks):
    assert ranks.run(programs.finds_shapes_anew) == [("captured", 0, "")] * 2


def test_a_rank_that_does_not_come_is_named(ranks):
    assert "rank 1" in ranks.run(programs.comes_late)[0]


def test_a_rank_that_is_killed_is_named_at_once():
    with Ranks("cpu") as ranks:
        said = ranks.run_on_first(programs.ends_early, timeout=30)
    assert "rank 1 has ended, and did not make this call" in said


def test_gradients_lie_still_unless_somebody_keeps_them(ranks):
    assert ranks.run(programs.keeps_gradients) == [(True, True)] * 2


def test_gradients_of_matrices_are_computed_into_their_bucket(ranks):
    for state, aimed, matrices in ranks.run(programs.computes_in_place):
        assert state == "captured" and set(matrices) <= set(aimed)


def test_whether_memory_is_shared_is_told_in_any_mode():
    expected = uses_alone()
    uses_alone.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        assert uses_alone() == expected
    assert None not in expected


@pytest.mark.parametrize(
    ("settings", "before"),
    [
        *(({}, before) for before in (0, 1, 3)),
        *(({"static_graph": True}, 1), ({"gradient_as_bucket_view": True}, 3)),
        *(pytest.param({"static_graph": True}, before, marks=pytest.mark.slow) for before in (0, 3)),
        *(pytest.param({"gradient_as_bucket_view": True}, before, marks=pytest.mark.slow) for before in (0, 1)),
    ],
    ids=str,
)
def test_looking_at_a_ddp_leaves_it_as_it_was(ranks, settings, before):
    for found in ranks.run(habits.is_looked_at, settings, before):
        for as_found, equal, replays in found:
            assert as_found and equal and replays, found


@pytest.mark.parametrize(
    "how",
    [
        *("inside, none", "outside, zeros", "never"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("inside, zeros", "outside, none")),
    ],
)
def test_gradients_of_sharded_parameters_are_cleared_in_any_way(ranks, how):
    for equal, replays, moved, why in ranks.run(habits.clears_sharded, how):
        assert equal and replays > 4 and not moved, (equal, replays, moved, why)


def test_code_may_look_at_sharded_parameters_while_they_are_whole(ranks):
    for equal, replays, why in ranks.run(habits.asks_of_sharded):
        assert equal and replays > 3, (equal, replays, why)


def test_a_copy_is_trained_by_itself(ranks):
    assert ranks.run(programs.copies) == [True, True]


def test_a_parameter_without_gradient_is_named(ranks):
    for said in ranks.run(programs.forgets_a_parameter):
        assert "unused.weight" in said and "find_unused_parameters=True" in said


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_ends_though_its_graphs_live(device):
    """NCCL waits in `destroy_process_group` for graphs with collectives, for ever."""
    if device == "cuda" and not TWO_GPUS:
        pytest.skip("no two GPUs")
    with Ranks(device) as ranks:
        ranks.run(programs.keeps_its_graphs)
        said, _ = ranks.run(programs.stays_away)
        assert "rank 1" in said and "did not make this call" in said
        assert ranks.end() == (["ended"] * 2, [0, 0])


@pytest.mark.parametrize(("mesh", "part"), [((8,), "(16, 32)"), ((4, 2), "(16, 32)")], ids=["fsdp", "fsdp x tp"])
def test_eight_ranks_share_a_model(mesh, part):
    done = finished(["-m", "tests.ranks.eight", *mesh], ROOT, timeout=120)
    assert done.stdout.strip() == f"captured 5 {part}", done.stdout + done.stderr
