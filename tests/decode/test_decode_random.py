"""Random traffic: whatever prompts, samples, settings and memory come together, each gets the tokens it gets alone."""

from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphmod.decode import DecodeEngine, Sampling
from tests.support.decode_models import VOCABULARY, tiny_model

request = st.tuples(
    st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=30),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 0, 1, 7]),
        top_p=st.sampled_from([1.0, 1.0, 0.6]),
        seed=st.integers(-(2**63), 2**63 - 1),
        max_new_tokens=st.integers(1, 25),
        stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        repetition_penalty=st.sampled_from([None, None, None, 1.4]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        logit_bias=st.sampled_from([{}, {}, {7: 3.0}]),
        bad_words=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=2), max_size=2),
    ),
)


@lru_cache
def model(device):
    return tiny_model("qwen3", device, scale=1.5)


@lru_cache
def alone(device):
    return DecodeEngine(model(device), max_batch_size=1, max_seq_len=64, graphs=False)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(request, min_size=1, max_size=9),
    n=st.integers(1, 3),
    rows=st.integers(1, 6),
    block_size=st.sampled_from([4, 8, 64]),
    spare=st.integers(0, 12),
    steps=st.integers(1, 5),
)
def test_random_traffic_gets_the_tokens_of_each_request_alone(device, requests, n, rows, block_size, spare, steps):
    prompts, sampling = [prompt for prompt, _ in requests], [one for _, one in requests]
    most = max(len(p) + s.max_new_tokens - 1 for p, s in requests)
    engine = DecodeEngine(
        model(device),
        max_batch_size=rows,
        max_seq_len=64,
        block_size=block_size,
        cache_tokens=(-(-most // block_size) + spare) * block_size,
        steps_per_sync=steps,
    )
    done = engine.generate(prompts, n, sampling)
    expected = [found for p, s in requests for found in alone(device).generate([p], n, s)]
    assert [(c.tokens, c.finish_reason) for c in done] == [(c.tokens, c.finish_reason) for c in expected]
    for got, want in zip(done, expected, strict=True):
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs), rtol=0, atol=1e-4)
    assert engine.scheduler.allocator.free_blocks == engine.scheduler.allocator.count
    assert engine.stats.total("failures") == 0
