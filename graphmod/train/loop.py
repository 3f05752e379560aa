"""One training run from its settings to its numbers. Everything under `train/` meets here and nowhere else."""

import sys
import time
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from graphmod.errors import GraphmodError
from graphmod.train.checkpoint import save_checkpoint
from graphmod.train.checks import pick_device
from graphmod.train.corpus import Corpus, load_corpus
from graphmod.train.data import Prefetcher, WindowSampler, evaluation_batches, split
from graphmod.train.isolation import isolated
from graphmod.train.metrics import GIB, Metrics
from graphmod.train.model import autocast_dtype, build_model, model_config
from graphmod.train.optim import build_optimizer, learning_rates
from graphmod.train.result import RunResult
from graphmod.train.samples import Samples
from graphmod.train.schema import RunConfig
from graphmod.train.step import TrainStep
from graphmod.train.timing import StepClock, median


def plain_config(config: RunConfig) -> dict[str, Any]:
    """The settings as plain dicts, lists, strings and numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return value.value if isinstance(value, Enum) else value

    return plain(asdict(config))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _evaluate(model: PreTrainedModel, step: TrainStep, batches: list[Tensor]) -> Tensor:
    model.eval()
    try:
        return torch.stack([step.evaluate(batch) for batch in batches]).mean()
    finally:
        model.train()


class _Run:
    """The parts of a run, in the order they depend on each other; `steps()` is the loop."""

    def __init__(self, config: RunConfig, folder: Path, device: torch.device, corpus: Corpus, dims: PretrainedConfig):
        data, train = config.data, config.train
        self.config, self.folder, self.device, self.corpus = config, folder, device, corpus
        training, evaluation = split(corpus, data)
        self.sampler = WindowSampler(training, (train.grad_accumulation, data.batch_size, data.seq_len), train.seed)
        self.evaluation = []
        if train.eval_every:
            batches = evaluation_batches(evaluation, data.batch_size, data.seq_len, train.eval_batches)
            self.evaluation = [batch.to(device) for batch in batches]
        self.model = build_model(config.model, dims, train.precision, device, train.seed)
        self.step = TrainStep(
            self.model,
            build_optimizer(self.model, config.optim, device),
            learning_rates=learning_rates(config.optim, train.steps),
            max_grad_norm=config.optim.max_grad_norm,
            autocast_dtype=autocast_dtype(train.precision),
            config=config.graph,
        )
        self.clock = StepClock(device, train.sync_steps)
        self.tokens_per_step = train.grad_accumulation * data.batch_size * data.seq_len
        text = OmegaConf.to_yaml(OmegaConf.create(plain_config(config)))
        self.metrics = Metrics(folder, device, train.steps, self.clock, self.tokens_per_step, text)
        self.samples = Samples(self.model, config, corpus, self.metrics) if train.sample_every else None

    def _show(self, bar: tqdm) -> None:
        shown = {"graph": self.step.stats.state}
        if self.metrics.losses:
            shown = {"loss": f"{self.metrics.losses[-1]:.3f}"} | shown
        recent = median(self.clock.step_ms[-self.config.train.log_every :])
        if recent is not None:
            shown["step"] = f"{recent:.1f} ms"
        bar.set_postfix(shown, refresh=False)

    def steps(self) -> float:
        """Runs all steps; returns the seconds that took."""
        train, metrics, clock = self.config.train, self.metrics, self.clock
        started = time.perf_counter()
        on_terminal = sys.stderr.isatty()
        with (
            Prefetcher(self.sampler, range(train.steps), pin=self.device.type == "cuda") as batches,
            tqdm(
                total=train.steps, unit="step", dynamic_ncols=on_terminal, mininterval=0.2 if on_terminal else 10
            ) as bar,
        ):
            clock.begin()
            for done, batch in enumerate(batches, start=1):
                called = time.perf_counter()
                loss = self.step(batch)
                host_seconds = time.perf_counter() - called
                metrics.record(loss)
                clock.end_step(host_seconds)
                if done % train.log_every == 0 or done == train.steps:
                    stats = self.step.stats
                    counters = {name: getattr(stats, name) for name in ("captures", "replays", "eager_calls")}
                    metrics.log(self.step.grad_norm, self.step.learning_rate, counters)
                    self._show(bar)
                if self.evaluation and (done % train.eval_every == 0 or done == train.steps):
                    metrics.log_evaluation(_evaluate(self.model, self.step, self.evaluation))
                    clock.begin()
                if self.samples is not None and self.samples.due(done):
                    self.samples.show(done)
                    clock.begin()
                bar.update()
            metrics.finish()
            self._show(bar)
        return time.perf_counter() - started

    def result(self, seconds: float) -> RunResult:
        """The numbers of the run, once its steps are done."""
        on_gpu = self.device.type == "cuda"
        return RunResult(
            scope=self.config.graph.scope.value,
            config=plain_config(self.config),
            device=_device_name(self.device),
            time_source=self.clock.source,
            tokens_per_step=self.tokens_per_step,
            losses=[loss.hex() for loss in self.metrics.losses],
            eval_losses=[[done, loss.hex()] for done, loss in self.metrics.eval_losses],
            step_ms=self.clock.step_ms,
            host_ms=self.clock.host_ms,
            # Step warmup_steps captures, and the one after it may still grow memory; the same for every scope.
            measured_from_step=self.config.graph.warmup_steps + 2,
            allocated_gib=torch.cuda.max_memory_allocated(self.device) / GIB if on_gpu else None,
            reserved_gib=torch.cuda.max_memory_reserved(self.device) / GIB if on_gpu else None,
            graph=asdict(self.step.stats),
            seconds=seconds,
        )

    def close(self) -> None:
        """Frees the graphs and closes the event file."""
        self.metrics.close()
        self.step.reset()


def _run(config: RunConfig, folder: Path, device: torch.device, corpus: Corpus, dims: PretrainedConfig) -> RunResult:
    run = _Run(config, folder, device, corpus, dims)
    try:
        seconds = run.steps()
        result = run.result(seconds)
        if config.train.checkpoint:
            name = Path("checkpoints") / f"step_{config.train.steps:08d}"
            save_checkpoint(folder / name, run.model, run.step, config.train.steps, corpus.tokenizer)
            result.checkpoint = str(name)
    finally:
        run.close()
    return result


def train(config: RunConfig, run_dir: Path) -> RunResult:
    """Trains as told and writes TensorBoard events, `result.json` and the checkpoint into `run_dir`.

    Whatever happens, nothing of the run stays behind in the process: graphs, GPU memory and its peaks, random state
    and deterministic flags are as they were.

    Args:
        config: checked settings, from `parse`.
        run_dir: folder of this run; made if need be.

    Raises:
        ConfigError: the data or the saved model cannot be used; raised before a model is built.
        GraphmodError: `run_dir` cannot be written to.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GraphmodError(f"cannot write to {run_dir}: {error.strerror}") from error
    corpus = load_corpus(config.data, config.model, config.train.seed)
    split(corpus, config.data)  # for its error, which should come before the model
    dims = model_config(config.model, corpus.vocab_size, config.data.seq_len)
    device = pick_device(config.train.device)
    with isolated(device, config.train.seed, config.train.deterministic):
        result = _run(config, run_dir, device, corpus, dims)
    result.write(run_dir)
    return result
