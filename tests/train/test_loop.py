"""A run computes what a loop written out by hand computes, writes it down, and leaves nothing behind."""

import gc
import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, PreTrainedModel

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.batches import WindowSampler, split
from graphmod.train.checkpoint import load_training_state
from graphmod.train.data import load_corpus
from graphmod.train.device import isolated
from graphmod.train.metrics import Metrics
from graphmod.train.model import build_model, model_config
from graphmod.train.optim import learning_rates
from graphmod.train.result import RunResult, StepClock
from graphmod.train.run import Run, train
from graphmod.train.step import TrainStep

CPU = torch.device("cpu")


@pytest.fixture
def on_text(tiny, text):
    """`on_text("graph=none")` is the checked config of a tiny run on the text file."""
    return lambda *overrides: tiny("data=text", f"data.path={text}", *overrides)


def losses(result: RunResult) -> list[float]:
    return result.losses


def by_hand(config) -> list[float]:
    """The same training with nothing but PyTorch: no TrainStep, no schedule on the device, no prefetching."""
    corpus = load_corpus(config.data, config.model, config.train.seed)
    training, _ = split(corpus, config.data)
    shape = (config.train.grad_accumulation, config.data.batch_size, config.data.seq_len)
    sampler = WindowSampler(training, shape, config.train.seed)
    dims = model_config(config.model, corpus.vocab_size, config.data.seq_len)
    model = build_model(config.model, dims, config.train.precision, CPU, config.train.seed)
    model.set_attn_implementation("sdpa")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.0), betas=config.optim.betas, fused=True)
    seen = []
    for step, rate in enumerate(learning_rates(config.optim, config.train.steps)):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate)
        total = torch.zeros(())
        batch = sampler(step)
        for tokens in batch:
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(batch)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(total.item())
    return seen


@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_losses_are_those_of_a_loop_written_by_hand(on_text, tmp_path, scope, accumulation):
    config = on_text(f"graph={scope}", f"train.grad_accumulation={accumulation}")
    assert losses(train(config, tmp_path)) == by_hand(config)


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
def test_dropout_draws_the_same_numbers_in_every_scope(on_text, tmp_path, scope):
    settings = ["model=gpt2_tiny", "model.dropout=0.2", "train.eval_every=3", "train.eval_batches=2"]
    plain = train(on_text(*settings, "graph=none"), tmp_path / "none")
    graphed = train(on_text(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed"])
def test_reduced_precision_trains(on_text, tmp_path, precision):
    result = train(on_text(f"train.precision={precision}", "optim.learning_rate=0.01"), tmp_path)
    assert all(map(math.isfinite, losses(result)))
    assert losses(result)[-1] < losses(result)[0]


def test_the_seed_decides_everything(on_text, tmp_path):
    first, again, other = (
        train(on_text(f"train.seed={seed}"), tmp_path / name) for seed, name in ((1, "a"), (1, "b"), (2, "c"))
    )
    assert first.losses == again.losses != other.losses


def test_evaluation_does_not_change_the_training(on_text, tmp_path):
    plain = train(on_text("model=gpt2_tiny"), tmp_path / "plain")
    evaluated = train(on_text("model=gpt2_tiny", "train.eval_every=3", "train.eval_batches=2"), tmp_path / "evaluated")
    assert evaluated.losses == plain.losses
    assert [done for done, _ in evaluated.eval_losses] == [3, 6, 8]


def test_the_result_says_what_was_measured_and_from_where(on_text, tmp_path):
    result = train(on_text("train.grad_accumulation=2"), tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert len(written["losses"]) == len(written["step_ms"]) == len(written["host_ms"]) == 8
    assert written["measured_from_step"] == 5 and written["tokens_per_step"] == 2 * 2 * 16
    assert written["step_ms_median"] == sorted(written["step_ms"][5:])[1]
    assert written["time_source"] == "wall clock"
    assert written["config"]["graph"]["scope"] == "full_iteration"
    assert RunResult.read(tmp_path) == result
    assert "loss" in result.report() and "eager calls" in result.report()


def test_a_run_too_short_to_measure_says_so(on_text, tmp_path):
    result = train(on_text("train.steps=2"), tmp_path)
    assert result.step_ms_median is None and "the run ended at step 2" in result.report()


def test_tensorboard_shows_every_tag_at_the_log_points(on_text, tmp_path):
    train(on_text("train.eval_every=4", "train.eval_batches=1"), tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = {"train/loss", "train/grad_norm", "train/lr", "perf/step_ms", "perf/host_ms", "perf/tokens_per_s"}
    tags |= {"graph/captures", "graph/replays", "graph/eager_calls"}
    assert tags | {"eval/loss"} == set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("eval/loss")] == [4, 8]
    for tag in tags:
        assert [event.step for event in events.Scalars(tag)] == [3, 6, 8], tag
    assert "config/text_summary" in events.Tags()["tensors"]


def test_values_are_fetched_at_log_points_only(on_text, tmp_path, monkeypatch):
    fetched = []
    original = Metrics._fetch
    monkeypatch.setattr(
        Metrics, "_fetch", lambda self, *args, **kwargs: (fetched.append(self._done), original(self, *args))
    )
    train(on_text("train.log_every=4"), tmp_path)
    assert fetched == [4, 8]


def test_the_checkpoint_loads_with_from_pretrained_and_holds_the_optimizer(on_text, tmp_path):
    result = train(on_text(), tmp_path)
    folder = tmp_path / result.checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.use_cache is True and model.config._attn_implementation == "sdpa"
    state = load_training_state(folder)
    assert state["steps_done"] == 8 and int(state["step"]["position"]) == 8
    moments = {f"optimizer/{name}/exp_avg" for name, _ in model.named_parameters()}
    assert {name for name in state["trained"] if name.endswith("/exp_avg")} == moments
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "a half-written folder was left"


def test_a_checkpoint_can_be_trained_on_as_a_local_model(on_text, settings, text, tmp_path):
    first = train(on_text("train.steps=30", "optim.learning_rate=0.01"), tmp_path / "first")
    shape = ["data.seq_len=16", "data.batch_size=2", "train.steps=2", "train.eval_every=0", "train.device=cpu"]
    folder = tmp_path / "first" / first.checkpoint
    config = settings("model=local", f"model.path={folder}", "data=text", f"data.path={text}", *shape)
    assert losses(train(config, tmp_path / "second"))[0] < losses(first)[0] - 0.5


def test_data_that_is_too_short_is_found_before_a_model_is_built(on_text, tmp_path, monkeypatch):
    monkeypatch.setattr("graphmod.train.fitting.build_model", lambda *args: pytest.fail("a model was built"))
    with pytest.raises(ConfigError, match="too short"):
        train(on_text("data.max_bytes=100", "data.seq_len=128"), tmp_path)


def test_a_run_folder_that_cannot_be_made_is_named(on_text, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(GraphmodError, match="cannot write to"):
        train(on_text(), tmp_path / "file" / "run")


def test_a_failed_checkpoint_leaves_no_half_of_it(on_text, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(GraphmodError, match="No space left on device"):
        train(on_text(), tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def models_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects())


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_nothing_behind(on_text, tmp_path, monkeypatch, fails):
    resets = []
    original = TrainStep.reset
    monkeypatch.setattr(TrainStep, "reset", lambda self: (resets.append(self), original(self))[1])
    if fails:
        calls = iter(range(100))
        step = TrainStep.__call__

        def failing(self, batch):
            if next(calls) == 5:
                raise ArithmeticError("injected")
            return step(self, batch)

        monkeypatch.setattr(TrainStep, "__call__", failing)
    alive, state, deterministic = models_alive(), torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    try:
        train(on_text("train.deterministic=true"), tmp_path)
        assert not fails
    except ArithmeticError as error:
        assert fails and str(error) == "injected"
    assert len(resets) == 1
    resets.clear()
    assert models_alive() == alive
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.are_deterministic_algorithms_enabled() is deterministic


def test_deterministic_flags_and_the_environment_are_put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    import os

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    with isolated(CPU, 0, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.use_deterministic_algorithms(before)


def test_the_clock_leaves_out_what_happens_between_stretches(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 50.0, 54.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StepClock(CPU)
    clock.begin()
    clock.end_step(0.5)
    clock.end_step(0.5)
    clock.begin()
    clock.end_step(0.5)
    assert clock.step_ms == [1000.0, 2000.0, 4000.0] and clock.host_ms == [500.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_on_a_gpu_the_loop_never_waits_for_the_device(on_text, tmp_path, monkeypatch, scope):
    original = Run.steps

    def watched(self):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "steps", watched)
    # Saving does wait: it copies the weights.
    result = train(on_text("train.device=cuda", f"graph={scope}", "train.steps=20", "train.checkpoint=false"), tmp_path)
    assert len(result.losses) == len(result.step_ms) == 20
    assert result.time_source == "cuda events" and all(ms > 0 for ms in result.step_ms)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_on_a_gpu_a_run_gives_its_memory_back(on_text, tmp_path, scope):
    train(on_text("train.device=cuda", f"graph={scope}"), tmp_path / "first")
    before = torch.cuda.memory_allocated()
    train(on_text("train.device=cuda", f"graph={scope}"), tmp_path / "second")
    assert torch.cuda.memory_allocated() == before
