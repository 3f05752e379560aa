"""What code reads: the chains of attributes and items (`self.config.scale`, `group["lr"]`) in its bytecode.

The instructions of a function are gone through once, with a stack of expressions in the place of values. Where an
expression begins with a variable, its value can be found later, while the code runs, without running any of it. Imports
nothing of graphmod.
"""

import dis
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

Expression = tuple
"""("local", name), ("global", name), ("const", value), ("module", name), ("attr", base, expression of the name),
("item", base, expression of the key), RESULT, or None for what cannot be told."""

RESULT = ("result",)
"""What a call returned."""


class Read(NamedTuple):
    """One thing an instruction reads or writes.

    Attributes:
        of: the expression.
        content: whether the items of the value are read too, should it be a container.
    """

    of: Expression
    content: bool


@dataclass
class Reads:
    """What a piece of code reads.

    Attributes:
        by_line: line -> what is to be looked at before it runs.
        by_offset: offset of an instruction -> likewise.
        exact: whether lines are too coarse, because one assigns a variable and reads through it.
        follows_results: whether it reads attributes or items of what calls return.
    """

    by_line: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    by_offset: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    exact: bool = False
    follows_results: bool = False


_NULL_LAST = sys.version_info >= (3, 13)
_METHOD_BIT = sys.version_info >= (3, 12)
_SILENT = {"RESUME", "NOP", "CACHE", "PRECALL", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "SETUP_ANNOTATIONS"}
_LOCALS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_PUSHES = {"PUSH_NULL", "LOAD_CLOSURE", "LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_FAST_AND_CLEAR"}
# These pass a value on; whoever gets it reads what is in it.
_PASS_ON = {"POP_TOP", "RETURN_VALUE", "YIELD_VALUE", "STORE_DEREF", "RETURN_GENERATOR", "IS_OP"}
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


class _Walk:
    """One walk through a piece of code."""

    def __init__(self, code: CodeType) -> None:
        self.found = Reads()
        self._stack: list[Expression | None] = []
        self._offset = self._line = 0
        self._constants = code.co_consts
        self._assigned: dict[str, int] = {}
        self._keywords = 0
        for step in dis.get_instructions(code):
            if step.starts_line is not None and step.starts_line is not False:
                self._line = step.line_number if _NULL_LAST else step.starts_line
            self._offset = step.offset
            if step.is_jump_target:
                self._stack.clear()
            if step.opname not in _SILENT:
                self._take(step)

    def _pop(self) -> Expression | None:
        return self._stack.pop() if self._stack else None

    def _push(self, *expressions: Expression | None) -> None:
        self._stack += expressions

    def _note(self, of: Expression, content: bool) -> None:
        root, after_call = of, False
        while root[0] in ("attr", "item"):
            after_call = after_call or root[2][0] not in ("const", "local", "global", "attr", "item")
            root = root[1]
        if root[0] == "result":
            self.found.follows_results = True
        if root[0] == "local" and self._assigned.get(root[1]) == self._line:
            self.found.exact = True
        read = Read(of, content)
        for kept in (self.found.by_line[self._line], self.found.by_offset[self._offset]):
            if read not in kept:
                kept.append(read)

    def _use(self, of: Expression | None, content: bool = True) -> None:
        """Takes in that a value is used as a whole."""
        if of is None or of is RESULT or of[0] in ("const", "module"):
            return
        if of[0] != "local" or content:
            self._note(of, content)

    def _take(self, step: dis.Instruction) -> None:
        name = step.opname
        handler = getattr(self, f"_{name.lower()}", None)
        if handler is not None:
            handler(step)
        elif name in _LOCALS:
            self._push(("local", step.argval))
        elif name in _PUSHES:
            self._push(None)
        else:
            effect = dis.stack_effect(step.opcode, step.arg, jump=False)
            whole = name not in _PASS_ON
            for _ in range(max(0, -effect)):
                self._use(self._pop(), whole)
            if self._stack:
                self._use(self._stack[-1], whole)
                self._stack[-1] = None
            self._push(*[None] * max(0, effect))
            if name.startswith("IMPORT_STAR"):
                self._stack.clear()

    # -- variables -----------------------------------------------------------------------------------------------

    def _load_const(self, step: dis.Instruction) -> None:
        self._push(("const", step.argval))

    def _load_fast_load_fast(self, step: dis.Instruction) -> None:
        self._push(*(("local", name) for name in step.argval))

    def _load_global(self, step: dis.Instruction) -> None:
        null = [None] if step.arg & 1 else []
        value: list = [("global", step.argval)]
        self._push(*(value + null if _NULL_LAST else null + value))

    def _load_name(self, step: dis.Instruction) -> None:
        self._push(("global", step.argval))

    def _store_fast(self, step: dis.Instruction) -> None:
        self._use(self._pop(), content=False)
        self._assigned[step.argval] = self._line

    def _store_fast_store_fast(self, step: dis.Instruction) -> None:
        for name in step.argval:
            self._use(self._pop(), content=False)
            self._assigned[name] = self._line

    def _store_fast_load_fast(self, step: dis.Instruction) -> None:
        self._use(self._pop(), content=False)
        self._assigned[step.argval[0]] = self._line
        self._push(("local", step.argval[1]))

    def _store_global(self, step: dis.Instruction) -> None:
        self._use(self._pop(), content=False)
        self._note(("global", step.argval), content=False)

    def _delete_global(self, step: dis.Instruction) -> None:
        self._note(("global", step.argval), content=False)

    def _delete_fast(self, step: dis.Instruction) -> None:
        pass

    def _copy(self, step: dis.Instruction) -> None:
        self._push(self._stack[-step.arg] if len(self._stack) >= step.arg else None)

    def _swap(self, step: dis.Instruction) -> None:
        stack, other = self._stack, step.arg
        if len(stack) >= other:
            stack[-1], stack[-other] = stack[-other], stack[-1]
        else:
            stack.clear()

    # -- attributes and items ------------------------------------------------------------------------------------

    def _attr(self, base: Expression | None, name: Expression) -> Expression | None:
        return None if base is None or base[0] == "const" else ("attr", base, name)

    def _load_attr(self, step: dis.Instruction) -> None:
        base = self._pop()
        value = self._attr(base, ("const", step.argval))
        if _METHOD_BIT and step.arg & 1:
            self._use(base)  # a method may read, or change, all that is in it
            self._push(value, None)
        else:
            self._push(value)

    def _load_method(self, step: dis.Instruction) -> None:
        base = self._pop()
        self._use(base)
        self._push(self._attr(base, ("const", step.argval)), None)

    def _load_super_attr(self, step: dis.Instruction) -> None:
        for _ in range(3):
            self._pop()
        self._push(*[None] * (2 if step.arg & 1 else 1))

    def _store_attr(self, step: dis.Instruction) -> None:
        target, value = self._pop(), self._pop()
        self._use(value, content=False)
        found = self._attr(target, ("const", step.argval))
        if found is not None:
            self._note(found, content=False)

    def _delete_attr(self, step: dis.Instruction) -> None:
        found = self._attr(self._pop(), ("const", step.argval))
        if found is not None:
            self._note(found, content=False)

    def _binary_subscr(self, _: dis.Instruction) -> None:
        key, base = self._pop(), self._pop()
        if base is None or base[0] == "const" or key is None or key is RESULT:
            self._use(base)
            self._use(key)
            self._push(RESULT)
        else:
            self._push(("item", base, key))

    def _store_subscr(self, _: dis.Instruction) -> None:
        key, container, value = self._pop(), self._pop(), self._pop()
        self._use(value, content=False)
        self._change_item(container, key)

    def _delete_subscr(self, _: dis.Instruction) -> None:
        key, container = self._pop(), self._pop()
        self._change_item(container, key)

    def _change_item(self, container: Expression | None, key: Expression | None) -> None:
        if container is None or container[0] == "const":
            return
        if key is None or key is RESULT:
            self._use(container)
        else:
            self._note(("item", container, key), content=False)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _kw_names(self, step: dis.Instruction) -> None:
        self._keywords = len(self._constants[step.arg])

    def _call(self, step: dis.Instruction) -> None:
        self._called(step.arg, self._keywords)
        self._keywords = 0

    def _call_kw(self, step: dis.Instruction) -> None:
        names = self._pop()
        self._called(step.arg, len(names[1]) if names is not None and names[0] == "const" else 1)

    def _called(self, count: int, keywords: int) -> None:
        given = [self._pop() for _ in range(count)][::-1]
        two = [self._pop(), self._pop()]
        function = next((one for one in two if one is not None), None)
        for one in given:
            self._use(one)
        self._push(self._result(function, given if not keywords else []))
        if self._stack[-1] is RESULT:
            self._use(function, content=False)

    def _result(self, function: Expression | None, given: list[Expression | None]) -> Expression:
        """What a call returns, where that is an attribute or a class that can be found without it."""
        if function is None or function[0] != "global" or not given or given[0] is None or given[0][0] == "const":
            return RESULT
        if function[1] in _BY_NAME and len(given) > 1:
            if given[1] is None or given[1] is RESULT:  # a name that is made as the code runs
                self._note(("attr", given[0], ("const", "__dict__")), content=True)
                return RESULT
            self._note(("attr", given[0], given[1]), content=False)
            return ("attr", given[0], given[1]) if function[1] == "getattr" else RESULT
        if function[1] in ("vars", "type") and len(given) == 1:
            return ("attr", given[0], ("const", "__dict__" if function[1] == "vars" else "__class__"))
        return RESULT

    def _import_name(self, step: dis.Instruction) -> None:
        wanted, level = self._pop(), self._pop()
        plain = wanted is not None and level is not None and level[1] == 0
        self._push(("module", step.argval if wanted[1] else step.argval.partition(".")[0]) if plain else None)

    def _import_from(self, step: dis.Instruction) -> None:
        base = self._stack[-1] if self._stack else None
        self._push(self._attr(base, ("const", step.argval)))


def reads(code: CodeType) -> Reads:
    """What the instructions of `code` read."""
    return _Walk(code).found
