"""`graph=auto`: tries the scopes on the first steps of a run and keeps the fastest.

The trial steps are steps of the training, and every scope computes the same bits, so that trying changes no number.
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from graphmod.train.device import release_memory
from graphmod.train.ranks import ALONE, Ranks
from graphmod.train.result import StepClock, percentile, unsteady
from graphmod.train.settings import Scope
from graphmod.train.step import TrainStep
from graphmod.words import counted

log = logging.getLogger("graphmod")

MEASURED = 8  # steps timed in each scope; up to so many times as many where they vary more than is steady
_AT_MOST = 3
_STEADY = 0.04  # the middle half of the times, over their median: then the median of 8 is good to about one percent
_EAGER_SETTLING = 3  # lazily created state, cuBLAS workspaces, a compilation
_AFTER_CAPTURE = 3  # the capturing step, one that may still grow memory, one more
_LATE_CAPTURES = 3  # timed steps that may capture; what is captured anew all the time is not worth choosing
_WORTH = 1.02  # a graph must be this much faster than eager steps, or it is not worth its memory


@dataclass
class Trial:
    """What a scope did."""

    scope: str
    ms: float  # milliseconds a step, the median of those timed, at least `MEASURED`; none of them captured
    ms_p95: float | None  # their 95th percentile
    capture_seconds: float = 0.0
    failed: str | None = None  # why it does not count, or None


def candidates(compiled: bool, layers: bool = True) -> list[Scope]:
    """The scopes to try, the eager one first. Where others compile the whole, layers compiled one by one round
    differently, so that choosing them would change the numbers; a model may have no `layers` to be captured one by
    one."""
    by_layer = [Scope.per_layer] if layers and not compiled else []
    return [Scope.none, *by_layer, Scope.full_iteration]


def trial_steps(scope: Scope, warmup_steps: int) -> int:
    """How many steps the trial of a scope takes where their times are steady."""
    return MEASURED + (_EAGER_SETTLING if scope is Scope.none else max(warmup_steps, 2) + _AFTER_CAPTURE)


class AutoScope:
    """Owns the `TrainStep` of a run and exchanges it between steps until the choice is made.

    Args:
        make: builds the step of a scope, around one and the same model and optimizer.
        scopes: to try, in order; the first is the eager one.
        steps: of the run that are left.
        ranks: of the run; all go by what the first one measures.

    Attributes:
        chosen: the scope that is kept; None while it is being measured.
        notes: what else one must know to rely on what was measured, in words.
        began: trial steps done when the present step was built.
    """

    def __init__(
        self,
        make: Callable[[Scope], TrainStep],
        scopes: list[Scope],
        warmup_steps: int,
        steps: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self._make, self._scopes, self._warmup, self._ranks = make, scopes, warmup_steps, ranks
        self.trials: list[Trial] = []
        self.chosen: Scope | None = None
        self.reason = ""
        self.notes: list[str] = []
        self.began = self._done = 0
        self._in_trial, self._timed = 0, False
        self._captures = self._late = 0
        self.step = make(scopes[0])
        self._clock = StepClock(self.step.device)
        needed = sum(trial_steps(scope, warmup_steps) for scope in scopes)
        # Trials in more than half of the steps leave too few to win anything.
        self._may_go_on = steps >= 2 * (needed + len(scopes) * (_AT_MOST - 1) * MEASURED)
        if steps < 2 * needed:
            self._choose(
                scopes[0],
                f"{counted(steps, 'step')} is too short to measure (needs {2 * needed}); raise train.steps or choose "
                "a scope",
            )

    def before_step(self) -> TrainStep:
        """The step to use next."""
        if self.chosen is None and self._ranks.told(self._ranks.first and self._enough()):
            self._end_trial(self._scopes[len(self.trials)])
        if self.chosen is None:
            settled = trial_steps(self._scopes[len(self.trials)], self._warmup) - MEASURED
            self._timed = self._in_trial >= settled
            self._captures = self.step.captures
            self._in_trial += 1
            if self._timed:
                self._clock.begin()
        self._done += 1
        return self.step

    def after_step(self) -> None:
        """Says that the step has been called; what comes until the next one is not timed."""
        if self.chosen is not None or not self._timed:
            return
        self._clock.end_step(0.0)
        if self.step.captures != self._captures:
            self._late += 1
            if self._late <= _LATE_CAPTURES:
                self._clock = StepClock(self.step.device)

    def _enough(self) -> bool:
        """Whether the median of what was timed can be relied on, or nothing better is to be had."""
        count = len(self._clock.host_ms)
        # Looking at the times waits for the device, so not after each step.
        if count < MEASURED or count % MEASURED:
            return False
        if count >= _AT_MOST * MEASURED or not self._may_go_on:
            return True
        self._clock.collect(wait=True)
        low, middle, high = statistics.quantiles(self._clock.step_ms, n=4)
        return high - low <= _STEADY * middle

    def _median_ms(self) -> float:
        return statistics.median(self._clock.step_ms)

    def _trial(self, scope: Scope) -> Trial:
        self._clock.collect(wait=True)
        trial = Trial(scope.value, self._median_ms(), percentile(self._clock.step_ms, 95))
        stats = self.step.stats
        trial.capture_seconds = stats.capture_seconds
        if stats.failures:
            trial.failed = f"{counted(stats.failures, 'capture')} failed; see the log"
        elif self._late > _LATE_CAPTURES:
            trial.failed = f"it captured in {counted(self._late, 'step')} that should have been replays"
        return trial

    def _end_trial(self, scope: Scope) -> None:
        trial = self._ranks.told(self._trial(scope) if self._ranks.first else None)
        assert trial is not None
        self.trials.append(trial)
        if len(self.trials) < len(self._scopes):
            self._switch(self._scopes[len(self.trials)])
            return
        self.notes = self._remarks()
        eager = self.trials[0]
        best = min((t for t in self.trials if t.failed is None), key=lambda t: t.ms)
        measured = ", ".join(f"{t.scope} {t.ms:.2f} ms" + (f" ({t.failed})" if t.failed else "") for t in self.trials)
        if best is not eager and eager.ms / best.ms < _WORTH:
            self._choose(Scope.none, f"{measured} per step: no graph is {_WORTH - 1:.0%} faster")
        elif best is eager:
            self._choose(Scope.none, f"{measured} per step: eager steps are the fastest")
        else:
            pays = best.capture_seconds * 1e3 / (eager.ms - best.ms)
            self._choose(
                Scope(best.scope),
                f"{measured} per step: {best.scope} is {eager.ms / best.ms:.2f} times as fast as eager steps; its "
                f"capture alone pays off after {counted(round(pays), 'step')}",
            )

    def _remarks(self) -> list[str]:
        said = []
        restless = [f"{t.scope} ({t.ms_p95:.2f} ms)" for t in self.trials if unsteady(t.ms, t.ms_p95)]
        if restless:
            said.append(
                f"times varied a lot: the 95th percentile is more than twice the median with {', '.join(restless)}; "
                "measure again on an idle machine, or choose a scope"
            )
        if self.step.device.type != "cuda":
            said.append("these are times of emulated graphs; they do not predict a GPU")
        return said

    def _choose(self, scope: Scope, reason: str) -> None:
        if self.trials and self._scopes[-1] is not scope:
            self._switch(scope)
        self.chosen, self.reason = scope, reason
        log.info(f"graph=auto uses graph={scope}; see the report at the end of the run")

    def _switch(self, scope: Scope) -> None:
        state, device = self.step.state_dict(), self.step.device
        self.step.reset()
        # Else the pools of what was tried stay reserved, and count in the peak that the run reports.
        release_memory(device)
        self.step = self._make(scope)
        self.step.load_state_dict(state)
        self.began, self._in_trial, self._late = self._done, 0, 0
        self._clock = StepClock(device)

    def report(self) -> dict[str, Any]:
        """What was measured and chosen, as plain values."""
        chosen = self.chosen.value if self.chosen is not None else None
        trials = [asdict(trial) for trial in self.trials]
        return {"chosen": chosen, "reason": self.reason, "notes": self.notes, "trials": trials}
