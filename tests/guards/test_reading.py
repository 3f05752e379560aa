"""The values on the stack are those that the instruction uses, whatever way leads to it."""

import contextlib
import dis
import sys

import pytest

from graphmod.guards import events, frames
from graphmod.guards.peeking import _BODY, _TOP, Nothing, _int, _pointer, depths, top
from graphmod.guards.reading import plan_of


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

    def entered(self, frame):
        return events.INSTRUCTIONS if frame.f_code in self.plans else events.NOTHING

    def left(self, frame, value):
        pass

    def instruction(self, frame, offset):
        reach, steps = self.plans[frame.f_code][1]
        step = steps[offset]
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            self._check(frame, step, hasattr(top(frame, 1, reach[offset])[0], step.argval))
        elif step.opname == "CALL":
            one, other, *given = top(frame, step.arg + 2, reach[offset])
            self._check(frame, step, callable(other if one is Nothing else one) and Nothing not in map(type, given))
        if sys.version_info < (3, 12) and step.opname != "CALL":  # of which `dis` takes PRECALL for the half
            self._check(frame, step, reach[offset] == _int(_pointer(id(frame) + _BODY).value + _TOP).value)
        return True

    def _check(self, frame, step, right):
        self.told += 1
        if not right:
            self.wrong.append((frame.f_code.co_name, step))


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
    before, _ = events.begin(check)
    try:
        assert program(held, *more, none=None) == expected
    finally:
        events.end(before)
    assert check.told > 60 and not check.wrong
