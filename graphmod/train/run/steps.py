"""The parts of a run and the loop over its steps."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from graphmod.config import CompileMode
from graphmod.errors import GraphmodError
from graphmod.train.batches import Batches, Data, Prefetcher
from graphmod.train.checkpoint import Progress, check_room, random_state, restore, save_checkpoint, saved_weights
from graphmod.train.device import device_name
from graphmod.train.display import Display, Journal, beside_bar
from graphmod.train.folders import CHECKPOINTS
from graphmod.train.metrics import GIB, Metrics, open_loggers
from graphmod.train.model import dims_of, weights_dtype
from graphmod.train.result import RunResult, StepClock, commit, median, spread, utilization, versions
from graphmod.train.run.assembly import arrangement, divide, step_maker
from graphmod.train.run.auto import AutoScope, candidates
from graphmod.train.run.decisive import decisive_settings
from graphmod.train.run.evaluation import Evaluation
from graphmod.train.run.fitting import fitted, has_layers
from graphmod.train.run.interrupt import StopRequest
from graphmod.train.run.opening import opening
from graphmod.train.run.ranks import Ranks, own_seed
from graphmod.train.run.resume import ResumePoint
from graphmod.train.run.text_samples import Samples
from graphmod.train.settings import NonFinite, RunConfig, plain_config
from graphmod.train.step import warmup_steps


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
        self.settings, self.data = decisive_settings(plain_config(config), device.type), corpus.fingerprint
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
            layers = not ranks.splits_shards and (config.graph.layers is not None or has_layers(self.model))
            scopes = candidates(compiled and not train.activation_checkpointing, layers=layers)
            self.auto = AutoScope(self.make_step, scopes, self.warmup_steps, train.steps - done, ranks)
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
        self.clock = StepClock(device, train.sync_steps)
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
            tokens = self.tokens_per_step
            text = opening(
                self.config, self.model, self.corpus, self.device, self.folder, tokens, self.first, self.ranks
            )
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
        random = self.ranks.of_data(random_state(self.device))
        if self.ranks.first or self.ranks.mesh is not None:
            self._write(done, random)
        self.saved = self.ranks.told(self.saved)

    def _write(self, done: int, random: list[dict[str, torch.Tensor]]) -> None:
        config = plain_config(self.config)
        progress = Progress(
            done,
            config,
            self.settings,
            self.data,
            self.metrics.losses,
            self.metrics.eval_losses,
            self.ranks.data_ranks,
            self.ranks.count,
            arrangement(self.config, self.ranks),
            self.batches.sampler.seen(done),
            random,
        )
        keep, merge = self.config.train.keep_checkpoints, self.config.model.lora.merge
        parent = self.folder / CHECKPOINTS
        parts = self.ranks if self.ranks.mesh is not None else None
        saved = save_checkpoint(parent, self.model, self.step, progress, self.corpus.tokenizer, keep, merge, parts)
        self.saved = saved

    def steps(self) -> float:
        """Runs all steps that are left, or those until a signal says to stop; returns the seconds that took."""
        train, metrics, clock = self.config.train, self.metrics, self.clock
        started = time.perf_counter()
        with (
            StopRequest(train.checkpoint, self.ranks.first) as stop,
            Prefetcher(self.batches.sampler, range(self.first, train.steps), pin=self.device.type == "cuda") as batches,
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
                if self.samples is not None and self.samples.due(done):
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
            flops_per_token=self.used.flops_per_token if self.used else None,
            peak_flops=self.used.peak if self.used else None,
            versions=versions(),
            commit=commit(),
            seconds=seconds,
            checkpoint=os.path.relpath(self.saved, self.folder) if self.saved else None,
            resumed_at_step=self.first,
            skipped_steps=int(self.metrics.latest.get("skipped", 0)),
            first_nonfinite_step=self.first_nonfinite,
        )

    def close(self) -> None:
        """Frees the graphs and closes the loggers."""
        self.metrics.close()
        self.step.reset()
