"""How a result leaves the memory of its graph: on the CPU most are copied at once, so this looks at the part itself."""

import pytest
import torch

from graphmod.step import static_outputs
from graphmod.step.static_outputs import StaticOutput


@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
def test_a_result_that_an_evaluation_moves_may_be_saved_for_a_backward(monkeypatch, can_swap, device):
    if can_swap and not static_outputs._can_swap:
        pytest.skip("this torch cannot move a storage")
    monkeypatch.setattr(static_outputs, "_can_swap", can_swap)
    output = StaticOutput(torch.arange(4.0, device=device), None)
    result, weight = output.hand_out(), torch.ones(4, device=device, requires_grad=True)
    with torch.inference_mode():
        assert output.evacuate()
    (result.detach() * weight).sum().backward()
    assert weight.grad.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("can_swap", [True, False], ids=["storages can be moved", "before torch 2.13"])
@pytest.mark.parametrize(
    ("mode", "counted"),
    [(torch.inference_mode, False), (torch.no_grad, False), (torch.enable_grad, False), (torch.enable_grad, True)],
)
def test_a_result_leaves_before_its_memory_is_written(monkeypatch, mode, counted, can_swap, device):
    if can_swap and not static_outputs._can_swap:
        pytest.skip("this torch cannot move a storage")
    monkeypatch.setattr(static_outputs, "_can_swap", can_swap)
    with mode():
        memory = torch.arange(4.0, device=device)
        output = StaticOutput(memory, None, counted)
        result = output.hand_out()
        view = result[1:]
        assert result.is_inference() is (mode is torch.inference_mode)
        assert result.data_ptr() == memory.data_ptr() and output.held() and not output.changed()
        assert output.evacuate() is can_swap
        if not can_swap:
            del view
            assert output.evacuate()
        memory.fill_(9)
        assert result.tolist() == [0, 1, 2, 3]

        later = output.hand_out()
        assert later.data_ptr() == memory.data_ptr()
        if mode is not torch.inference_mode:
            later.add_(1)
            assert output.changed() is counted and memory.tolist() == [10] * 4
        del later
        output.let_go()
        assert not output.held() and not output.changed() and output.evacuate()
        assert output.hand_out().data_ptr() == memory.data_ptr()
