"""Code that torch.compile made, inside a call that is recorded or captured.

Two things stand between the two. Dynamo compiles anew for the keys under which a recorder sees operations, steps aside
for every dispatch mode, and would go on to compile the recorder. And the kernels that inductor generates are launched
past the dispatcher. So for as long as dynamo decides what runs, operations are shown by way of a mode that it is told
to ignore; and each graph that inductor has compiled is one operation, which is shown with all that it is given.
In a trace it is compared by identity, like an operator. What surrounds a compiled graph takes views as it sees fit, of
arguments that are views; those are no part of a trace. Graphs of other backends run, and are seen, operation by
operation. A backward that was compiled writes over what its forward saved (donated buffers), so it is captured once,
and its gradients are copied into place.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphmod.torch_private import BEGINS, ENDS, EVAL_FRAME, INDUCTOR_CODE, dynamo_stance
from graphmod.trace import dispatch
from graphmod.trace.dispatch import Watcher
from graphmod.trace.operations import Facts
from graphmod.trace.undo import OpenInThread, Undo
from graphmod.trace.untraced import untraced


class CompiledGraph:
    """A graph that inductor has compiled, as an operation on the inputs of that graph.

    Args:
        code: inductor's object.
        run: the method of its class that runs it.

    Attributes:
        about: as of any operation.
        has_graphs: whether it makes CUDA graphs of its own (`mode="reduce-overhead"`).
        known: whether it tells which of its inputs it writes.
    """

    def __init__(self, code: Any, run: Callable) -> None:
        self._code, self._run = code, run
        writes = frozenset(getattr(code, "mutated_input_idxs", ()))
        self.about = Facts(writes, True, False, False, -1, False, False, False, False, False, "compiled code")
        self.has_graphs = bool((getattr(code, "fx_kwargs", None) or {}).get("cudagraphs"))
        self.known = hasattr(code, "mutated_input_idxs")

    @property
    def _op(self) -> "CompiledGraph":
        return self

    def __call__(self, *inputs: Any) -> Any:
        with dispatch.hidden():
            return self._run(self._code, list(inputs))

    def run(self, inputs: list[Any]) -> Any:
        """Runs it, shown to whoever records."""
        return self._code(inputs)

    def note_random(self) -> None:
        """Takes in that it draws random numbers: that is seen when it first runs."""
        self.about = self.about._replace(random=True)


# By identity, as long as anybody holds the operation, which holds the code: the code has no hash.
_operations: weakref.WeakValueDictionary[int, CompiledGraph] = weakref.WeakValueDictionary()


def kinds() -> list[type]:
    """The classes whose objects run what inductor has compiled."""
    inductor = sys.modules.get(INDUCTOR_CODE)
    return [getattr(inductor, name) for name in ("CompiledFxGraph", "CompiledAOTI") if hasattr(inductor, name)]


def shown(recorder: Watcher, run: Callable, code: Any, inputs: Any) -> Any:
    """Runs compiled code as one operation, in the place of `run`."""
    operation = _operations.get(id(code))
    if operation is None:
        operation = _operations[id(code)] = CompiledGraph(code, run)
    given = tuple(inputs)
    if isinstance(inputs, list):
        inputs.clear()  # as it would do itself, so that what nobody else holds can go
    with dispatch.beside_the_call():
        return untraced(recorder.see, operation, given, {})


def replacements(operators: Any) -> list[tuple[Any, str, Any]]:
    """Replacements for what begins and ends a call of compiled code, while somebody records.

    Args:
        operators: a `Patch` of functions that compiled code knows by their identity, and is to find as they were.
    """
    dynamo = sys.modules.get(EVAL_FRAME)
    if dynamo is None or not hasattr(dynamo, BEGINS) or not hasattr(dynamo, ENDS):
        return []
    return [
        (dynamo, BEGINS, _beginning(getattr(dynamo, BEGINS), operators)),
        (dynamo, ENDS, _ending(getattr(dynamo, ENDS))),
    ]


# Calls of compiled code: the frame that made it; whether it is over, None before it has begun; what is to be undone.
_regions = OpenInThread()
_COMPILE_NOTHING = ("force_eager", "eager_on_recompile")  # stances, under which the call begins without a callback


def _beginning(begins: Callable, operators: Any) -> Callable:
    def begin(*args: Any) -> Any:
        frame = sys._getframe(1)
        top, recorder = _regions.open[-1] if _regions.open else None, dispatch.current()
        if top is not None and (top[0] == id(frame) or frame.f_code.co_name == "__exit__"):
            top[1] = True
        elif top is not None or recorder is not None:
            undo = Undo()
            _regions.open.append([id(frame), None, undo])
            if top is None and recorder is not None:
                recorder.ran_compiled = True
                undo.enter(dispatch.through_a_mode())
                operators.leave(recorder)
                undo.then(lambda _: operators.take(recorder))
                if not recorder.watching and dynamo_stance() not in _COMPILE_NOTHING:
                    undo.enter(torch.compiler.set_stance("fail_on_recompile"))
        return begins(*args)

    return begin


def _ending(ends: Callable) -> Callable:
    def end(*args: Any) -> Any:
        result = ends(*args)
        top = _regions.open[-1] if _regions.open else None
        if top is None:
            return result
        here = top[0] == id(sys._getframe(1))
        # Where an error comes before the last of the other calls, it is put back what was there before: nothing.
        if top[1] or (here and top[1] is False and not callable(args[0])):
            leave(_regions.open, len(_regions.open) - 1)
        elif here:
            top[1] = False
        return result

    return end


def regions() -> list[list[Any]]:
    """The calls of compiled code that this thread is in."""
    return _regions.open


def leave(regions: list[list[Any]], depth: int) -> None:
    """Leaves those of this thread's calls that were not left as they should be, down to a number of them; does nothing
    about those of another thread, which leaves them itself."""
    while regions is _regions.open and len(regions) > depth:
        regions[-1][2].run()
        regions.pop()
