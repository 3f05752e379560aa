"""What code reads: the chains of attributes, items and calls (`self.config.scale`, `group["lr"]`) in its bytecode.

The instructions of a function are gone through once, with a stack of expressions in the place of values. Where an
expression begins with a variable, its value can be found later, while the code runs, without running any of it.
"""

import dis
import sys
from collections import defaultdict
from collections.abc import Callable
from types import CodeType

from graphmod.guards.expressions import (
    BY_KEY,
    MOST,
    UNTOLD,
    Expression,
    Read,
    Reads,
    Stack,
    either,
    inner,
    joined,
    variables,
)

_NULL_LAST = sys.version_info >= (3, 13)
_METHOD_BIT = sys.version_info >= (3, 12)
_SILENT = {
    *("RESUME", "NOP", "CACHE", "PRECALL", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "SETUP_ANNOTATIONS"),
    *("DELETE_FAST", "KW_NAMES"),
}
_LOCALS = {
    "LOAD_FAST",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_FAST_CHECK",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_FROM_DICT_OR_DEREF",
}
_NAMES = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_PUSHES = {
    *("PUSH_NULL", "LOAD_CLOSURE", "LOAD_BUILD_CLASS", "LOAD_ASSERTION_ERROR", "LOAD_FAST_AND_CLEAR", "LOAD_LOCALS"),
    *("PUSH_EXC_INFO", "LOAD_COMMON_CONSTANT", "LOAD_SPECIAL"),
}
_BUILDS = {"BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP", "BUILD_SET", "BUILD_STRING"}
# These pass a value on; whoever gets it reads what is in it.
_PASS_ON = {"POP_TOP", "YIELD_VALUE", "STORE_NAME", "RETURN_GENERATOR", "IS_OP"}
_ONLY_POPS = {"POP_TOP", "STORE_NAME"}
_LOOKS_AT = {"MATCH_MAPPING", "MATCH_SEQUENCE", "GET_LEN", "MATCH_KEYS"}  # and leaves it where it is
_NEVER_GOES_ON = {
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"),
    *("RERAISE", "INTERPRETER_EXIT"),
}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_BACKWARD = {dis.opname[code] for code in _JUMPS if "BACKWARD" in dis.opname[code]}


class _Walk:
    """One walk through a piece of code."""

    def __init__(self, code: CodeType) -> None:
        self.found = Reads()
        self._stack: Stack = []
        self._line = 0
        self._offsets: tuple[int, ...] = ()
        self._assigned: dict[str, int] = {}
        self._made_at: dict[Expression, int] = {}  # the line of what only code may tell
        # Methods that are still to be called, by identity: where they were loaded.
        self._waiting: dict[int, tuple[Expression, int, tuple[int, ...]]] = {}
        coming: dict[int, list[Stack]] = defaultdict(list)  # offset -> what may lie on the stack there
        goes_on, prefixes, lines = True, (), {}
        for step in dis.get_instructions(code):
            if step.starts_line is not None and step.starts_line is not False:
                self._line = step.line_number if _NULL_LAST else step.starts_line
            # Python 3.11 tells of an instruction with prefixes where the first of them lies.
            self._offsets = (*prefixes, step.offset)
            prefixes = (*prefixes, step.offset) if step.opname == "EXTENDED_ARG" else ()
            if step.is_jump_target:
                self._stack = joined([*coming.pop(step.offset, []), *([self._stack] if goes_on else [])])
            elif not goes_on:
                self._stack = []
            lines[step.offset] = self._line
            if step.opname in _BACKWARD and lines.get(step.argval) == self._line:
                self.found.exact = True
            goes_on = step.opname not in _NEVER_GOES_ON
            if step.opname in _SILENT:
                continue
            before = list(self._stack) if step.opcode in _JUMPS else None
            self._take(step)
            if before is not None:
                effect = dis.stack_effect(step.opcode, step.arg, jump=True)
                coming[step.argval].append([*before[: len(before) + min(0, effect)], *[None] * max(0, effect)])
        for method, *where in self._waiting.values():  # no call of it was seen
            self._line, self._offsets = where
            self._use(method[1])

    def _pop(self) -> Expression | None:
        return self._stack.pop() if self._stack else None

    def _push(self, *expressions: Expression | None) -> None:
        self._stack += expressions
        self._made_at |= {one: self._line for one in expressions if one and one[0] in ("call", "item", "attr")}

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
            self._push(*(("local", one) for one in _names(step)))
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

    def _load_global(self, step: dis.Instruction) -> None:
        null = [None] * (step.arg & 1)
        value = [("global", step.argval)]
        self._push(*(value + null if _NULL_LAST else null + value))

    def _assign(self, *names: str) -> None:
        for name in names:
            self._use(self._pop(), content=False)
            self._assigned[name] = self._line

    def _store_fast(self, step: dis.Instruction) -> None:
        self._assign(*_names(step))

    _store_deref = _store_fast_store_fast = _store_fast

    def _store_fast_load_fast(self, step: dis.Instruction) -> None:
        self._assign(step.argval[0])
        self._push(("local", step.argval[1]))

    def _change(self, step: dis.Instruction, place: Expression | None) -> None:
        """Takes in that something is put at a place, or taken away from it."""
        if step.opname.startswith("STORE"):
            self._use(self._pop(), content=False)
        if place is not None:
            self._note(place, content=False)

    def _store_global(self, step: dis.Instruction) -> None:
        self._change(step, ("global", step.argval))

    _delete_global = _store_global

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

    def _attr(self, base: Expression | None, name: str) -> Expression | None:
        return None if base is None or base[0] == "const" else ("attr", base, ("const", name))

    def _load_attr(self, step: dis.Instruction) -> None:
        base = self._pop()
        method = step.opname == "LOAD_METHOD" or (_METHOD_BIT and step.arg & 1)
        found = self._attr(base, step.argval)
        if method and step.argval == BY_KEY and found is not None:
            self._waiting[id(found)] = found, self._line, self._offsets
        elif method:
            self._use(base)  # a method may read, or change, all that is in it
        self._push(found, *[None] * bool(method))

    _load_method = _load_attr

    def _load_super_attr(self, step: dis.Instruction) -> None:
        owner, kind, function = self._pop(), self._pop(), self._pop()
        base = UNTOLD if None in (owner, kind, function) else ("call", function, (kind, owner))
        self._push(("attr", base, ("const", step.argval)), *[None] * (step.arg & 1))

    def _store_attr(self, step: dis.Instruction) -> None:
        self._change(step, self._attr(self._pop(), step.argval))

    _delete_attr = _store_attr

    def _match_class(self, step: dis.Instruction) -> None:
        names, kind, subject = self._pop(), self._pop(), self._pop()
        self._use(kind, content=False)
        self._use(subject)
        if subject is not None and subject[0] != "const":
            named = names[1] if names is not None and names[0] == "const" else ()
            for name in (*named, "__dict__") if step.arg else named:
                self._note(("attr", subject, ("const", name)), content=True)
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

    def _contains_op(self, _: dis.Instruction) -> None:
        container, key = self._pop(), self._pop()
        self._use(key)
        if container is None or key is None or container[0] in ("const", "module", "made", "untold"):
            self._use(container)
        else:
            self._note(("key", container, key), content=False)
        self._push(None)

    def _store_subscr(self, step: dis.Instruction) -> None:
        key, container = self._pop(), self._pop()
        told = container is not None and container[0] != "const" and key is not None and key is not UNTOLD
        self._change(step, ("item", container, key) if told else None)
        if not told:
            self._use(container)

    _delete_subscr = _store_subscr

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call(self, step: dis.Instruction) -> None:
        given = [self._pop() or UNTOLD for _ in range(step.arg)][::-1]
        self._called(given, given)

    def _call_kw(self, step: dis.Instruction) -> None:
        self._pop()  # the keywords
        self._call(step)

    def _call_function_ex(self, step: dis.Instruction) -> None:
        self._called([self._pop() for _ in range(1 + (step.arg & 1))], [])

    def _called(self, used: list[Expression | None], given: list[Expression]) -> None:
        """A call that uses some values; those in `given` are its arguments, one by one."""
        for one in used:
            self._use(one)
        two = [self._pop(), self._pop()]
        function = next((one for one in two if one is not None), None)
        call = ("call", function or UNTOLD, tuple(given))
        self._waiting.pop(id(function), None)
        self._push(call)
        if function is not None:  # some functions read an attribute, or an item, that is named to them
            self._note(call, content=False)

    def _import_name(self, step: dis.Instruction) -> None:
        wanted, level = self._pop(), self._pop()
        plain = wanted is not None and level is not None and level[1] == 0
        self._push(("module", step.argval if wanted[1] else step.argval.partition(".")[0]) if plain else None)

    def _import_from(self, step: dis.Instruction) -> None:
        base = self._stack[-1] if self._stack else None
        self._push(self._attr(base, step.argval))


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction, which may be two in one."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def reads(code: CodeType) -> Reads:
    """What the instructions of `code` read."""
    return _Walk(code).found
