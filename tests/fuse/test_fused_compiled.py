"""How decode steps are compiled."""

import functools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import IndentedBuffer, fresh_cache
from torch._subclasses import FakeTensorMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from graphmod import torch_private
from graphmod.decode import DecodeEngine
from graphmod.decode.step import MOST_STOPS
from graphmod.fuse import inductor
from graphmod.fuse.program import cut, graph_of
from tests.support.step_programs import program_of

WAIT, LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


def filtered(lines, early=True, late=False):
    code = IndentedBuffer()
    code.writelines(lines)
    kernel = TritonKernel.__new__(TritonKernel)
    kernel._enable_pdl_codegen = lambda: early
    with inductor.every_kernel_waits_first(late):
        kernel._filter_pdl(code)
    return list(map(str, code._lines))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["xoffset = 1", "tl.store(p, 0)"], ["xoffset = 1", "tl.store(p, 0)"]),
        (["x = tl.load(q)", WAIT, "y = tl.load(p)", WAIT, LAUNCH], ["x = tl.load(q)", "y = tl.load(p)"]),
        (["for i in range(2):", f"    {WAIT}", "    y = tl.load(p)"], ["for i in range(2):", "    y = tl.load(p)"]),
    ],
)
def test_a_kernel_that_is_launched_early_waits(lines, expected):
    assert filtered(lines) == [LAUNCH, WAIT, *expected]


def test_the_next_kernel_may_start_after_the_last_load():
    lines = [WAIT, "x = tl.load(q)", LAUNCH, WAIT, "y = tl.load(p)", LAUNCH, "tl.store(p, 0)"]
    assert filtered(lines, late=True) == [WAIT, "x = tl.load(q)", "y = tl.load(p)", LAUNCH, "tl.store(p, 0)"]
    assert filtered(["x = tl.load(q)", LAUNCH], late=True) == [WAIT, "x = tl.load(q)", LAUNCH]


def test_kernels_that_others_compile_meanwhile_are_left_alone():
    lines = ["x = tl.load(q)"]
    assert filtered(lines, early=False) == lines


def test_other_compilations_are_left_alone():
    before = TritonKernel._filter_pdl
    with pytest.raises(ZeroDivisionError), inductor.every_kernel_waits_first(late=False):
        raise ZeroDivisionError
    assert TritonKernel._filter_pdl is before


def test_the_stops_of_a_row_are_looked_at_one_by_one():
    assert MOST_STOPS <= inductor.MOST_UNROLLED


@pytest.mark.parametrize("tuned", [False, True])
def test_a_piece_computes_and_changes_what_it_does_uncompiled(tuned, monkeypatch):
    monkeypatch.setattr(inductor, "generated_can", lambda: False)
    weight, x, out, count = (
        torch.randn(32, 16),
        torch.randn(1, 16),
        torch.zeros(1, 32),
        torch.zeros((), dtype=torch.int64),
    )

    def step():
        out.copy_(torch.nn.functional.linear(torch.nn.functional.silu(x), weight))
        count.add_(1)

    program, inputs = program_of(step)
    (piece,) = cut(program)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(inputs[number]) for number in piece.inputs]
    run = inductor.compile_graph(graph_of(piece), given, tuned)
    before = int(count)
    out.zero_()
    with torch.inference_mode():
        assert not run(*[inputs[number] for number in piece.inputs]), "it returns nothing"
    torch.testing.assert_close(out, torch.nn.functional.silu(x) @ weight.t())
    assert count == before + 1


STARTED = """
import sys
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from tests.support.step_programs import program_of
from graphmod.fuse.inductor import compile_graph
from graphmod.fuse.program import cut, graph_of
from torch.fx.experimental.symbolic_shapes import ShapeEnv

x, weight, out = torch.ones(2, 16), torch.ones(32, 16), torch.zeros(2, 32)
program, inputs = program_of(lambda: out.copy_(torch.nn.functional.silu(torch.nn.functional.linear(x, weight))))
(piece,) = cut(program)
with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
    given = [torch.zeros(one.shape) for one in (inputs[number] for number in piece.inputs)]
compile_graph(graph_of(piece), given, sys.argv[1] == "tuned")
print(dict(counters["aot_autograd"]))
"""


@pytest.mark.slow  # which compiles C++
@pytest.mark.parametrize("mode", ["plain", "tuned"])
def test_a_second_process_neither_traces_nor_compiles(mode, tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def start():
        command = [sys.executable, "-c", STARTED, mode]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "'autograd_cache_saved': 1" in start()
    assert "'autograd_cache_hit': 1" in start()


def branches_of(code):
    """What the programs of each generated kernel do, in the text of a module: of kernels in one each by itself."""
    for body in re.findall(r"\ndef triton_\w+\([^\n]*\):\n(.*?)'''", code, re.DOTALL):
        yield from body.split("pid_offset = pid")[1:] or [body]


@pytest.mark.gpu
@pytest.mark.slow  # which compiles
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_every_generated_kernel_waits_before_it_touches_memory(rows, monkeypatch):
    if not inductor.generated_can():
        pytest.skip("kernels cannot be launched early here")
    config = Qwen3Config(
        hidden_size=256, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=4096, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    modules = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(modules.append))
    with fresh_cache():
        engine = DecodeEngine(model, max_batch_size=rows, max_seq_len=128, buckets=[rows], compile="default")
        engine.generate([[number + 1] * 8 for number in range(rows)], max_new_tokens=40)
    branches = [one for code in modules for one in branches_of(code)]
    assert len(branches) > 10
    for one in branches:
        touches = re.search(r"tl\.(load|store|atomic)", one).start()
        assert one.count(WAIT) == 1 and one.index(WAIT) < touches, one
        if rows == 1:  # after its loads
            assert one.count(LAUNCH) <= 1 and one.find(LAUNCH) not in range(one.find("tl.load") + 1), one
        else:
            assert one.count(LAUNCH) == 1 and one.index(LAUNCH) < one.index(WAIT), one


def test_triton_asks_for_the_version_of_the_assembler_again(monkeypatch):
    assembler = ["of Triton"]
    asked = functools.cache(lambda: assembler[0])
    tasks = SimpleNamespace(_set_triton_ptxas_path=lambda: assembler.__setitem__(0, "of PyTorch"))
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.compile_tasks", tasks)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", SimpleNamespace(get_ptxas_version=asked))
    assert asked() == "of Triton"
    settle = torch_private.settle_assembler.__wrapped__
    settle()
    assert asked() == "of PyTorch"
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", SimpleNamespace())
    settle()  # there may be none to ask


DECODED = """
import torch
from torch._inductor.async_compile import AsyncCompile
from transformers import Qwen3Config, Qwen3ForCausalLM
from graphmod.decode import DecodeEngine

config = Qwen3Config(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=4096, max_position_embeddings=256,
)
model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
engine = DecodeEngine(model, max_batch_size=4, max_seq_len=128, buckets=[1, 4], compile="default")
engine.generate([[1, 2, 3]], max_new_tokens=2)  # which uses Triton
AsyncCompile.wait_pool_ready()
engine.warm_up()
"""


@pytest.mark.gpu
@pytest.mark.slow  # which compiles
def test_a_second_process_compiles_no_kernel_again(tmp_path):
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"},
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip

    def kernels():
        subprocess.run([sys.executable, "-c", DECODED], env=environment, check=True)
        return sorted(str(path) for path in (tmp_path / "triton").glob("*/*.cubin"))

    first = kernels()
    assert first and kernels() == first
