"""What a wrapper looks like from outside: the module that it wraps, for whoever reads, sets or copies it.

Owns attributes, copies, pickling and what other tools of PyTorch make of a wrapper; calls are in `module`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from graphmod.wrap.target import Target

_NEVER_THE_WRAPPERS = ("_root", "module")


class Surface(nn.Module):
    """Passes on to the wrapped object what is asked of the wrapper.

    What a subclass assigns before it sets `_made` is the wrapper's own; of all other names the wrapped object has the
    attribute.
    """

    _root: Any
    _call: Any
    _context: Any

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
                self._got_or_lost()

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in _NEVER_THE_WRAPPERS or self._of_class(name):
            super().__delattr__(name)
        else:
            delattr(self._root, name)
            self._got_or_lost()

    def _got_or_lost(self) -> None:
        """Called when the wrapped object has an attribute more or less than it had: code may ask for it."""
        raise NotImplementedError

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

    def register_module(self, name: str, module: nn.Module | None) -> None:
        self._holder().add_module(name, module)

    def _holder(self) -> Any:
        if not isinstance(self._root, nn.Module):
            return super()
        self._got_or_lost()
        return self._root

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes what was saved from the module itself, too, whose names have no `module.` in front."""
        names = list(self._root.state_dict()) if isinstance(self._root, nn.Module) else []
        if not any(f"{prefix}module.{name}" in state_dict for name in names):
            for name in names:
                if prefix + name in state_dict:
                    state_dict[f"{prefix}module.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- copies ----------------------------------------------------------------------------------------------------

    def _around_copy(self, root: Any, call: Any, memo: dict | None) -> Any:
        raise NotImplementedError

    def __copy__(self) -> Any:
        """A wrapper around a shallow copy of the module, with graphs of its own still to be captured."""
        root = copy.copy(self._root) if isinstance(self._root, nn.Module) else self._root
        return self._like_this(self._around_copy(root, self._call_of(root, None), None), None)

    def __deepcopy__(self, memo: dict) -> Any:
        """A wrapper around a copy of the module, with graphs of its own still to be captured."""
        root = copy.deepcopy(self._root, memo)
        made = self._around_copy(root, self._call_of(root, memo), memo)
        memo[id(self)] = made
        return self._like_this(made, memo)

    def _call_of(self, root: Any, memo: dict | None) -> Any:
        return self._call.of_copy(root, memo) if isinstance(self._call, Target) else root

    def _like_this(self, made: Any, memo: dict | None) -> Any:
        """Gives a copy the hooks and the mode of this wrapper."""
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
