"""Decoded tokens are those of transformers' greedy `generate`, whatever else is in the batch."""

import pytest
import torch

from graphmod.decode import DecodeEngine, Sampling
from tests.support.decode_models import ARCHITECTURES, VOCABULARY, prompts_of, reference, tiny_model
from tests.support.sweeps import sweep

RAGGED = [3, 9, 17, 5, 1, 30, 8, 16, 2, 11, 24, 7, 13]  # around blocks of 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_prompt_gets_the_tokens_of_generate(architecture, device):
    model = tiny_model(architecture, device)
    engine = DecodeEngine(model, max_batch_size=1, block_size=8)
    for prompt in prompts_of(5, 8, 1):
        (done,) = engine.generate([prompt], max_new_tokens=40)
        assert done.tokens == reference(model, prompt, 40)
    assert engine.stats.buckets[1].launches > 100 and engine.stats.total("failures") == 0


@sweep(architecture=ARCHITECTURES, block_size=[8, 64])  # several blocks for each sequence, or one
def test_ragged_batches_with_joins_and_leaves_get_the_tokens_of_generate(architecture, block_size, device):
    model = tiny_model(architecture, device)
    engine = DecodeEngine(
        model, max_batch_size=8, block_size=block_size, max_seq_len=64, steps_per_sync=3, buckets=[1, 2, 4]
    )
    prompts = prompts_of(*RAGGED)
    lengths = [4 + 5 * (index % 6) for index in range(12)] + [45]  # leave at different times, and others join
    settings = [Sampling(max_new_tokens=length) for length in lengths]
    done = engine.generate(prompts, sampling=settings)
    for prompt, length, completion in zip(prompts, lengths, done, strict=True):
        assert completion.tokens == reference(model, prompt, length)
        assert completion.finish_reason == "length"
    used = [size for size, bucket in engine.stats.buckets.items() if bucket.launches]
    assert used == [1, 2, 4, 8], "the batch shrank through every bucket"


def test_buckets_are_crossed_in_both_directions(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, block_size=8, steps_per_sync=2)
    for count in (1, 4, 2, 3, 1):
        prompts = prompts_of(*RAGGED[:count], seed=count)
        for prompt, done in zip(prompts, engine.generate(prompts, max_new_tokens=15), strict=True):
            assert done.tokens == reference(model, prompt, 15)


def test_prompts_longer_than_a_prefill_chunk_get_the_tokens_of_generate(device):
    model = tiny_model("qwen3", device)
    engine = DecodeEngine(model, max_batch_size=4, block_size=8, prefill_tokens=13)
    prompts = prompts_of(50, 3, 13, 40)
    for prompt, done in zip(prompts, engine.generate(prompts, max_new_tokens=12), strict=True):
        assert done.tokens == reference(model, prompt, 12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_the_models_own_forward(architecture, device):
    model = tiny_model(architecture, device)
    engine = DecodeEngine(model, max_batch_size=4, block_size=8)
    prompts = prompts_of(3, 12, 20)
    for done in engine.generate(prompts, max_new_tokens=20, temperature=1.3, top_k=20, top_p=0.9, seed=4):
        whole = torch.tensor([done.prompt + done.tokens], device=device)
        with torch.no_grad():
            expected = model(whole, use_cache=False).logits[0].float().log_softmax(-1)
        at = torch.arange(len(done.prompt) - 1, whole.shape[1] - 1, device=device)
        expected = expected[at, whole[0, at + 1]]
        torch.testing.assert_close(torch.tensor(done.logprobs, device=device), expected, rtol=0, atol=1e-5)


def test_samples_of_one_prompt_share_its_blocks_and_do_not_disturb_each_other(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, block_size=8, cache_tokens=8 * 9)
    prompt = prompts_of(20)[0]  # two full blocks and a half
    for done in engine.generate([prompt], n=4, max_new_tokens=12):  # 4 of 4 blocks each, 2 of them shared: 10
        assert done.tokens == reference(model, prompt, 12)
    assert engine.stats.prompt_tokens < 4 * len(prompt)
    assert engine.scheduler.allocator.free_blocks == engine.scheduler.allocator.count


def test_without_graphs_every_step_is_eager_and_counted(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, graphs=False)
    (done,) = engine.generate(prompts_of(6), max_new_tokens=10)
    assert done.tokens == reference(model, done.prompt, 10)
    assert engine.stats.total("eager_steps") == 9 and engine.stats.total("launches") == 0


def test_an_end_of_sequence_token_ends_as_in_generate(device):
    model = tiny_model("llama", device)
    prompts = prompts_of(4, 7, 19)
    free = [reference(model, prompt, 30) for prompt in prompts]
    model.generation_config.eos_token_id = [free[0][9], free[1][0]]
    expected = [reference(model, prompt, 30) for prompt in prompts]
    assert len(expected[1]) == 1 and len(expected[0]) <= 10
    done = DecodeEngine(model, max_batch_size=4).generate(prompts, max_new_tokens=30)
    assert [completion.tokens for completion in done] == expected
    assert done[0].finish_reason == done[1].finish_reason == "stop"
    ignored = DecodeEngine(model, max_batch_size=4).generate(prompts, max_new_tokens=30, ignore_eos=True)
    assert [completion.tokens for completion in ignored] == free


def test_padding_is_counted(device):
    model = tiny_model("gpt2", device)
    engine = DecodeEngine(model, max_batch_size=8, buckets=[8], steps_per_sync=4)
    engine.generate(prompts_of(3, 3, 3), max_new_tokens=9)
    bucket = engine.stats.buckets[8]
    assert bucket.row_steps == 64 and bucket.padding_row_steps == 64 - 3 * 8
    assert engine.stats.tokens == 27


def test_tokens_stay_below_the_vocabulary_and_streams_add_up(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=3)
    prompts = prompts_of(4, 6)
    events = list(engine.stream(prompts, max_new_tokens=11))
    done = engine.generate(prompts, max_new_tokens=11)
    for completion in done:
        mine = [event for event in events if event.request == completion.request]
        assert [event.token for event in mine] == completion.tokens
        assert max(completion.tokens) < VOCABULARY
        assert [event.finish_reason for event in mine] == [None] * 10 + ["length"]
