"""What `import graphmod` brings along, and how long it takes."""

import subprocess
import sys

import pytest

import graphmod.decode


def test_importing_brings_no_other_library():
    code = (
        "import time, torch; begin = time.perf_counter(); import graphmod, sys; "
        "print(time.perf_counter() - begin, *{'hydra', 'transformers', 'tensorboard', 'omegaconf', 'triton'} & "
        "{name.partition('.')[0] for name in sys.modules}, "
        "*[name for name in ('torch._dynamo', 'torch._inductor', 'graphmod.train', 'graphmod.decode') "
        "if name in sys.modules])"
    )
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert len(run.stdout.split()) == 1, run.stdout
        if float(run.stdout) < 0.5:  # 0.05 on a machine that does nothing else
            return
    raise AssertionError(f"it takes {run.stdout} s")


def test_names_for_users_come_with_their_first_use():
    code = (
        "import sys, graphmod; assert set(graphmod.__all__) <= set(dir(graphmod)); assert 'torch' not in sys.modules; "
        "graphmod.CUDAGraphConfig(); import graphmod.check.cli; assert 'torch' not in sys.modules; "
        "from graphmod import CUDAGraphModule, graph_layers, ungraph, mark_static, check; "
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules; "
        "assert graphmod.graph_layers is graph_layers and callable(check)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_training_run_loads_no_engine():
    code = "import sys, graphmod.cli.job; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "graphmod.train.run" in done.stdout and "'peft'" not in done.stdout
    assert not any(name in done.stdout for name in ("graphmod.decode.engine", "graphmod.decode.step", "graphmod.fuse"))
    of_others = ("graphmod.train.compare", "graphmod.train.auto", "graphmod.train.profile", "graphmod.cli.launch")
    assert not any(name in done.stdout for name in of_others)


@pytest.mark.parametrize("package", [graphmod, graphmod.decode])
def test_each_name_is_there_under_that_name(package):
    for name in package.__all__:
        found = getattr(package, name)
        assert found.__name__.rpartition(".")[2] == name


def test_a_name_that_there_is_not_is_an_attribute_error():
    for package in (graphmod, graphmod.decode):
        assert not hasattr(package, "nonsense")
