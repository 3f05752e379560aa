"""Every function that torch has samples of: its graph against eager, forward and backward, bit for bit.

`python tests/trace/operators.py` goes through all of them, each in a process that may die, and prints what differs,
what is refused and why; `python tests/trace/operators.py add prod` through those named. It takes some minutes. A few
are in the suite, in `test_operators.py`.
"""

import contextlib
import itertools
import subprocess
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphmod import CUDAGraphConfig, CUDAGraphModule

WARMUP, CALLS, SAMPLES = 2, 6, 3
AT_A_TIME = 40  # functions for one process


def database() -> dict[str, Any]:
    """The functions with samples, by name and variant."""
    if "expecttest" not in sys.modules:  # torch's tests need it, its samples do not
        stub = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations

        # That import forbids the process to set flags of backends but in a context; other tests set them.
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)  # would seed inside
    op_db = invocations.op_db
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


class Outcome(NamedTuple):
    """What became of one sample: `equal`, `refused`, `different` or `raises`; in words what and why."""

    kind: str
    told: str = ""


def arguments(op: Any, device: torch.device, number: int, seed: int) -> Any:
    torch.manual_seed(seed)
    dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
    differentiable = op.supports_autograd and dtype.is_floating_point
    samples = op.sample_inputs_func(op, device, dtype, differentiable)  # `sample_inputs` would seed them alike
    found = next(itertools.islice(samples, number, None), None)
    return found and ((found.input, *found.args), found.kwargs)


def with_tensors_of(first: Any, other: Any) -> Any:
    """Arguments as in a first call, but for the values of tensors; the same again if other things differ, too."""
    leaves, structure = tree_flatten(first)
    others, again = tree_flatten(other)

    def kind(leaf: Any) -> Any:
        return (leaf.shape, leaf.dtype, leaf.layout) if isinstance(leaf, Tensor) else type(leaf)

    if structure != again or list(map(kind, leaves)) != list(map(kind, others)):
        return first
    return tree_unflatten([b if isinstance(b, Tensor) else a for a, b in zip(leaves, others, strict=True)], structure)


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    plain = value.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = torch.zeros(plain.shape, dtype=plain.dtype) if plain._is_zerotensor() else plain
    plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    return value.dtype, tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def call(function: Any, values: Any, seed: int) -> list[Any]:
    """Result and gradients of one call, as bits."""
    leaves, structure = tree_flatten(values)
    own = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in leaves]
    args, kwargs = tree_unflatten(own, structure)
    torch.manual_seed(seed)
    result = function(*args, **kwargs)
    outs = tree_flatten(result)[0]
    seen = list(map(bits, outs))
    wanted = [out for out in outs if isinstance(out, Tensor) and out.requires_grad and out.grad_fn is not None]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(out) / (i + 3) for i, out in enumerate(wanted)])
    return seen + [bits(t.grad) for t in own if isinstance(t, Tensor) and t.requires_grad]


def outcome(op: Any, device: torch.device, number: int) -> Outcome | None:
    """What becomes of a function's sample of this number; None where there is none, or eager raises."""
    try:
        samples = [arguments(op, device, number, seed) for seed in range(CALLS)]
    except Exception:  # of another device, for instance
        return None
    if samples[0] is None or "empty" in op.name:  # whose values nobody knows
        return None
    first = samples[0]
    if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(first)[0]):
        return None

    def function(given: Any, *args: Any, **kwargs: Any) -> Any:
        result = op.op(given, *args, **kwargs)
        return tuple(result) if type(result).__module__ == "torch.return_types" else result

    graph = CUDAGraphModule(function, CUDAGraphConfig(warmup_steps=WARMUP))
    told = ""
    for index, one in enumerate(samples):
        values = with_tensors_of(first, one)
        try:
            expected = call(function, values, index)
        except Exception:
            return None
        try:
            got = call(graph, values, index)
        except Exception as error:
            return Outcome("raises", f"{type(error).__name__}: {error}"[:300])
        if got != expected:
            return Outcome("different", f"call {index}; {graph.stats.state}")
        told = graph.last_failure or told
    return Outcome("equal" if graph.stats.replays else "refused", told)


def outcomes(names: list[str], device: torch.device) -> Iterator[tuple[str, int, Outcome]]:
    known = database()
    for name in names:
        for number in range(SAMPLES):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = outcome(known[name], device, number)
            if found is not None:
                yield name, number, found


def _in_this_process(names: list[str]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in names:
        print(f"BEGIN {name}", flush=True)
        for _, number, found in outcomes([name], device):
            print(f"{found.kind}\t{name}[{number}]\t{found.told[:220]}", flush=True)


def _in_others(names: list[str]) -> Iterator[str]:
    while names:
        command = [sys.executable, __file__, "--here", *names[:AT_A_TIME]]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        yield from (line for line in lines if not line.startswith("BEGIN"))
        begun = [line.removeprefix("BEGIN ") for line in lines if line.startswith("BEGIN")]
        if done.returncode and begun:
            yield f"crash\t{begun[-1]}\t{done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        elif done.returncode:
            raise SystemExit(done.stderr)
        names = names[max(len(begun), 1) :]


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--here"]:
        _in_this_process(arguments[1:])
        return 0
    counts: Counter[str] = Counter()
    for line in _in_others(arguments or list(database())):
        counts[line.split("\t")[0]] += 1
        if not line.startswith("equal"):
            print(line, flush=True)
    print(dict(counts))
    return int(any(counts[kind] for kind in ("different", "raises", "crash")))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
