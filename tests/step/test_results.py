"""What a call returned never changes in the caller's hands, whatever runs afterwards."""

import gc
import weakref

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import GRAPHS, config, graphs, loss_of, mlp, play, train, twins, two


def run(build, step, device, graph, **settings):
    make, replays = GRAPHS[graph]
    return twins(build, step, device, graph=make(), replays=replays, **settings)


KEPT = {
    "outputs": lambda output, loss: output,
    "detached outputs": lambda output, loss: output.detach(),
    "views of outputs": lambda output, loss: output[:, 1:3].T,
    "losses": lambda output, loss: loss,
    "detached losses": lambda output, loss: loss.detach(),
    "shapes over the same memory": lambda output, loss: output.view(-1).unsqueeze(0),
}


@graphs
@pytest.mark.parametrize("what", KEPT)
def test_a_list_of_results_keeps_its_values(what, graph, device):
    def step(side, i):
        side.kept = getattr(side, "kept", [])
        output = side.call(side.batch(i, 4, 8))
        loss = loss_of(output)
        loss.backward()
        side.kept.append(KEPT[what](output, loss))
        side.note(kept=side.kept)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    run(two, step, device, graph)


@graphs
def test_a_list_of_results_of_evaluation_keeps_its_values(graph, device):
    def step(side, i):
        side.kept = getattr(side, "kept", [])
        with torch.no_grad():
            side.kept.append(side.call(side.batch(i, 4, 8)))
            side.kept.append(side.call(side.batch(i, 4, 8, key=1)).view(-1)[3:])
        side.note(kept=side.kept)

    run(two, step, device, graph)


@graphs
def test_the_result_of_the_step_before_can_be_compared_with(graph, device):
    """`prev = out`, as in a consistency loss."""

    def step(side, i):
        output = side.call(side.batch(i, 4, 8))
        loss = loss_of(output)
        if i:
            loss = loss + (output - side.before.detach()).pow(2).mean()
        loss.backward()
        side.before = output
        side.note(loss=loss)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    run(two, step, device, graph)


@graphs
def test_a_result_goes_into_the_next_call(graph, device):
    """A recurrent state that is carried, detached, from step to step."""

    def step(side, i):
        state = side.state_ if i else side.batch(0, 4, 8)
        output = side.call(state)
        loss_of(output).backward()
        side.state_ = output.detach()
        side.note(output=output)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    run(two, step, device, graph)


@graphs
def test_truncated_backpropagation_through_time(graph, device):
    def step(side, i):
        state = side.state_ if i else side.batch(0, 4, 8)
        for key in range(3):
            state = side.call(state + side.batch(i, 4, 8, key=key))
        loss_of(state).backward()
        side.state_ = state.detach()
        side.note(state=state)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    make, replays = GRAPHS[graph]
    twins(two, step, device, graph=make(), replays=3 * replays)


@graphs
def test_two_results_of_one_graph_in_one_expression(graph, device):
    """Both calls replay the same forward graph before the results are used."""

    def step(side, i):
        with torch.no_grad():
            first, second = side.call(side.batch(i, 4, 8)), side.call(side.batch(i, 4, 8, key=1))
            return first - second, first.tanh(), second

    make, replays = GRAPHS[graph]
    twins(two, step, device, graph=make(), replays=replays)


@graphs
def test_a_skipped_backward_does_not_corrupt_the_next_step(graph, device):
    def step(side, i):
        if i % 3 == 2:
            loss = loss_of(side.call(side.batch(i, 4, 8, key=7)))
            side.note(skipped=loss)
            del loss
        train(side, i)

    _, history = play(two, step, device, graph=GRAPHS[graph][0](), steps=18)
    assert history[-1][0] - history[-2][0] >= GRAPHS[graph][1]


@graphs
def test_a_skipped_backward_whose_loss_lives_on(graph, device):
    """`loss` is a variable that the next step overwrites only after its own forward."""

    def step(side, i):
        side.loss = loss_of(side.call(side.batch(i, 4, 8)))
        side.note(loss=side.loss)
        if i % 3 != 2:
            side.loss.backward()
            side.note_gradients()
            side.optimizer.step()
            side.optimizer.zero_grad()

    _, history = play(two, step, device, graph=GRAPHS[graph][0](), steps=24)
    assert history[-1][0] > 24


@graphs
def test_losses_that_never_see_a_backward_and_are_all_kept(graph, device):
    """Memory is the user's affair; the numbers are ours."""

    def step(side, i):
        side.kept = getattr(side, "kept", [])
        side.kept.append(loss_of(side.call(side.batch(i, 4, 8))))
        side.note(kept=side.kept)

    play(two, step, device, graph=GRAPHS[graph][0]())


@graphs
def test_a_backward_that_comes_a_step_late_is_right_or_an_error(graph, device):
    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8)))
        late, side.late = getattr(side, "late", None), loss
        if late is not None:
            late.backward()
        side.note_gradients()
        side.optimizer.zero_grad()

    _, history = play(two, step, device, graph=GRAPHS[graph][0](), steps=16)
    assert history[-1][0] > 8


@graphs
def test_a_cycle_that_holds_the_loss_until_the_collector_runs(graph, device):
    def step(side, i):
        class Holder:
            pass

        holder = Holder()
        holder.me, holder.loss = holder, loss_of(side.call(side.batch(i, 4, 8)))
        side.held = [one for one in getattr(side, "held", []) if one() is not None]
        if i % 4 == 3:
            # Only what is old has to be looked for everywhere, which takes as long as many steps.
            for generation in range(3) if side.graphed else ():
                if any(one() is not None for one in side.held):
                    gc.collect(generation)
            assert not side.graphed or all(one() is None for one in side.held)
        side.held.append(weakref.ref(holder))
        if i % 4 != 3:
            holder.loss.backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(two, step, device, graph=GRAPHS[graph][0](), steps=12)


def test_numpy_views_of_results_keep_their_values():
    def step(side, i):
        side.kept = getattr(side, "kept", [])
        with torch.no_grad():
            side.kept.append(side.call(side.batch(i, 4, 8)).numpy())
        side.note(kept=[value.tolist() for value in side.kept])

    twins(mlp, step, torch.device("cpu"), replays=1)


@graphs
def test_copied_outputs_keep_their_values_too(graph, device):
    def step(side, i):
        side.kept = getattr(side, "kept", [])
        output = side.call(side.batch(i, 4, 8))
        side.kept.append(output)
        loss_of(output).backward()
        side.note(kept=side.kept)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    make, replays = GRAPHS[graph]
    twins(two, step, device, graph=make(clone_outputs=True), replays=replays)


def test_a_result_whose_storage_the_caller_moves_has_no_part_in_later_ones(device):
    """`share_memory_`, and whatever sends tensors to other processes, moves the storage itself."""
    net = nn.Linear(4, 4).to(device)
    module = CUDAGraphModule(net, config())
    for i in range(8):
        x = torch.full((3, 4), float(i), device=device)
        y = module(x)
        assert torch.equal(y, net(x))
        y.sum().backward()
        module.zero_grad()
        y.detach().share_memory_()
        del y


def test_a_change_of_what_a_result_once_was_is_no_change_of_the_next(device):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()).to(device)  # whose backward reads its result
    module = CUDAGraphModule(net, config())
    for _ in range(8):
        before = module(torch.ones(3, 4, device=device))
        before.sum().backward()
        kept = before.detach()
        del before
        kept.data = kept.data.clone()  # as offloading does
        now = module(torch.ones(3, 4, device=device))
        kept.add_(1)
        now.sum().backward()
        module.zero_grad()
    assert module.stats.replays > 4
