"""One training run from its settings to its numbers. Everything under `train/` meets here and nowhere else."""

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from graphmod.config import CompileMode
from graphmod.errors import ConfigError, GraphmodError
from graphmod.step.entry import GraphStats
from graphmod.text import ByteCodec, TokenizerCodec
from graphmod.train.batches import Batches, Data, Place, load_data, make_batches, prefetched
from graphmod.train.checkpoint import Progress, check_room, save_checkpoint, saved_weights
from graphmod.train.device import device_name, isolated, pick_device
from graphmod.train.display import Display, Journal, beside_bar, events_fail_once, log, opening
from graphmod.train.experts import split_experts
from graphmod.train.fitting import fitted, has_layers, own_parts
from graphmod.train.folders import CHECKPOINTS, checkpoints, require_whole
from graphmod.train.loss import count_targets_of, criterion_of, weighted_mean
from graphmod.train.metrics import GIB, Metrics, open_loggers
from graphmod.train.model import autocast_dtype, dims_of, model_config, weights_dtype
from graphmod.train.optim import build_optimizer, learning_rates
from graphmod.train.parallel import shard, split_layers
from graphmod.train.ranks import ALONE, Ranks, own_seed
from graphmod.train.result import RunResult, StepClock, commit, median, spread, utilization, versions
from graphmod.train.resume import (
    ResumePoint,
    claimed,
    decisive_settings,
    extension,
    finished_result,
    other_ranks,
    random_state,
    require_same,
    restore,
)
from graphmod.train.settings import LOCAL, NonFinite, ParallelMode, Precision, RunConfig, Scope, plain_config
from graphmod.train.step import TrainStep, microbatches, on_device, shapes, warmup_steps
from graphmod.train.targets import in_words, named, own_lines, passes_on
from graphmod.wrap.layers import edge_modules

if TYPE_CHECKING:
    from graphmod.check.report import Report
    from graphmod.train.auto import AutoScope

# -- SIGINT, SIGTERM and SIGHUP as a wish that the loop grants after the step it is in ---------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KNOWN = (None, *SIGNALS)  # by the number that ranks tell each other


class Aborted(KeyboardInterrupt):
    """A run ended in the middle of a step or of saving, because SIGINT came again; `kept` is its newest checkpoint, or
    None."""

    def __init__(self, kept: Path | None) -> None:
        super().__init__(f"aborted; the newest checkpoint is {kept}" if kept else "aborted; no checkpoint was saved")
        self.kept = kept


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a run: not that of a closed terminal where `nohup` has it ignored."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


class StopRequest:
    """While it is entered, the first SIGINT, SIGTERM or SIGHUP only sets `signal`, and `says` so on the standard error;
    a second one acts as it always does. Handlers belong to the main thread; entered in another one, it does nothing.

    Attributes:
        signal: the one that came to this process, or None.
        agreed: the one that came to any rank when they last agreed, or None.
    """

    def __init__(self, saves: bool = True, says: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self._saves, self._says = saves, says
        self._before: dict = {}

    def agree(self, most: Callable[[int], int]) -> None:
        """Finds out whether a signal came to any rank, by the greatest number of all; what comes meanwhile counts the
        next time."""
        found = _KNOWN[most(_KNOWN.index(self.signal))]
        if found is not None and self.signal is None and self.agreed is None:
            self._say(found)
        self.agreed = self.agreed or found

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        if self.agreed is None:
            self._say(self.signal)

    def _say(self, came: signal.Signals) -> None:
        if not self._says:
            return
        what = "stopping after this step and saving" if self._saves else "stopping after this step; nothing is saved"
        again = "; press Ctrl-C again to abort at once" if came == signal.SIGINT else ""
        # A print might be in the middle of one: the file object would be entered twice.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), f"\n{came.name}: {what}{again}\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in stop_signals()}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()


# -- the evaluation losses of a run: over the same held-out batches each time ------------------------------------------

_COUNTERS = [field.name for field in fields(GraphStats) if field.name not in ("state", "pool_bytes")]


class Evaluation:
    """Batches to evaluate on, on the host, as `TrainStep` takes them, of which each rank takes its part; how much each
    of them weighs by the `count_targets` of the loss function; and what graphs do for it."""

    def __init__(self, batches: list[Any], loss_fn: Callable, device: torch.device, ranks: Ranks = ALONE) -> None:
        self._step: TrainStep | None = None
        self._ranks, self._device, self._any = ranks, device, bool(batches)
        self._spent = dict.fromkeys(_COUNTERS, 0)
        # Each as many, because a rank with parts of the model only computes nothing alone; more than there are count
        # for nothing.
        self._counted = len(batches[ranks.data_rank :: ranks.data_ranks])
        rounds = -(-len(batches) // ranks.data_ranks)
        batches = [batches[(ranks.data_rank + index * ranks.data_ranks) % len(batches)] for index in range(rounds)]
        self._batches = [on_device(batch, device) for batch in batches]
        count, self._targets = count_targets_of(loss_fn), None
        if count is not None and batches:
            # Once and on the host: they are the same at every evaluation.
            targets = [torch.stack([count(part) for part in microbatches(batch)]).sum() for batch in batches]
            self._targets = torch.stack(targets).to(device)

    def __bool__(self) -> bool:
        return self._any

    def __call__(self, model: nn.Module, step: TrainStep) -> dict[str, Tensor]:
        """The mean loss over all targets, by tag, 0-d on the device; that of the averaged weights too, if there are
        any. The model is in training mode afterwards."""
        before = step.stats
        model.eval()
        try:
            losses = {"eval/loss": self._mean(step)}
            if step.has_ema:
                with step.ema_weights():
                    losses["eval/ema_loss"] = self._mean(step)
            return losses
        finally:
            model.train()
            self._note(step, before)

    def _note(self, step: TrainStep, before: GraphStats) -> None:
        if step is not self._step:  # `graph=auto` exchanged it, and its counters begin anew
            self._step, self._spent = step, dict.fromkeys(_COUNTERS, 0)
        after = step.stats
        for name in _COUNTERS:
            self._spent[name] += getattr(after, name) - getattr(before, name)

    def apart(self, step: TrainStep) -> tuple[dict[str, Any], dict[str, Any]]:
        """The counters of `step`, those of `GraphStats`, without what evaluations added, and what they added."""
        spent = self._spent if step is self._step else dict.fromkeys(_COUNTERS, 0)
        counters: dict[str, Any] = asdict(step.stats)
        for name, value in spent.items():
            counters[name] -= value
        return counters, spent

    def _mean(self, step: TrainStep) -> Tensor:
        losses = [step.evaluate(batch) for batch in self._batches]
        if self._ranks.data_ranks == 1:
            found = torch.stack(losses)
            return found.mean() if self._targets is None else weighted_mean(found, self._targets)
        total = torch.zeros(2, device=self._device)  # losses times targets, and targets, where there are any
        for index, loss in enumerate(losses[: self._counted]):
            targets = torch.ones_like(loss) if self._targets is None else self._targets[index].to(loss.dtype)
            total += torch.stack([torch.where(targets > 0, loss, 0) * targets, targets])
        weighted, targets = self._ranks.sum(total).unbind()
        return weighted / targets


# -- text that the model being trained writes, every so many steps -----------------------------------------------------
# Sampling reads the weights where they are and draws no number from torch's generators, so that a run's losses are
# the same with and without it.

_SHARE_OF_PROMPT = 4  # of the positions a model has, so that a long prompt leaves room to write


class Samples:
    """Prints samples of the model that is trained, as `train.sample_*` say, and logs them under `samples`."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, corpus: Data, metrics: Metrics) -> None:
        from graphmod.decode.engine import DecodeEngine  # which no run without samples loads

        self._train, self._metrics = config.train, metrics
        self._codec = ByteCodec() if corpus.tokenizer is None else TokenizerCodec(corpus.tokenizer)
        self._prompt = self._codec.encode(self._train.sample_prompt)
        positions = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        self._prompt = self._prompt[: max(1, positions // _SHARE_OF_PROMPT)]
        self._engine = DecodeEngine(
            model,
            max_batch_size=1,
            max_seq_len=min(positions, len(self._prompt) + self._train.sample_tokens),
            codec=self._codec,
            graphs=config.graph.scope is not Scope.none,
            generation_config="none",  # `train.sample_temperature` says how to choose
        )

    def show(self, done: int) -> None:
        """Samples once, with a seed that differs from step to step."""
        (completion,) = self._engine.generate(
            [self._prompt],
            max_new_tokens=self._train.sample_tokens,
            temperature=self._train.sample_temperature,
            seed=done,
        )
        text = self._train.sample_prompt + (completion.text or "")
        if completion.error is not None:
            text = f"{text} [{completion.error}]"
        with suppress(OSError):  # nobody reads it any more; it is logged as well
            tqdm.write(f"--- step {done}\n{text}")
        self._metrics.log_text("samples", text, done)


# -- the model divided over ranks, and its training step ---------------------------------------------------------------


def divide(config: RunConfig, model: nn.Module, ranks: Ranks) -> None:
    """Leaves this rank its part of the model, in place, where `parallel` says that it holds a part only. Raises
    ConfigError where the model cannot be split so."""
    if ranks.mesh is None:
        return
    if config.parallel.mode is ParallelMode.experts:
        split_experts(model, ranks.data_group, capacity_factor=config.parallel.capacity_factor)
        return
    # Layers are split before they are sharded.
    if "tp" in ranks.mesh.mesh_dim_names:
        split_layers(model, ranks.mesh["tp"])
    if "dp" in ranks.mesh.mesh_dim_names:
        reshard, dtype = config.parallel.reshard_after_forward, autocast_dtype(config.train.precision)
        shard(model, ranks.mesh["dp"], reshard_after_forward=reshard, dtype=dtype)


def step_maker(
    config: RunConfig, model: nn.Module, device: torch.device, loss_fn: Callable, ranks: Ranks = ALONE
) -> Callable[[Scope], TrainStep]:
    """Builds the optimizer of `model`; returns what builds the training step of a scope around both."""
    optimizer = build_optimizer(model, config.optim, device)
    train = config.train

    def make(scope: Scope) -> TrainStep:
        return TrainStep(
            model,
            optimizer,
            loss_fn=loss_fn,
            learning_rates=learning_rates(config.optim, train.steps),
            max_grad_norm=config.optim.max_grad_norm,
            autocast_dtype=autocast_dtype(train.precision),
            nonfinite=train.nonfinite.value,
            scale_loss=train.precision is Precision.fp16_mixed,
            ema_decay=train.ema_decay,
            compile=config.graph.compile.value,
            config=replace(config.graph, scope=scope),
            process_group=ranks.data_group,
        )

    return make


# -- the parts of a run and the loop over its steps --------------------------------------------------------------------


class NonFiniteError(GraphmodError):
    """A loss or gradient was NaN or infinite, and the run was told to stop then."""


class Run:
    """The parts of a run, in the order they depend on each other; `steps()` is the loop."""

    def __init__(
        self,
        config: RunConfig,
        point: ResumePoint,
        device: torch.device,
        corpus: Data,
        dims: PretrainedConfig | None,
        batches: Batches,
        ranks: Ranks,
    ) -> None:
        data, train = config.data, config.train
        self.ranks, self._told_ms = ranks, 0
        self.config, self.folder, self.device, self.corpus = config, point.run_dir, device, corpus
        self.stopped_by: str | None = None
        self.saved: Path | None = point.checkpoint
        self.batches = batches
        self.captures_by_length: dict[int, int] = {}
        done = point.manifest.get("steps_done", 0)
        self.model, loss_fn = fitted(config, corpus, dims, batches, device, ranks, done)
        self.evaluation = Evaluation(self.batches.evaluation, loss_fn, device, ranks)
        compiled = config.graph.compile is not CompileMode.none
        self.warmup_steps = warmup_steps(config.graph, config.graph.compile.value)
        divide(config, self.model, ranks)
        if ranks.data_rank:  # the first one goes on with the random numbers that a run alone has
            torch.manual_seed(own_seed(train.seed, ranks.data_rank, 0))
        self.make_step = step_maker(config, self.model, device, loss_fn, ranks)
        self.auto: AutoScope | None = None
        if config.graph.auto:
            from graphmod.train import auto  # which no other run loads

            split = ranks.mesh is not None and 1 < ranks.data_ranks < ranks.count  # and sharded
            layers = not split and (config.graph.layers is not None or has_layers(self.model))
            scopes = auto.candidates(compiled and not train.activation_checkpointing, layers=layers)
            self.auto = auto.AutoScope(self.make_step, scopes, self.warmup_steps, train.steps - done, ranks)
        self.step = self.auto.step if self.auto else self.make_step(config.graph.scope)
        if train.checkpoint and ranks.first:
            saves = -(-train.steps // train.checkpoint_every) if train.checkpoint_every else 1
            at_once = min(train.keep_checkpoints + 1, saves)  # an old one goes once a new one is whole
            check_room(self.folder / CHECKPOINTS, self.model, train.ema_decay is not None, at_once)
        before = None
        if point.checkpoint is not None:
            weights = saved_weights(point.checkpoint, self.model, weights_dtype(train.precision))
            seed = own_seed(train.seed, ranks.data_rank, done)
            before = restore(point.checkpoint, self.model, self.step, weights, ranks.data_rank, ranks.data_ranks, seed)
        self.first = self.done = before.steps_done if before else 0
        self.clock = StepClock(device)
        self.tokens_per_step = ranks.data_ranks * train.grad_accumulation * data.batch_size * corpus.length
        self.journal = Journal(self.folder, ranks.rank)
        self.display: Display | None = None
        self.used = utilization(self.model, dims_of(self.model), corpus.length, device_name(device), ranks.count)
        loggers = open_loggers(
            train.log if ranks.first else (),
            self.folder,
            plain_config(config),
            None if before is None else before.steps_done,
        )
        self.metrics = Metrics(
            loggers, device, train.steps, self.clock, self.tokens_per_step, before, self.used, self._point
        )
        self.samples: Samples | None = None
        if train.sample_every and ranks.first and isinstance(self.model, PreTrainedModel):
            self.samples = Samples(self.model, config, corpus, self.metrics)

    def open(self, say: Callable[[str], None]) -> None:
        """Says what is trained on what, before the first step."""
        if self.ranks.first:
            of_run = self.corpus, self.device, self.folder, self.tokens_per_step, self.first, self.ranks
            text = opening(self.config, self.model, *of_run)
            say(text)
            self.journal.write(text)

    def _point(self, done: int, scalars: dict[str, float | None]) -> None:
        train = self.config.train  # steps that save a checkpoint are points, too, but not shown
        if self.display is not None and (
            done % train.log_every == 0 or done == train.steps or "eval/loss" in scalars or "eval/ema_loss" in scalars
        ):
            self.display.point(done, scalars)

    def _log(self) -> None:
        step = self.step
        values = {"train/grad_norm": step.grad_norm, "train/lr": step.learning_rate}
        if step.guarded:
            values |= {"first_nonfinite": step.first_nonfinite, "skipped": step.skipped}
        if step.loss_scale is not None:
            values["train/loss_scale"] = step.loss_scale
        if step.loss_scale is not None or self.config.train.nonfinite is NonFinite.skip:
            values["train/skipped_steps"] = step.skipped
        if self.config.parallel.mode is ParallelMode.experts:
            values["train/rerun_steps"] = float(step.reruns)
        values |= self._of_ranks()
        stats, _ = self.evaluation.apart(step)
        assert self.display is not None
        self.display.state(stats["state"])
        self.metrics.log(values, {name: stats[name] for name in ("captures", "replays", "eager_calls")})
        self._check_finite()

    def _of_ranks(self) -> dict[str, float]:
        """The step times of all ranks since this was last asked, as far as they are known."""
        if self.ranks.count == 1:
            return {}
        known = self.clock.step_ms[self._told_ms :]
        self._told_ms += len(known)
        times = [one for one in self.ranks.all(median(known)) if one is not None]
        return {f"perf/rank_step_ms_{name}": value for name, value in spread(times).items()}

    @property
    def first_nonfinite(self) -> int | None:
        """The first step, counted from 1, known by now to have had a value that is not finite."""
        found = int(self.metrics.latest.get("first_nonfinite", -1))
        return found + 1 if found >= 0 else None

    def _check_finite(self) -> None:
        if self.first_nonfinite is not None and self.config.train.nonfinite is NonFinite.stop:
            kept = f"the newest checkpoint is {self.saved}" if self.saved else "no checkpoint was saved before"
            raise NonFiniteError(
                f"step {self.first_nonfinite}: the loss or a gradient is NaN or infinite; {kept}. Lower "
                "optim.learning_rate, look at the data of that step, or skip such updates: train.nonfinite=skip"
            )

    def _finish_values(self) -> None:
        self.metrics.finish()
        self._check_finite()

    def _save(self, done: int) -> None:
        self._finish_values()
        ranks, metrics = self.ranks, self.metrics
        progress = Progress(
            done,
            config := plain_config(self.config),
            decisive_settings(config, self.device.type),
            self.corpus.fingerprint,
            metrics.losses,
            metrics.eval_losses,
            ranks.data_ranks,
            ranks.count,
            ranks.arrangement(self.config.parallel.mode),
            self.batches.sampler.seen(done),
            ranks.of_data(random_state(self.device)),
        )
        if ranks.first or ranks.mesh is not None:
            keep, merge = self.config.train.keep_checkpoints, self.config.model.lora.merge
            parent, parts = self.folder / CHECKPOINTS, ranks if ranks.mesh is not None else None
            tokenizer = self.corpus.tokenizer
            self.saved = save_checkpoint(parent, self.model, self.step, progress, tokenizer, keep, merge, parts)
        self.saved = ranks.told(self.saved)

    def steps(self) -> float:
        """Runs all steps that are left, or those until a signal says to stop; returns the seconds that took."""
        train, metrics, clock = self.config.train, self.metrics, self.clock
        started = time.perf_counter()
        with (
            StopRequest(train.checkpoint, self.ranks.first) as stop,
            prefetched(self.batches.sampler, range(self.first, train.steps), pin=self.device.type == "cuda") as batches,
            Display(self.journal, self.first, train.steps, self.ranks.first) as self.display,
            self.journal.recording(),
            beside_bar(lengths=self.config.data.buckets is not None, bar=self.ranks.first),
        ):
            clock.begin()
            for done, batch in enumerate(batches, start=self.first + 1):
                if self.auto is not None:
                    self.step = self.auto.before_step()
                called = time.perf_counter()
                before = self.step.captures
                loss = self.step(batch)
                host_seconds = time.perf_counter() - called
                self.done = done
                if self.config.data.buckets is not None and self.step.captures != before:
                    length = batch.shape[2] - 1
                    known = self.captures_by_length
                    known[length] = known.get(length, 0) + self.step.captures - before
                if self.auto is not None:
                    self.auto.after_step()
                metrics.record(loss)
                clock.end_step(host_seconds)
                stop.agree(self.ranks.most)
                last = done == train.steps or stop.agreed is not None
                every = train.checkpoint_every
                saving = train.checkpoint and (last or (every > 0 and done % every == 0))
                if done % train.log_every == 0 or last or saving:
                    self._log()
                if self.evaluation and (done % train.eval_every == 0 or done == train.steps):
                    metrics.log_evaluation(self.evaluation(self.model, self.step))
                    clock.begin()
                if self.samples is not None and (done % train.sample_every == 0 or done == train.steps):
                    self.samples.show(done)
                    clock.begin()
                if saving:
                    self._save(done)
                    stop.agree(self.ranks.most)
                    clock.begin()
                self.display.advance()
                if stop.agreed is not None and done < train.steps:
                    self.stopped_by = stop.agreed.name
                    break
            self._finish_values()
            metrics.end()
        return time.perf_counter() - started

    def result(self, seconds: float) -> RunResult:
        """The numbers of the run, once its steps are done."""
        on_gpu = self.device.type == "cuda"
        training, evaluation = self.evaluation.apart(self.step)
        flops, peak = self.used or (None, None)
        # Step warmup_steps captures, and the one after it may still grow memory; the same for every scope.
        measured_from = self.warmup_steps + 2 + (self.auto.began if self.auto else 0)
        of_ranks = self.ranks.all(median(self.clock.step_ms[measured_from:])) if self.ranks.count > 1 else []
        return RunResult(
            scope="auto" if self.auto else self.config.graph.scope.value,
            config=plain_config(self.config),
            status="interrupted" if self.stopped_by else "finished",
            error=self.stopped_by,
            device=device_name(self.device),
            time_source=self.clock.source,
            tokens_per_step=self.tokens_per_step,
            losses=list(self.metrics.losses),
            eval_losses=[[done, loss] for done, loss in self.metrics.eval_losses],
            ema_loss=self.metrics.latest.get("eval/ema_loss"),
            step_ms=self.clock.step_ms,
            host_ms=self.clock.host_ms,
            measured_from_step=measured_from,
            ranks=self.ranks.count,
            rank_step_ms=[one for one in of_ranks if one is not None],
            lengths=self.batches.report(self.captures_by_length),
            auto=self.auto.report() if self.auto else {},
            allocated_gib=torch.cuda.max_memory_allocated(self.device) / GIB if on_gpu else None,
            reserved_gib=torch.cuda.max_memory_reserved(self.device) / GIB if on_gpu else None,
            graph=training,
            evaluation_graph=evaluation,
            flops_per_token=flops,
            peak_flops=peak,
            versions=versions(),
            commit=commit(),
            seconds=seconds,
            checkpoint=os.path.relpath(self.saved, self.folder) if self.saved else None,
            resumed_at_step=self.first,
            rerun_steps=self.step.reruns,
            skipped_steps=int(self.metrics.latest.get("skipped", 0)),
            first_nonfinite_step=self.first_nonfinite,
        )

    def close(self) -> None:
        """Frees the graphs and closes the loggers."""
        self.metrics.close()
        self.step.reset()


# -- a run -------------------------------------------------------------------------------------------------------------

_KEPT = ("busy_ms", "comm_ms", "comm_hidden_ms")


def add_profile(run: Run, result: RunResult) -> None:
    """Adds to the result of a run what `train.profile` asks for, and, on several GPUs, how long each communicates."""
    several = run.ranks.count > 1 and run.device.type == "cuda"
    if not several and not run.config.train.profile:
        return
    from graphmod.train.profile import profile_briefly, profile_steps

    if run.config.train.profile:
        with TemporaryDirectory() as nowhere:
            folder = run.folder if run.ranks.first else Path(nowhere)
            result.profile = profile_steps(run.model, run.step, run.make_step, _profiled_batches(run), folder)
    if not several:
        return
    found = result.profile["run"] if run.config.train.profile else profile_briefly(run.step, _profiled_batches(run))
    of_ranks = run.ranks.all({name: found[name] for name in _KEPT if name in found})
    result.rank_profile = {name: [one[name] for one in of_ranks if name in one] for name in _KEPT}
    run.metrics.log_numbers({f"perf/{name}": value for name, value in result.communication().items()})


def _profiled_batches(run: Run) -> list[Any]:
    make, after = run.batches.sampler, run.config.train.steps
    batches = [make(after)]
    # Of one shape, where there are several.
    return batches + [batch for k in range(1, 64) if shapes(batch := make(after + k)) == shapes(batches[0])][:2]


def _run_steps(run: Run, say: Callable[[str], None]) -> RunResult:
    try:
        run.open(say)
        result = run.result(run.steps())
        if not run.stopped_by:
            add_profile(run, result)
        if run.ranks.first:
            run.journal.write(result.report())
        return result
    except GraphmodError as error:
        run.journal.write(f"error: {error}")
        raise
    except Exception as error:
        if (own := own_parts(run.config)) and own_lines(error) and not passes_on(error):
            raise GraphmodError(f"{own}: step {run.done + 1}: {in_words(error)}") from error
        raise
    except KeyboardInterrupt:
        raise Aborted(next(iter(checkpoints(run.folder / CHECKPOINTS)), None)) from None
    finally:
        run.close()


def _train(config: RunConfig, point: ResumePoint, ranks: Ranks, say: Callable[[str], None]) -> RunResult:
    device = pick_device(config.train.device)
    ranks = ranks.arranged(config.parallel, device)
    settings = decisive_settings(plain_config(config), device.type)
    if point.checkpoint is not None:
        # What takes no time to compare.
        require_same(point.checkpoint, point.manifest, settings, ranks=ranks.data_ranks)
    elif config.model.architecture == LOCAL:
        require_whole(Path(str(config.model.path)))
    if not ranks.first:  # which finds the tokens where the first one has put them
        ranks.wait()
    corpus = load_data(config)
    if ranks.first:
        ranks.wait()
    if config.data.target is not None and len({*ranks.all(corpus.fingerprint)}) > 1:
        raise ConfigError(
            f"{named('data', config.data.target)} has other items on each rank; ranks share them by number, so "
            "draw what is drawn from a generator with a fixed seed"
        )
    dims = model_config(config.model, corpus.vocab_size, corpus.length)
    if corpus.vocab_size is None and dims is not None:
        corpus.vocab_size = dims.vocab_size
    # One that is resumed goes on where it was in the data, also with another number of ranks.
    resumed = (point.manifest["steps_done"], *point.manifest["seen"]) if point.checkpoint is not None else ()
    batches = make_batches(config, corpus, device, dims, Place(ranks.data_rank, ranks.data_ranks, *resumed))
    if config.train.epochs is not None:
        config = replace(config, train=replace(config.train, steps=batches.sampler.steps(config.train.epochs)))
    if point.checkpoint is not None:
        require_same(point.checkpoint, point.manifest, settings, corpus.fingerprint, ranks.data_ranks)
        if (finished := finished_result(point, config.train.steps, config.train.epochs, say)) is not None:
            return finished
        changes = (
            extension(point.manifest, config),
            other_ranks(point.manifest, config, ranks.data_ranks, ranks.arrangement(config.parallel.mode)),
        )
        for said in changes:
            if said is not None:
                say(said)
    with isolated(device, config.train.seed, config.train.deterministic), events_fail_once():
        result = _run_steps(Run(config, point, device, corpus, dims, batches, ranks), say)
    if ranks.first:
        result.write(point.run_dir)
    return result


def train(
    config: RunConfig,
    run_dir: Path,
    point: ResumePoint | None = None,
    say: Callable[[str], None] = log.info,
    ranks: Ranks = ALONE,
) -> RunResult:
    """Trains as told and writes its logs, `result.json` and checkpoints into the folder of the run, which no
    other process may write to meanwhile.

    Whatever happens, nothing of the run stays behind in the process: graphs, GPU memory and its peaks, random state
    and deterministic flags are as they were. SIGINT or SIGTERM ends the run after the step it is in; it is saved, and
    the result's status is `interrupted`.

    Args:
        config: checked settings, from `parse`.
        run_dir: folder of this run; made if need be. A resumed run writes to its own folder instead.
        point: where to start, from a `claimed` that is entered; None looks at `config.train.resume`.
        say: told where a run resumes from, once it is certain that it may, and what it trains on what.
        ranks: those that train together, each of which calls this with the same settings and point.

    Raises:
        ConfigError: the data or the saved model cannot be used, or a run with other settings cannot be resumed; raised
            before a model is built.
        FolderInUse: another process writes to the folder.
        GraphmodError: the folder cannot be written to, or has no room for a checkpoint.
        NonFiniteError: a loss or gradient was not finite, with `train.nonfinite=stop`.
        Aborted: a second SIGINT came before the run had ended.
    """
    with claimed(config, run_dir) if point is None else nullcontext(point) as start:
        return _train(config, start, ranks, say)


# -- the check of the step that a run is told to make, in place of training --------------------------------------------

CHECK_FILE = "check.json"


def check_training(config: RunConfig, folder: Path) -> "Report":
    """Checks the step of a run with these settings, and writes `check.json` into its folder.

    The run's own parts are built as for training, and its first batch is trained on, on weights that nobody keeps. Code
    is checked as it is before torch.compile (`graph.compile`), which compiles what is captured. Raises ConfigError
    where nothing is to be captured, or the data or model cannot be used, and GraphmodError where the folder cannot be
    written to.
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


def _of_step(step: TrainStep, batch: Any, scope: Scope) -> "Report":
    from graphmod.check.run import check_call, check_layers  # which no training loads

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
