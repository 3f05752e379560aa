"""`CUDAGraphModule`: the wrapper around one module or callable. What a call does is decided in `step.dispatch`."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphmod.config import CUDAGraphConfig, settings
from graphmod.guards.guards import HOOKS
from graphmod.layers.context import LayerContext
from graphmod.layers.group import LayerGroup
from graphmod.signature.call import Call
from graphmod.step.dispatch import run
from graphmod.step.entry import GraphStats
from graphmod.torch_private import current_node, when_compiled
from graphmod.trace.dispatch import is_recording
from graphmod.trace.undo import let_through, under_way
from graphmod.wrap.beside import WithMore, asked_of
from graphmod.wrap.body import INSTEAD, Body
from graphmod.wrap.target import HOLDERS, Target, caller_with, in_place_of_forward

_reference_count = sys.getrefcount
_NEVER_THE_WRAPPERS = ("_root", "module")
_dynamo_compiles = torch.compiler.is_dynamo_compiling


@functools.cache
def _stand_for_methods() -> None:
    """Lets `model.forward = CUDAGraphModule(model.forward)` do what it does with a function: a module that is assigned
    to a module is put among its children, where the method of the class would be found before it, and where a
    Sequential would call it. Instead of it there is one that does nothing."""

    def registered(module: nn.Module, name: str, child: Any) -> nn.Module | None:
        shadowed = isinstance(child, CUDAGraphModule) and callable(getattr(type(module), name, None))
        if not shadowed or isinstance(child._root, nn.Module):
            return None
        module.__dict__[name] = child
        return nn.Identity()

    # pyrefly: ignore[bad-argument-type] -- its annotation forgets that it may give another module
    nn.modules.module.register_module_module_registration_hook(registered)


class CUDAGraphModule(nn.Module):
    """Runs a module or callable from CUDA graphs, with the results of the eager call.

    The first `config.warmup_steps` calls of a signature (structure, shapes, dtypes, constants, modes) are ordinary
    calls. The next one is captured and replayed, and so are later calls with the same signature. If an output requires
    grad, its backward is captured inside the first real backward. A call that cannot use a graph runs eagerly and is
    counted in `stats`.

    Results lie in memory of the graph. One that is still held when the graph runs again is moved to a copy first, so
    it never changes; `config.clone_outputs=True` copies at once. The parameters' gradients are buffers of the graph:
    keep a gradient beyond the next backward with `p.grad.clone()`.

    Args:
        module: a module or callable. A callable may run a whole training iteration and return a detached loss.
        config: settings; None means the defaults.
        name: how log lines name it; the class or function name by default.
        single: single settings of `CUDAGraphConfig`, such as `max_graphs=4`, in the place of those of `config`.

    Attributes of the wrapped module are read, set and deleted through the wrapper. torch.compile, torch.export and the
    like see the wrapped module in its place, and no graph.
    """

    _reach_through = ("_root",)
    _root: Any
    _call: Any
    _context: LayerContext

    def __init__(
        self,
        module: nn.Module | Callable,
        config: CUDAGraphConfig | None = None,
        *,
        name: str | None = None,
        group: LayerGroup | None = None,
        call: Callable | None = None,
        **single: Any,
    ) -> None:
        super().__init__()
        if not callable(module) or isinstance(module, type):
            made = f"the class {module.__name__}; wrap what it makes" if callable(module) else type(module).__name__
            raise TypeError(f"CUDAGraphModule wraps an nn.Module or a callable, got {made}")
        self.__dict__["_root"] = module
        if isinstance(module, nn.Module) and call is None:
            self.module = module
        else:
            self.__dict__["module"] = module
        if not isinstance(module, nn.Module):
            _stand_for_methods()
        name = name or getattr(module, "__name__", type(module).__name__)
        self._hooks_outside = isinstance(module, nn.Module) and call is None
        made = call or (Target(module) if isinstance(module, nn.Module) else module)
        self.__dict__["_call"] = made
        self._context = LayerContext(module, made, settings(config, single), name, group or LayerGroup())
        self._context.instead = INSTEAD if isinstance(made, Body) else ""
        self._mark: Any = object()  # the `Mark` of a layer whose forward leads here
        self._retired = False
        self._with_more: dict[tuple, WithMore] = {}
        plain = isinstance(module, nn.Module) and not isinstance(module, torch.jit.ScriptModule)
        self._class = type(module) if plain else nn.Module
        self._class_forward = self._class.forward
        if isinstance(module, nn.Module) and not self._hooks_outside and not isinstance(made, Body):
            self._context.group.said.join(type(module), name)
        self._made = True  # of what is assigned from here on, the wrapped object has the attribute

    # -- calling -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same result as `module(*args, **kwargs)`."""
        root = self._root
        if _dynamo_compiles():
            self._say_compiled()
            return root(*args, **kwargs)
        if not self._hooks_outside:
            return self._run(*args, **kwargs)
        if is_recording():  # for another wrapper, which is to see all that a call of the module reads
            self._context.served = None
            return root(*args, **kwargs)
        own = root.__dict__.get("forward")
        if own is not self._call.own and getattr(own, "__self__", None) is not self:
            self._call.own = own
            self.reset()
        kind = type(root)
        calls_itself = kind.__call__ is not nn.Module.__call__ and kind.forward is not nn.Module.forward
        if calls_itself or any(getattr(root, hooks) for hooks in HOOKS):
            # The module's own hooks and `__call__` run on every call, around the graph instead of inside it.
            with in_place_of_forward(root, self._run):
                return root(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped callable without the module's own hooks."""
        context = self._context
        if _dynamo_compiles():
            self._say_compiled()
            return self._call(*args, **kwargs)
        if self._retired or _reference_count(self._mark) > HOLDERS:
            other = caller_with(self._mark)
            if other is not None and other is not self._root:  # a shallow copy, whose forward leads here, too
                own = self._mark.forward
                return type(other).forward(other, *args, **kwargs) if own is None else own(*args, **kwargs)
            if self._retired:
                return self._call(*args, **kwargs)
        if is_recording() or under_way.plain or (context.nested and current_node() is not None):
            context.served, context.nested = None, True
            return self._call(*args, **kwargs)  # part of what another wrapper captures, or is going to
        context.nested = False
        if self._class.forward is not self._class_forward:
            self._class_forward = self._class.forward
            self.reset()
        function = self._call
        if function.__class__ is Body:
            if function.passes_on():
                return function(*args, **kwargs)
        elif function.__class__ is not Target:
            return run(context, Call(function, args, kwargs))
        asked = asked_of(self._root, kwargs)
        if asked is None:
            return run(context, Call(function, args, kwargs))
        layer = self._with_more.get(asked)
        if layer is None:
            layer = self._with_more[asked] = WithMore(function, asked)
        return layer.hand_on(functools.partial(run, context), args, kwargs)

    @when_compiled
    def _say_compiled(self) -> None:
        """The compiler goes on to what is wrapped, and the user had graphs in mind."""
        name = self.graph_name
        remedy = f"CUDAGraphModule(torch.compile({name}))"
        if isinstance(self._root, nn.Module) and not self._hooks_outside:
            remedy = "layers[i] = torch.compile(layers[i]) before graph_layers(model), or CUDAGraphModule(step)"
        self._context.log_once(
            f"{name!r} gets no graph in code that is compiled around it, by torch.compile or torch.export. Compile "
            f"inside, and put the graph outside: {remedy}",
            key="compiled around",
        )

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    @property
    def graph_name(self) -> str:
        """How log lines name this wrapper."""
        return self._context.name

    @property
    def last_failure(self) -> str:
        """Why the last failed capture or replay failed, or calls stay eager; "" where neither is so."""
        return self._context.last_failure

    @property
    def stats(self) -> GraphStats:
        """Counters so far; `pool_bytes` counts the pools this module shares with its group."""
        stats = self._context.stats
        if isinstance(self._call, Body) and self._call.passed_over:
            stats.state = "eager"
            stats.failures *= any(entry.out_of_date for entry in self._context.entries)
        elif self._context.nested and stats.state != "captured":
            stats.state = "nested"
        return stats

    def reset(self) -> None:
        """Frees the graphs and starts over with warm-up; signatures that were disabled stay so. May be called often."""
        self._context.reset()

    def retire(self) -> None:
        """Frees the graphs; every call is eager from now on."""
        self.reset()
        self._retired = True

    def replay(self, times: int) -> int:
        """Runs the graph behind the last call again, as so many calls like it would, and checks nothing.

        For callables that keep all that changes in tensors whose addresses stay: decoding, a solver. Between the last
        call and this one no argument may have been exchanged, and nothing that the callable reads.

        Returns:
            How often it ran, which is `times`, or 0 if the last call was served by no graph, or by one that returns
            tensors, copies arguments or has a backward; less than `times` if a launch failed. Call the module for the
            rest.
        """
        context = self._context
        graph = context.served
        if graph is None or not graph.stands_alone or is_recording():
            return 0
        tape, arena = graph.tape, graph.tape.arena
        if tape.dropped or arena.in_flight or arena.active is not tape or tape.cursor != graph.index + 1:
            return 0
        for done in range(times):
            try:
                graph.launch()
            except RuntimeError as error:
                let_through(error)
                context.drop(graph.tape)
                context.failed(graph.entry, error, "a replay")
                return done
            context.counters.replays += 1
        return times

    def force_enable(self) -> None:
        """Lets signatures that failures disabled be captured again."""
        self._context.rearm()

    def extra_repr(self) -> str:
        return f"{self.graph_name!r}, {self.stats.state}"

    # -- from outside: the module that is wrapped, for whoever reads, sets or copies it -----------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _NEVER_THE_WRAPPERS:
                raise
            return getattr(self._root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "_made" not in own:
            super().__setattr__(name, value)
        elif name in own:
            own[name] = value
            if name == "training" and isinstance(self._root, nn.Module):
                self._root.training = value
        elif name in _NEVER_THE_WRAPPERS:
            raise AttributeError(f"{name!r} is what this wrapper wraps, and stays so; wrap the other one")
        elif self._of_class(name):
            super().__setattr__(name, value)
        else:
            known = hasattr(self._root, name)
            setattr(self._root, name, value)
            if not known:
                self.reset()  # code may ask for it

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in _NEVER_THE_WRAPPERS or self._of_class(name):
            super().__delattr__(name)
        else:
            delattr(self._root, name)
            self.reset()  # code may ask for it

    def _of_class(self, name: str) -> bool:
        """Whether assigning an attribute would change the wrapper's machinery (`_compiled_call_impl`, a property)."""
        if name != "forward" and name.startswith("_") and hasattr(nn.Module, name):
            return True
        return isinstance(getattr(type(self), name, None), property)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._root)})

    # What a module is given later, its own code looks for at the module.

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._holder().register_buffer(name, *args, **kwargs)

    def register_parameter(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._holder().register_parameter(name, *args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._holder().add_module(name, module)

    def _holder(self) -> Any:
        if not isinstance(self._root, nn.Module):
            return super()
        self.reset()  # code may ask for it
        return self._root

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the wrapped module, by its own names."""
        whole = self._root if isinstance(self._root, nn.Module) else super()
        return whole.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Takes what was saved of the module, by its own names or with `module.` in front of them."""
        names = list(self._root.state_dict()) if isinstance(self._root, nn.Module) else []
        inside = {f"module.{name}" for name in names} - {*names}
        if not any(prefix + name in state_dict for name in inside):
            own = {name: state_dict.pop(prefix + name) for name in names if prefix + name in state_dict}
            state_dict |= {f"{prefix}module.{name}": value for name, value in own.items()}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- copies ----------------------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        """A wrapper around a shallow copy of the module, with graphs of its own still to be captured."""
        root = copy.copy(self._root) if isinstance(self._root, nn.Module) else self._root
        return self._around_copy(root, LayerGroup(), None)

    def __deepcopy__(self, memo: dict) -> Any:
        """A wrapper around a copy of the module, with graphs of its own still to be captured."""
        root, known = copy.deepcopy(self._root, memo), self._context.group
        if id(known) not in memo:
            group = memo[id(known)] = LayerGroup()
            group.gradients = memo.setdefault(id(known.gradients), group.gradients)
            group.share([copy.deepcopy(tied, memo) for tied in known.tied.values()], lasting=True)
        return self._around_copy(root, memo[id(known)], memo)

    def _around_copy(self, root: Any, group: LayerGroup, memo: dict | None) -> CUDAGraphModule:
        """A wrapper around a copy of the module, with the hooks and the mode of this one; deep, where there is a `memo`
        of `copy.deepcopy`."""
        call: Any = self._call.of_copy(root, memo) if isinstance(self._call, Target) else None
        config, in_place = self._context.config, None if self._hooks_outside else call
        made = CUDAGraphModule(root, config, name=self.graph_name, group=group, call=in_place)
        if self._hooks_outside:
            made._call.own = call.own
        if memo is not None:
            memo[id(self)] = made
        for name, value in self.__dict__.items():
            if "_hooks" in name and isinstance(value, dict):
                made.__dict__[name] = value.copy() if memo is None else copy.deepcopy(value, memo)
        made.__dict__["training"] = self.training
        return made

    def __getstate__(self) -> dict:
        raise TypeError(
            f"{self._context.name!r} holds CUDA graphs, which cannot be pickled; save state_dict(), or ungraph(model) "
            "first"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise TypeError(
            f"{self._context.name!r} cannot be replicated by nn.DataParallel, which makes new modules in each call; "
            "use one process for each GPU"
        )

    # -- other tools -----------------------------------------------------------------------------------------------

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script compiles in the wrapper's place."""
        self._context.log_once(
            f"{self._context.name!r} gets no graph in what torch.jit.script makes of it. Script first, and wrap that: "
            f"CUDAGraphModule(torch.jit.script({self._context.name}))"
        )
        return self._root
