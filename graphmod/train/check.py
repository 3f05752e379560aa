"""`graph.check=true`: the check of the step that a training run is told to make.

The run's own parts are built as for training, and its first batch is trained on, on weights that nobody keeps.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from graphmod.check.report import Report
from graphmod.check.run import check_call, check_layers
from graphmod.config import CompileMode
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.batches import load_data, make_batches
from graphmod.train.device import isolated, pick_device
from graphmod.train.fitting import fitted
from graphmod.train.loss import criterion_of
from graphmod.train.model import model_config
from graphmod.train.run import step_maker
from graphmod.train.settings import RunConfig, Scope
from graphmod.train.step import TrainStep
from graphmod.wrap.layers import edge_modules

CHECK_FILE = "check.json"


def check_training(config: RunConfig, folder: Path) -> Report:
    """Checks the step of a run with these settings, and writes `check.json` into its folder.

    Code is checked as it is before torch.compile (`graph.compile`), which compiles what is captured.

    Raises:
        ConfigError: nothing is to be captured, or the data or model cannot be used.
        GraphmodError: the folder cannot be written to.
    """
    scope = Scope.full_iteration if config.graph.auto else config.graph.scope
    if scope is Scope.none:
        raise ConfigError("graph.check=true with graph=none: nothing is captured; choose per_layer or full_iteration")
    corpus = load_data(config)
    dims = model_config(config.model, corpus.vocab_size, corpus.length)
    device = pick_device(config.train.device)
    with isolated(device, config.train.seed, config.train.deterministic):
        batches = make_batches(config, corpus, device, dims)
        plain = replace(config, graph=replace(config.graph, compile=CompileMode.none))
        model, loss_fn = fitted(plain, corpus, dims, batches, device)
        step = step_maker(plain, model, device, loss_fn)(Scope.none)
        report = _of_step(step, step._stage(batches.sampler(0)), scope)
        report.on_gpu = []  # there the run builds its optimizer for a GPU
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CHECK_FILE).write_text(report.to_json() + "\n")
    except OSError as error:
        raise GraphmodError(f"cannot write to {folder}: {error.strerror}") from error
    return report


def _of_step(step: TrainStep, batch: Any, scope: Scope) -> Report:
    iteration = step.iteration
    if scope is Scope.full_iteration:
        report = check_call(iteration.run, batch, timeout=0)  # the first rank checks alone
        report.name = "train step"
        return report
    layers, others = step._layers(), {}
    if step.config.optimizer:
        layers = [*layers, *edge_modules(step.model, layers)]
        criterion = criterion_of(iteration.loss_fn)
        if criterion is not None:
            held = SimpleNamespace(criterion=criterion)  # which the check exchanges for what it watches
            iteration.loss_fn = functools.partial(
                iteration.loss_fn, criterion=lambda *args, **kwargs: held.criterion(*args, **kwargs)
            )
            others["loss"] = held, "criterion"
        others["optimizer step"] = iteration, "update"
    return check_layers(step.model, layers, lambda: iteration.run(batch), others=others, name="train step")
