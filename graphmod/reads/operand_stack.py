"""What a frame holds besides its variables: the function it runs, and the operands of its next instruction.

Where they lie is no part of Python's interface; `lies_there` asks whether they lie where they are looked for. How far
the stack reaches is worked out, once for each code: `depths`.
"""

import dis
import sys
from ctypes import POINTER, c_size_t, c_void_p, cast, py_object, sizeof
from types import CodeType, FrameType, FunctionType
from typing import Any

_WORD = sizeof(c_size_t)
_BODY = object.__basicsize__ + _WORD  # in a frame: where its body is, after the frame before
# In the body: the variables, which the stack comes after.
_VARIABLES = 9 * _WORD
_FUNCTION = 0 if sys.version_info < (3, 12) else 2 * _WORD
VERSIONS = ((3, 11), (3, 12), (3, 13))
_ENDS = {
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS"),
    *("RERAISE", "INTERPRETER_EXIT"),
}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_word_at = c_size_t.from_address
# What lies in memory, by the number of the word, counted from 1 because ctypes takes 0 for a null pointer: an array at
# an address would be made anew each time, and told to audit hooks, as calls of `id` are.
_words, _objects = (cast(c_void_p(_WORD), POINTER(kind)) for kind in (c_size_t, py_object))
_number_of = object.__hash__  # the address, rotated by four bits, which are 0
_BESIDE = 0 if sys.version_info < (3, 13) else 1  # where among the operands of a call there may be no object
_BODY_AT, _VARIABLES_AT = _BODY // _WORD - 1, _VARIABLES // _WORD - 1


class Nothing:
    """What lies on the stack where there is no object: beside a function that is called."""


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs, if that is one written in Python whose code was not exchanged meanwhile."""
    found = cast(_word_at(_word_at(id(frame) + _BODY).value + _FUNCTION).value, py_object).value
    return found if isinstance(found, FunctionType) and found.__code__ is frame.f_code else None


def top(frame: FrameType, count: int, reach: int) -> list[Any]:
    """The uppermost values on the stack, the last of them on top; Nothing for what is no object.

    Args:
        reach: how far the stack reaches at this instruction, as `depths` has it.
    """
    end = _words[_number_of(frame) * 2 + _BODY_AT] // _WORD + _VARIABLES_AT + reach
    start = end - count
    if count == 1:
        return [_objects[start]]
    at = start + _BESIDE
    if _words[at]:
        return _objects[start:end]
    return [*_objects[start:at], Nothing, *_objects[at + 1 : end]]


def _variables_of(code: CodeType) -> int:
    return code.co_nlocals + len(set(code.co_cellvars) - set(code.co_varnames)) + len(code.co_freevars)


def is_called(frame: FrameType, function: FunctionType, steps: list[dis.Instruction], at: int) -> bool:
    """Whether the instruction under way, of index `at`, calls a function itself, and not one in C that does."""
    step = steps[at]
    beside = {"CALL": 2, "CALL_KW": 3, "CALL_FUNCTION_EX": 3}.get(step.opname)
    if beside is None:
        return False
    count = beside + (step.arg or 0) if step.opname != "CALL_FUNCTION_EX" else beside + (step.arg or 0) % 2
    first = depths(frame.f_code, steps)[step.offset] - count
    where = _word_at(id(frame) + _BODY).value + _VARIABLES + first * _WORD
    return id(function) in (_word_at(where).value, _word_at(where + _WORD).value)  # what lies there may be gone


def depths(code: CodeType, steps: list[dis.Instruction]) -> dict[int, int]:
    """Offset of each instruction that can be reached -> how far the stack reaches before it, variables included."""
    variables = _variables_of(code)
    at = {step.offset: index for index, step in enumerate(steps)}
    found: dict[int, int] = {}
    todo = [(0, variables)]
    # pyrefly: ignore[missing-attribute] -- typeshed leaves it out
    for one in dis._parse_exception_table(code):
        todo.append((one.target, variables + one.depth + 1 + bool(one.lasti)))
    while todo:
        offset, depth = todo.pop()
        while offset not in found:
            found[offset] = depth
            index = at[offset]
            step = steps[index]
            if step.opcode in _JUMPS:
                todo.append((step.argval, depth + dis.stack_effect(step.opcode, step.arg, jump=True)))
            if step.opname in _ENDS or index + 1 == len(steps):
                break
            depth += dis.stack_effect(step.opcode, step.arg, jump=False)
            depth += step.opname == "RETURN_GENERATOR" and sys.version_info < (3, 13)
            if "PRECALL" in dis.opmap:  # which `dis` has take off what CALL does
                depth += {"PRECALL": 1, "CALL": -1}.get(step.opname, 0) * (step.arg or 0)
            offset = steps[index + 1].offset
    return found


def lies_there(frame: FrameType, one: Any, two: Any, function: FunctionType, reach: int) -> bool:
    """Whether in a frame that runs a function of two variables, which hold `one` and `two`, both lie where they are
    looked for, as variables and as the uppermost values on the stack; and whether the function does."""
    body = _word_at(id(frame) + _BODY).value
    return (
        (c_size_t * 4).from_address(body + _VARIABLES)[:] == [id(one), id(two)] * 2
        and top(frame, 2, reach) == [one, two]
        and _word_at(body + _FUNCTION).value == id(function)
        and function_of(frame) is function
    )
