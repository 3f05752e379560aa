"""The values on the stack are those that the instruction uses, whatever way leads to it."""

import contextlib
import dis
import sys
from ctypes import c_int

import pytest
import torch

from graphmod import CUDAGraphModule
from graphmod.reads import events, frames
from graphmod.reads.operand_stack import _BODY, Nothing, _word_at, depths, top
from graphmod.reads.reading import _STEPS, plan_of


def generator(items):
    try:
        for one in items:
            got = yield one
            yield got.real if got else [one][0].imag
    finally:
        yield (items or [0])[-1].real


def program(held, *more, **named):
    with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
        stack.callback(str.join, ".", ["a"]), 1 / 0
    try:
        {}[held["key"].real]
    except KeyError as error:
        raised = error.args[0].real
    match held:
        case {"key": int(real=found), **rest}:
            raised += found + len(rest)
    made = [one.real for one in generator([1, 2]) if one and not (one > 5 or named.get("none"))]
    return max(*made, *(a.real for a in more), sum(x.imag for x in made).real, key=lambda one: one.real) + raised


class Check:
    """Compares, at each instruction, what is peeked with what the instruction is known to find."""

    def __init__(self, codes):
        self.plans = {code: (plan_of(code), self._known(code)) for code in codes}
        self.told, self.wrong = 0, []

    def _known(self, code):
        steps = list(dis.get_instructions(code))
        return depths(code, steps), {step.offset: step for step in steps}

    def entered(self, frame, code):
        if code not in self.plans:
            return events.NOTHING
        return {offset: offset for offset in self.plans[code][1][1]}

    def left(self, frame):
        pass

    def step(self, frame, code, offset):
        reach, steps = self.plans[code][1]
        step = steps[offset]
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            self._check(frame, step, hasattr(top(frame, 1, reach[offset])[0], step.argval))
        elif step.opname == "CALL":
            one, other, *given = top(frame, step.arg + 2, reach[offset])
            self._check(frame, step, callable(other if one is Nothing else one) and Nothing not in map(type, given))
        if sys.version_info < (3, 12):  # which keeps in the frame how far the stack reaches
            self._check(frame, step, reach[offset] == c_int.from_address(_word_at(id(frame) + _BODY).value + 64).value)

    def _check(self, frame, step, right):
        self.told += 1
        if not right:
            self.wrong.append((frame.f_code.co_name, step))


# fmt: off
_NOTHING = {  # what these work with was read by an instruction before, or is made by them
    "ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_MAP", "BUILD_SET",
    "BUILD_SLICE", "BUILD_STRING", "BUILD_TUPLE", "CACHE", "CALL_INTRINSIC_2", "CHECK_EG_MATCH", "CHECK_EXC_MATCH",
    "CLEANUP_THROW", "COPY", "COPY_FREE_VARS", "DELETE_DEREF", "DELETE_FAST", "END_ASYNC_FOR", "END_FOR",
    "END_SEND", "ENTER_EXECUTOR", "EXIT_INIT_CHECK", "EXTENDED_ARG", "FOR_ITER", "GET_AITER", "GET_ANEXT",
    "GET_AWAITABLE", "IMPORT_STAR", "INTERPRETER_EXIT", "JUMP", "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD", "JUMP_NO_INTERRUPT", "KW_NAMES", "LIST_APPEND", "LIST_TO_TUPLE",
    "LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS", "LOAD_CLASSDEREF", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF",
    "LOAD_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_FROM_DICT_OR_DEREF",
    "LOAD_LOCALS", "LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD", "MAKE_CELL",
    "MAP_ADD", "NOP", "POP_BLOCK", "POP_EXCEPT", "POP_JUMP_BACKWARD_IF_NONE",
    "POP_JUMP_BACKWARD_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE",
    "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_TOP", "PRECALL",
    "PREP_RERAISE_STAR", "PRINT_EXPR", "PUSH_EXC_INFO", "PUSH_NULL", "RAISE_VARARGS", "RERAISE", "RESERVED",
    "RESUME", "RETURN_CONST", "RETURN_GENERATOR", "SEND", "SETUP_ANNOTATIONS", "SETUP_CLEANUP", "SETUP_FINALLY",
    "SETUP_WITH", "SET_ADD", "STORE_FAST", "STORE_FAST_LOAD_FAST",
    "STORE_FAST_MAYBE_NULL", "STORE_FAST_STORE_FAST", "SWAP",
}
# fmt: on
_BY_ARGUMENT = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "FORMAT_VALUE", "MAKE_FUNCTION", "STORE_DEREF"}


def test_of_each_instruction_that_there_is_it_is_known_what_it_reads():
    there = {name for name in dis.opmap if not name.startswith("INSTRUMENTED_")}
    if sys.version_info < (3, 12):
        there -= {"POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"}
    assert there - _STEPS.keys() - _BY_ARGUMENT <= _NOTHING
    assert not _NOTHING & (_STEPS.keys() | _BY_ARGUMENT) - {"POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"}


def test_a_python_whose_stack_is_not_known_keeps_calls_eager_and_says_so(device, monkeypatch):
    monkeypatch.setattr(frames, "_can_peek", lambda: False)
    wrapper, x = CUDAGraphModule(lambda x: x * 2), torch.ones(3, device=device)
    for _ in range(6):
        assert wrapper(x).tolist() == [2.0] * 3
    assert not wrapper.stats.captures
    assert "is not CPython 3.11 to 3.13" in wrapper.last_failure


def test_the_stack_is_read_where_it_is():
    assert frames._can_peek()


@pytest.mark.parametrize("more", [(), (3, 4)])
def test_each_instruction_finds_on_the_stack_what_is_read_there(more):
    codes = [program.__code__, generator.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if hasattr(one, "co_code")]
    check = Check(codes)
    held = {"key": 1, "other": 2}
    expected = program(held, *more, none=None)
    before = events.before()
    events.begin(check)
    try:
        assert program(held, *more, none=None) == expected
    finally:
        events.end(before)
    assert check.told > (60 if sys.version_info < (3, 12) else 30) and not check.wrong
