"""The comparison of a call with a known signature, place by place, says what comparing two signatures says."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphmod.signature.flattening import flatten
from graphmod.signature.signature import Matcher, Signature, tensor_key

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    value: object


class Thing:
    """Cannot be looked into."""


THING = Thing()
X, Y = torch.zeros(2, 3), torch.ones(2, 3)
TENSORS = [
    X,
    Y,
    X.T,
    X.double(),
    torch.zeros(6),
    torch.zeros(2, 3, requires_grad=True),
    nn.Parameter(torch.zeros(2, 3)),
    torch.eye(2, 3).to_sparse(),
    torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
]
atoms = st.sampled_from([*TENSORS, None, 0, 1, True, 0.0, -0.0, 1.5, "a", "b", b"a", torch.float32, THING, Thing()])
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.builds(Record, inner),
        st.builds(slice, st.sampled_from([None, 0, 1])),
    ),
    max_leaves=6,
)
calls = st.tuples(st.lists(values, max_size=2).map(tuple), st.dictionaries(st.sampled_from("xyz"), values, max_size=2))


def comparable(value):
    if isinstance(value, (list, tuple)):
        return all(map(comparable, value))
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_nested
    return all(map(comparable, value.values())) if isinstance(value, dict) else not isinstance(value, (Record, slice))


def signature(call):
    leaves = []
    structure = flatten(call, leaves, {})
    return Signature(structure, tuple(map(tensor_key, leaves)), (), b""), leaves


@settings(max_examples=400, deadline=None)
@given(known=calls, got=calls)
def test_it_agrees_with_comparing_signatures(known, got):
    for call in (known, got):
        expected, leaves = signature(call)
        matcher = Matcher(signature(known)[0])
        matcher.match(*known)  # which is compared as a whole from then on
        found = matcher.match(*call)
        same = expected == signature(known)[0]
        assert (found is not None) <= same
        assert found is not None or not same or not comparable(known)
        assert found is None or [id(t) for t in found] == [id(t) for t in leaves]


@pytest.mark.parametrize("call", [((X, X), {}), ((X, Y), {}), (([X], (Y, None)), {"scale": 0.5})])
def test_usual_calls_have_one(call):
    assert Matcher(signature(call)[0]).match(*call) is not None


def test_a_tensor_given_twice_is_another_call_than_two_tensors():
    match = Matcher(signature(((X, Y), {}))[0]).match
    assert match((X, Y), {}) is not None and match((X, X), {}) is None
    match = Matcher(signature(((X, X), {}))[0]).match
    assert match((Y, Y), {}) is not None and match((X, Y), {}) is None
