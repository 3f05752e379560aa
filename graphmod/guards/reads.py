"""What code reads: the chains of attributes, items and calls (`self.config.scale`, `group["lr"]`) in its bytecode.

The instructions of a function are gone through once, with a stack of expressions in the place of values. Where an
expression begins with a variable, its value can be found later, while the code runs, without running any of it.
"""

import dis
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

from graphmod.guards.expressions import MOST, UNTOLD, Expression, either, inner, variables


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
        spans: whether something is read on one line of what code gave on another.
    """

    by_line: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    by_offset: dict[int, list[Read]] = field(default_factory=lambda: defaultdict(list))
    exact: bool = False
    spans: bool = False


_NULL_LAST = sys.version_info >= (3, 13)
_METHOD_BIT = sys.version_info >= (3, 12)
_SILENT = {"RESUME", "NOP", "CACHE", "PRECALL", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "SETUP_ANNOTATIONS"}
_LOCALS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_NAMES = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_PUSHES = {
    *("PUSH_NULL", "LOAD_CLOSURE", "LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_FAST_AND_CLEAR", "LOAD_LOCALS"),
    *("PUSH_EXC_INFO", "LOAD_COMMON_CONSTANT", "LOAD_SPECIAL"),
}
_BUILDS = {"BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP", "BUILD_SET", "BUILD_STRING"}
# These pass a value on; whoever gets it reads what is in it.
_PASS_ON = {"POP_TOP", "YIELD_VALUE", "STORE_DEREF", "STORE_NAME", "RETURN_GENERATOR", "IS_OP"}
_ONLY_POPS = {"POP_TOP", "STORE_DEREF", "STORE_NAME"}
_LOOKS_AT = {"MATCH_MAPPING", "MATCH_SEQUENCE", "GET_LEN", "MATCH_KEYS"}  # and leaves it where it is
_NEVER_GOES_ON = {
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"),
    *("RERAISE", "INTERPRETER_EXIT"),
}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
Stack = list[Expression | None]


class _Walk:
    """One walk through a piece of code."""

    def __init__(self, code: CodeType) -> None:
        self.found = Reads()
        self._stack: Stack = []
        self._line = 0
        self._offsets: tuple[int, ...] = ()
        self._constants = code.co_consts
        self._assigned: dict[str, int] = {}
        self._keywords = 0
        self._made_at: dict[Expression, int] = {}  # the line of what only code may tell
        coming: dict[int, list[Stack]] = defaultdict(list)  # offset -> what may lie on the stack there
        goes_on, prefixes = True, ()
        for step in dis.get_instructions(code):
            if step.starts_line is not None and step.starts_line is not False:
                self._line = step.line_number if _NULL_LAST else step.starts_line
            # Python 3.11 tells of an instruction with prefixes where the first of them lies.
            self._offsets = (*prefixes, step.offset)
            prefixes = (*prefixes, step.offset) if step.opname == "EXTENDED_ARG" else ()
            if step.is_jump_target:
                self._stack = _joined([*coming.pop(step.offset, []), *([self._stack] if goes_on else [])])
            elif not goes_on:
                self._stack = []
            goes_on = step.opname not in _NEVER_GOES_ON
            if step.opname in _SILENT:
                continue
            before = list(self._stack) if step.opcode in _JUMPS else None
            self._take(step)
            if before is not None:
                effect = dis.stack_effect(step.opcode, step.arg, jump=True)
                coming[step.argval].append([*before[: len(before) + min(0, effect)], *[None] * max(0, effect)])

    def _pop(self) -> Expression | None:
        return self._stack.pop() if self._stack else None

    def _push(self, *expressions: Expression | None) -> None:
        self._stack += expressions
        for one in expressions:
            if one is not None and one[0] in ("call", "item", "attr"):
                self._made_at[one] = self._line

    def _note(self, of: Expression, content: bool) -> None:
        if not self.found.exact and any(self._assigned.get(name) == self._line for name in variables(of)):
            self.found.exact = True
        self.found.spans = self.found.spans or any(
            self._made_at.get(part, self._line) != self._line for part in inner(of)
        )
        read = Read(of, content)
        for kept in (self.found.by_line[self._line], *map(self.found.by_offset.__getitem__, self._offsets)):
            if read not in kept:
                kept.append(read)

    def _use(self, of: Expression | None, content: bool = True) -> None:
        """Takes in that a value is used as a whole."""
        if of is None or of is UNTOLD or of[0] in ("const", "module", "made"):
            return
        if of[0] != "local" or content:
            self._note(of, content)

    def _take(self, step: dis.Instruction) -> None:
        name = step.opname
        handler: Callable | None = getattr(self, f"_{name.lower()}", None)
        if handler is not None:
            handler(step)
        elif name in _BUILDS:
            self._build(step)
        elif name in _LOCALS:
            self._push(("local", step.argval))
        elif name in _NAMES:
            self._push(("name", step.argval))
        elif name in _PUSHES:
            self._push(None)
        elif name in _ONLY_POPS or name.startswith("POP_JUMP"):
            self._use(self._pop(), name not in _PASS_ON)
        elif name in _LOOKS_AT:
            self._use(self._stack[-2 if name == "MATCH_KEYS" and len(self._stack) > 1 else -1] if self._stack else None)
            self._push(None)
        else:
            self._other(step, name not in _PASS_ON)

    def _other(self, step: dis.Instruction, whole: bool) -> None:
        """An instruction of which only the number of values that it takes and leaves matters."""
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        for _ in range(max(0, -effect)):
            self._use(self._pop(), whole)
        if self._stack:
            self._use(self._stack[-1], whole)
            self._stack[-1] = None
        self._push(*[None] * max(0, effect))

    def _build(self, step: dis.Instruction) -> None:
        parts = [self._pop() for _ in range(step.arg * (2 if step.opname == "BUILD_MAP" else 1))]
        for part in parts:
            self._use(part)
        known = tuple(part for part in parts if part is not None and part[0] != "const")
        self._push(("made", known[:MOST]) if known else None)

    def _list_extend(self, step: dis.Instruction) -> None:
        part = self._pop()
        self._use(part)
        if step.arg == 1 and self._stack and part is not None and part[0] != "const":
            made = self._stack[-1]
            self._stack[-1] = ("made", (*(made[1] if made is not None and made[0] == "made" else ()), part)[:MOST])

    # -- variables -----------------------------------------------------------------------------------------------

    def _load_const(self, step: dis.Instruction) -> None:
        try:
            hash(step.argval)
        except TypeError:  # of code that dynamo has written
            self._push(None)
        else:
            self._push(("const", step.argval))

    def _load_fast_load_fast(self, step: dis.Instruction) -> None:
        self._push(*(("local", name) for name in step.argval))

    def _load_global(self, step: dis.Instruction) -> None:
        null = [None] if step.arg & 1 else []
        value: list = [("global", step.argval)]
        self._push(*(value + null if _NULL_LAST else null + value))

    def _store_fast(self, step: dis.Instruction) -> None:
        self._use(self._pop(), content=False)
        self._assigned[step.argval] = self._line

    def _store_deref(self, step: dis.Instruction) -> None:
        self._store_fast(step)

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

    def _return_value(self, _: dis.Instruction) -> None:
        value = self._pop()
        # Where the caller reads what is in it, that is known of results that the caller made itself.
        self._use(value, content=value is not None and value[0] in ("attr", "item", "global"))

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
        owner, kind, function = self._pop(), self._pop(), self._pop()
        known = None not in (owner, kind, function)
        base = ("call", function, (kind, owner)) if known else UNTOLD
        found = ("attr", base, ("const", step.argval))
        self._push(*([found, None] if step.arg & 1 else [found]))

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

    def _match_class(self, step: dis.Instruction) -> None:
        names, kind, subject = self._pop(), self._pop(), self._pop()
        self._use(kind, content=False)
        self._use(subject)
        if subject is not None and subject[0] != "const":
            for name in names[1] if names is not None and names[0] == "const" else ():
                self._note(("attr", subject, ("const", name)), content=True)
            if step.arg:
                self._note(("attr", subject, ("const", "__dict__")), content=True)
        self._push(None)

    def _binary_subscr(self, _: dis.Instruction) -> None:
        key, base = self._pop(), self._pop()
        if base is not None and base[0] == "made":
            self._use(key)
            self._push(either(list(base[1])))
        elif base is None or base[0] == "const" or key is None:
            self._use(base)
            self._use(key)
            self._push(UNTOLD if base is None or base[0] == "const" else ("item", base, UNTOLD))
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
        if key is None or key is UNTOLD:
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

    def _call_function_ex(self, step: dis.Instruction) -> None:
        given = [self._pop() for _ in range(1 + (step.arg & 1))]
        for one in given:
            self._use(one)
        self._made_call(self._pop_function(), [])

    def _called(self, count: int, keywords: int) -> None:
        given = [self._pop() for _ in range(count)][::-1]
        self._made_call(self._pop_function(), [UNTOLD if one is None else one for one in given])

    def _pop_function(self) -> Expression | None:
        two = [self._pop(), self._pop()]
        return next((one for one in two if one is not None), None)

    def _made_call(self, function: Expression | None, given: list[Expression]) -> None:
        for one in given:
            self._use(one)
        call = ("call", function or UNTOLD, tuple(given))
        self._push(call)
        if function is not None:  # some functions read an attribute, or an item, that is named to them
            self._note(call, content=False)

    def _import_name(self, step: dis.Instruction) -> None:
        wanted, level = self._pop(), self._pop()
        plain = wanted is not None and level is not None and level[1] == 0
        self._push(("module", step.argval if wanted[1] else step.argval.partition(".")[0]) if plain else None)

    def _import_from(self, step: dis.Instruction) -> None:
        base = self._stack[-1] if self._stack else None
        self._push(self._attr(base, ("const", step.argval)))


def _joined(stacks: list[Stack]) -> Stack:
    """What may lie on the stack where ways meet, as far down as all of them tell."""
    depth = min(map(len, stacks), default=0)
    return [either([stack[at] for stack in stacks]) for at in range(-depth, 0)]


def reads(code: CodeType) -> Reads:
    """What the instructions of `code` read."""
    return _Walk(code).found
