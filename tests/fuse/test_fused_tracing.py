"""What a compiler traces in a thread of its own does not reach the others."""

import inspect
import threading

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx
from torch._subclasses import FakeTensorMode

from graphmod import CUDAGraphConfig, CUDAGraphModule
from graphmod.fuse.inductor import compile_graph
from graphmod.fuse.program import cut, graph_of
from tests.support.step_programs import program_of


class Held:
    """A compiler that is in the middle of tracing until it may go on."""

    def __init__(self, nested):
        self.nested, self.tracing, self.may_go_on, self.found = nested, threading.Event(), threading.Event(), None

    def __call__(self, graph, inputs, config_patches=None):
        def traced(x):
            self.tracing.set()
            assert self.may_go_on.wait(30)
            return x + 1

        def outer(x):
            torch.fx.symbolic_trace(traced)
            return x * 2

        torch.fx.symbolic_trace(outer if self.nested else traced)
        return graph

    def compile(self):
        with torch.inference_mode():
            x = torch.ones(4)
            program, _ = program_of(lambda: x.mul_(2))
        graph = graph_of(cut(program)[0])
        with FakeTensorMode():
            inputs = [torch.ones(4)]
        self.found = compile_graph(graph, inputs, False)


@pytest.mark.parametrize("nested", [False, True])
def test_modules_compiled_code_and_graphs_run_while_another_thread_traces(nested, device, monkeypatch):
    held = Held(nested)
    monkeypatch.setattr(compile_fx, "compile_fx", held)
    monkeypatch.setattr(torch.fx.Tracer, "trace", inspect.unwrap(torch.fx.Tracer.trace))  # as who puts it back
    thread = threading.Thread(target=held.compile)
    layer, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    graph = CUDAGraphModule(layer, CUDAGraphConfig(warmup_steps=1))
    compiled = torch.compile(layer.forward, backend="eager")
    call, lookup = nn.Module.__call__, nn.Module.__getattr__
    with torch.no_grad():
        expected = layer(x)
        graph(x)
        thread.start()
        try:
            assert held.tracing.wait(30)
            assert nn.Module.__call__ is call and nn.Module.__getattr__ is lookup
            for run in (layer, compiled, graph, graph, graph):
                assert torch.equal(run(x), expected)
        finally:
            held.may_go_on.set()
            thread.join()
    assert held.found is not None and graph.stats.replays == 3
    torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))  # of others, as before
    assert nn.Module.__call__ is call and not torch.fx._symbolic_trace._is_fx_tracing_flag
