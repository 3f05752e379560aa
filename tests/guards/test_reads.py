"""What code is said to read, on every version of Python."""

import pytest

from graphmod.guards.expressions import UNTOLD
from graphmod.guards.reads import reads


def attr(base, *names):
    for name in names:
        base = ("attr", base, ("const", name))
    return base


def item(base, key):
    return ("item", base, key)


SELF, X, K = ("local", "self"), ("local", "x"), ("local", "k")


def told(code):
    """Everything a function is said to read, and of what it is said to read the items."""
    every = [read for found in reads(code.__code__).by_line.values() for read in found]
    found = {read.of for read in every}
    for of in list(found):  # some versions keep the ways apart for longer
        if of[0] == "attr" and of[1][0] == "either":
            found |= {("attr", base, of[2]) for base in of[1][1]}
    return found, {read.of for read in every if read.content}


def chain(self, x):
    return x * self.config.scale


def method(self, x):
    return self.block.run(x)


def subscript(self, x, k):
    return self.table["a"][k] + x


def conditional(self, x, k):
    return (self.one if k else self.two).value * x


def alternatives(self, x, k):
    return (k or self.other).value * x


def stored(self, x):
    self.count += 1
    self.table["n"] = x
    return x


def of_a_call(self, x):
    return x * self.block(x).scale


def by_name(self, x):
    return x * getattr(self, "scale", None)


def several(self, x):
    a, b = self.a, self.b
    return a.value * b.value * x


def comprehension(self, x):
    return [x * part.scale for part in self.parts]


def sliced(self, x):
    return x * sum(self.values[1:])


def keywords(self, x):
    return self.block(x, scale=self.scale)


def spread(self, x):
    return self.block(*self.args, **self.kwargs)


def caught(self, x):
    try:
        return x / self.by
    except ZeroDivisionError:
        return x * self.other
    finally:
        self.done = True


def unpacked(self, x):
    first, *_ = self.values
    return x * first


def matched(self, x):
    match self.settings:
        case object(scale=scale):
            return x * scale


def with_block(self, x):
    with self.context as c:
        return x * c.scale


def compared(self, x):
    return x if 0 < self.low < 2 else x * self.high


CASES = [
    (chain, {attr(SELF, "config", "scale")}, set()),
    (method, {attr(SELF, "block")}, {attr(SELF, "block")}),
    (subscript, {item(item(attr(SELF, "table"), ("const", "a")), K)}, set()),
    (conditional, {attr(SELF, "one", "value"), attr(SELF, "two", "value")}, set()),
    (alternatives, {attr(K, "value"), attr(SELF, "other", "value")}, set()),
    (stored, {attr(SELF, "count"), item(attr(SELF, "table"), ("const", "n"))}, set()),
    (of_a_call, {attr(("call", attr(SELF, "block"), (X,)), "scale")}, set()),
    (by_name, {("call", ("global", "getattr"), (SELF, ("const", "scale"), ("const", None)))}, set()),
    (several, {attr(SELF, "a"), attr(SELF, "b"), attr(("local", "a"), "value"), attr(("local", "b"), "value")}, set()),
    (comprehension, {attr(SELF, "parts")}, {attr(SELF, "parts")}),
    (sliced, {attr(SELF, "values")}, {attr(SELF, "values")}),
    (keywords, {attr(SELF, "scale")}, {attr(SELF, "scale")}),
    (spread, {attr(SELF, "args"), attr(SELF, "kwargs")}, {attr(SELF, "args"), attr(SELF, "kwargs")}),
    (caught, {attr(SELF, "by"), attr(SELF, "other"), attr(SELF, "done")}, set()),
    (unpacked, {attr(SELF, "values")}, {attr(SELF, "values")}),
    (matched, {attr(SELF, "settings", "scale")}, set()),
    (with_block, {attr(SELF, "context"), attr(("local", "c"), "scale")}, set()),
    (compared, {attr(SELF, "low"), attr(SELF, "high")}, set()),
]


@pytest.mark.parametrize(("code", "expected", "content"), CASES, ids=[case[0].__name__ for case in CASES])
def test_reads_are_told(code, expected, content):
    every, whole = told(code)
    assert expected <= every, every
    assert content <= whole, whole


def test_a_line_that_assigns_and_reads_is_looked_at_instruction_by_instruction():
    def one_line(self, x):
        part = self.part; return part.scale * x  # noqa: E702  # fmt: skip

    assert reads(one_line.__code__).exact
    assert not reads(chain.__code__).exact


def test_what_is_read_of_a_result_from_another_line_is_known_to_be():
    def spans(self, x):
        return (
            self.make(x)
            .scale
        )  # fmt: skip

    assert reads(spans.__code__).spans
    assert not reads(of_a_call.__code__).spans


def test_a_key_of_which_nothing_is_told_leaves_the_items():
    def computed(self, x):
        return self.table[x + 1].value

    every, whole = told(computed)
    assert attr(item(attr(SELF, "table"), UNTOLD), "value") in every
    assert attr(SELF, "table") in whole


def test_code_with_constants_that_have_no_hash_is_read_too():
    """As dynamo writes it."""

    def run(x):
        return x.scale * "here"

    constants = tuple({"no": "hash"} if one == "here" else one for one in run.__code__.co_consts)
    found = reads(run.__code__.replace(co_consts=constants))
    assert [read.of for lines in found.by_line.values() for read in lines] == [
        ("attr", ("local", "x"), ("const", "scale"))
    ]
