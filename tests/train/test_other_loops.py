"""Layers and steps inside the training loops of other libraries: transformers' Trainer and Accelerate."""

import gc

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from graphmod import CUDAGraphModule, graph_layers
from graphmod.train.attention import use_static_causal_attention
from tests.support.harness import config

accelerate = pytest.importorskip("accelerate")
VOCABULARY, STEPS = 64, 10
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def without_its_global_state():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=VOCABULARY))


def trained(folder, device, graphed, **arguments):
    """The losses and gradient norms that a Trainer logs, and the layers' counters."""
    model = llama()
    layers = graph_layers(model, config=config()) if graphed else []
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(VOCABULARY, (8,), generator=generator).tolist() for _ in range(64)]
    settings = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        **arguments,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = HuggingFaceTrainer(model, settings, train_dataset=data)
    trainer.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return logged, [layer.stats for layer in layers]


@pytest.mark.parametrize(
    "arguments",
    [pytest.param({}, marks=pytest.mark.slow), {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["plain", "accumulation", "bf16"],
)
def test_layers_inside_the_trainer_of_transformers(arguments, tmp_path, device):
    expected, _ = trained(tmp_path, device, False, **arguments)
    logged, stats = trained(tmp_path, device, True, **arguments)
    assert logged == expected and len(logged) == STEPS
    assert all(one.replays >= STEPS - 3 and not one.failures for one in stats), stats


def accelerated(device, graphed, precision):
    """The losses of steps through Accelerate, and the graph's counters."""
    accelerator = accelerate.Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    model = llama()
    use_static_causal_attention(model)
    rate = torch.tensor(1e-3, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device.type == "cuda")
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = CUDAGraphModule(step, config()) if graphed else step
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCABULARY, (2, 8), generator=generator).to(device) for _ in range(STEPS)]
    losses = [call(batch).item() for batch in batches]
    return losses, call.stats if graphed else None


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_whole_step_through_accelerate(precision, device):
    expected, _ = accelerated(device, False, precision)
    losses, stats = accelerated(device, True, precision)
    assert losses == expected and len(set(losses)) == STEPS
    assert stats.replays >= STEPS - 3 and stats.failures == 0, stats


def test_generating_keeps_no_caches_alive():
    model = llama()
    graph_layers(model)
    prompt = torch.ones((2, 8), dtype=torch.int64)

    def alive(times):
        for _ in range(times):
            model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        gc.collect()
        return sum(type(one) is DynamicCache for one in gc.get_objects())

    first = alive(4)
    assert alive(12) <= max(first, 5)


def test_generating_between_steps_is_eager_counts_no_failure_and_names_the_cache(device, caplog):
    model = llama().to(device).train()
    wrapped = graph_layers(model, config())
    tokens = torch.ones((2, 8), dtype=torch.int64, device=device)

    def train():
        for _ in range(6):
            model(input_ids=tokens, labels=tokens).loss.backward()
        return sum(one.stats.replays for one in wrapped)

    before = train()
    model.eval()
    for _ in range(2):
        model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    said = [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]
    assert len(said) == 1 and "'past_key_values' is a DynamicCache" in said[0] and "use_cache=False" in said[0]
    assert all(one.stats.failures == 0 and not one.last_failure for one in wrapped)
    model.train()
    assert train() == before + 12 * len(wrapped)


@pytest.mark.parametrize("use_cache", [None, False])
def test_packed_positions_mean_what_they_mean_in_eager(use_cache):
    positions = torch.cat((torch.arange(10), torch.arange(6)))[None]
    more = {} if use_cache is None else {"use_cache": use_cache}
    losses = []
    for wrap in (False, True):
        model = llama().train()
        if wrap:
            graph_layers(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(7):
            tokens = torch.randint(3, 64, (1, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens, position_ids=positions, **more).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
