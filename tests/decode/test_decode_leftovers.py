"""Weights that change while requests run, and what is left in the cache of requests that have ended early."""

import pytest
import torch

from graphmod import CUDAGraphModule
from graphmod.decode import DecodeEngine
from graphmod.decode.model import ModelWatch, number_of
from graphmod.decode.verification import compare_tokens
from tests.support.decode_models import VOCABULARY, prompts_of, reference, tiny_model


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


def scaled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(-1.1)


def through_numpy(model):
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        values *= -1.1


def one_row(model):
    weight = model.model.embed_tokens.weight.detach().numpy()
    weight[[5, 6]] = weight[[6, 5]]


def by_a_graph(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(3, 33).unsqueeze(0)

    @CUDAGraphModule
    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(5):
        step(tokens)
    return lambda model: [step(tokens) for _ in range(3)]


def hooked(model):
    strength = [0.0]
    model.model.layers[0].register_forward_hook(lambda module, given, out: out + strength[0])
    return lambda model: strength.__setitem__(0, 2.0)


def with_tensor(model):
    shift = torch.zeros(32)
    model.model.layers[0].register_forward_hook(lambda module, given, out: out + shift)
    return lambda model: shift.numpy().fill(2.0)


CHANGES = {
    "data": lambda model: scaled,
    "numpy": lambda model: through_numpy,
    "rows": lambda model: one_row,
    "graphed step": by_a_graph,
    "hook": lambda model: lambda model: model.model.layers[0].register_forward_hook(lambda m, given, out: out + 2.0),
    "what a hook reads": hooked,
    "tensor of a hook": with_tensor,
    "attribute": lambda model: lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 5.0),
    "forward": lambda model: lambda model: setattr(model.model.layers[0].mlp, "forward", torch.zeros_like),
    "buffer": lambda model: lambda model: model.model.rotary_emb.inv_freq.numpy().fill(0.5),
}
# Memory written to as nobody is told, by a graph, a hook, what a hook reads, and what a layer is.
ONE_OF_A_KIND = ("numpy", "graphed step", "hook", "what a hook reads", "attribute")


@pytest.mark.parametrize("kept", [False, True], ids=["while another request runs", "kept"])
@pytest.mark.parametrize(
    "how", [one if one in ONE_OF_A_KIND else pytest.param(one, marks=pytest.mark.slow) for one in CHANGES]
)
def test_what_the_model_was_before_a_change_is_no_beginning(how, kept):
    model = tiny_model("llama", torch.device("cpu"))
    change = CHANGES[how](model)
    model.eval()
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, keep_prefixes=kept)
    prompt, other = [*prompts_of(38)[0], 5, 6], [9] * 9

    def ask():
        handle = engine.submit(prompt, max_new_tokens=7)
        while not handle.done:
            engine.step()
        return handle.completions[0]

    held = None if kept else engine.submit(other, max_new_tokens=100)
    before = [ask(), ask()]
    found = engine.stats.prefix_tokens
    assert found > 0 and before[0].tokens == before[1].tokens
    change(model)
    after = ask()
    assert engine.stats.prefix_tokens == found
    compare_tokens(model, after, 7, "here")
    assert after.logprobs != pytest.approx(before[0].logprobs, abs=1e-4), "the change has changed nothing"
    ask()
    assert engine.stats.prefix_tokens > found, "the beginnings are known again"
    assert held is None or not held.done


def test_a_change_between_tokens_of_a_stream_is_seen_by_the_next_request():
    model = tiny_model("llama", torch.device("cpu"))
    engine = DecodeEngine(model, max_batch_size=2, block_size=8)
    (prompt,) = prompts_of(40)
    engine.generate([[5]], max_new_tokens=9)  # the first tokens of an engine are compared
    stream = engine.stream([prompt], max_new_tokens=60)
    next(stream)
    scaled(model)
    engine.step()  # which looks at the model as it is now
    handle = engine.submit(prompt, max_new_tokens=7)
    while not handle.done:
        engine.step()
    compare_tokens(model, handle.completions[0], 7, "here")


def test_a_frozen_model_is_not_looked_at(monkeypatch):
    engine = DecodeEngine(
        tiny_model("llama", torch.device("cpu")), max_batch_size=2, block_size=8, keep_prefixes=True, frozen=True
    )
    monkeypatch.setattr(ModelWatch, "take", None)
    (prompt,) = prompts_of(40)
    for _ in range(2):
        engine.generate([prompt], max_new_tokens=7)
    assert engine.stats.prefix_tokens > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (7,), (33, 5), (64, 64), (3, 4, 5), (100003, 3)])
def test_each_bit_of_a_tensor_counts(dtype, shape):
    torch.manual_seed(0)
    tensor = (9 * torch.randn(shape)).to(dtype)
    before = number_of(tensor)
    assert number_of(tensor.clone()) == before == number_of(torch.stack((tensor, tensor), -1)[..., 0])
    raw = tensor.reshape(-1).view(torch.uint8)
    for place in (0, len(raw) // 2, len(raw) - 1):
        raw[place] ^= 1
        assert number_of(tensor) != before
        raw[place] ^= 1
    assert number_of(torch.empty(0, 4)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanged_rows_and_columns_count(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(4, 16, 64).to(dtype)
    kept = {number_of(tensor.roll(8, dim)).item() for dim in range(3)} | {number_of(tensor).item()}
    assert len(kept) == 3 + 1 - (tensor.shape[0] == 4)  # a roll by 8 of 4 experts moves none of them
