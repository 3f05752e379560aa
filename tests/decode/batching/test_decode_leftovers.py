"""Weights that change while requests run, and what is left in the cache of requests that have ended early."""

import pytest
import torch
from decode_models import VOCABULARY, prompts_of, reference, tiny_model

from graphmod.decode import DecodeEngine


def run(engine):
    while engine.unfinished:
        engine.step()


def test_weights_that_change_between_the_first_steps_are_no_error(device):
    model, other = tiny_model("llama", device), tiny_model("llama", device, seed=1)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=4)
    (prompt,) = prompts_of(6)
    handle = engine.submit(prompt, max_new_tokens=20)
    engine.step()
    model.load_state_dict(other.state_dict())
    run(engine)
    assert handle.wait(0)[0].finish_reason == "length" and engine._traffic._first.awaited
    assert engine.generate([prompt], max_new_tokens=9)[0].tokens == reference(other, prompt, 9)
    assert not engine._traffic._first.awaited


def test_what_runs_while_weights_change_is_no_beginning_even_if_nothing_was_known(device):
    model, other = tiny_model("llama", device), tiny_model("llama", device, seed=1)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=4, block_size=8, keep_prefixes=True)
    (prompt,) = prompts_of(6)
    handle = engine.submit(prompt, max_new_tokens=20)
    engine.step()
    engine.step()
    model.load_state_dict(other.state_dict())
    engine.submit([5, 6], max_new_tokens=2)
    run(engine)
    longer = prompt + handle.completions[0].tokens
    assert engine.generate([longer], max_new_tokens=9)[0].tokens == reference(other, longer, 9)


def test_weights_in_the_memory_of_those_before_them_are_noticed(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, keep_prefixes=True, graphs=False)
    weight, (prompt,) = model.model.layers[0].self_attn.k_proj.weight, prompts_of(40)
    met = 0
    for _ in range(20):
        engine.generate([prompt], max_new_tokens=2)
        before = weight.data_ptr()
        for _ in range(50):
            weight.data = weight.data * -1.01  # the memory of the one before the last is free
            if weight.data_ptr() == before:
                break
        met += weight.data_ptr() == before
        found = engine.stats.prefix_tokens
        assert engine.generate([prompt], max_new_tokens=7)[0].tokens == reference(model, prompt, 7)
        assert engine.stats.prefix_tokens == found
    assert met, "it has never happened"


def test_what_another_adapter_has_computed_is_no_beginning(device):
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", device)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 64, "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    model.add_adapter("other", peft.LoraConfig(**settings))
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, keep_prefixes=True)
    (prompt,) = prompts_of(40)

    def tokens():
        (done,) = engine.generate([prompt], max_new_tokens=9)
        assert done.tokens == reference(model.eval(), prompt, 9)
        return done.tokens

    found = [tokens()]
    model.set_adapter("other")
    found.append(tokens())
    with model.disable_adapter():
        found.append(tokens())
    assert tokens() == found[1] and len({tuple(one) for one in found}) == 3


# -- blocks ---------------------------------------------------------------------------------------------------------


def test_a_request_may_be_aborted_whose_blocks_others_hold(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, steps_per_sync=2)
    (prompt,) = prompts_of(16)
    first = engine.submit(prompt, max_new_tokens=1)
    second = engine.submit([*prompt, 5], max_new_tokens=9)
    engine._traffic._arrive_and_leave()
    engine._traffic.decoding(engine._batch._fill)  # both, of which the second reads from the blocks of the first
    engine.abort(first)
    run(engine)
    assert second.wait(0)[0].tokens == reference(model, [*prompt, 5], 9) and engine.stats.blocks_used == 0


@pytest.mark.parametrize("how", ["abort", "error"])
def test_nan_in_a_prompt_that_nobody_finished_reaches_nobody(how, device, monkeypatch):
    model = tiny_model("llama", device)
    (prompt,) = prompts_of(12)
    expected = reference(model, prompt, 50)
    poison = next(token for token in range(3, VOCABULARY) if token not in (*prompt, *expected))
    with torch.no_grad():
        model.get_input_embeddings().weight.data[poison] = float("nan")
    engine = DecodeEngine(model, max_batch_size=1, block_size=8, prefill_tokens=16, cache_tokens=64)
    handle = engine.submit([poison] * 60, max_new_tokens=3)
    engine.step()
    engine.step()
    if how == "abort":
        engine.abort(handle)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(engine._batch, "_prefill", lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
    assert engine.generate([prompt], max_new_tokens=50)[0].tokens == expected
