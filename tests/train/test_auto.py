"""`graph=auto` keeps the fastest scope and changes no number."""

import pytest
import torch

from graphmod.errors import ConfigError
from graphmod.train.auto import MEASURED, AutoScope, candidates, trial_steps
from graphmod.train.run import train
from graphmod.train.settings import Scope

LONG = ["train.steps=80", "model=gpt2_tiny", "model.dropout=0.2", "data.max_bytes=20000"]


@pytest.fixture
def pretend(monkeypatch):
    """`pretend(none=8.0, per_layer=4.0, full_iteration=2.0)`: what each scope's steps take, in ms."""

    def arrange(**ms):
        monkeypatch.setattr(AutoScope, "_median_ms", lambda self: ms[self._scopes[len(self.trials)].value])

    return arrange


@pytest.mark.parametrize("fastest", ["none", "per_layer"])
def test_the_fastest_scope_is_kept_and_the_losses_are_eagers(tiny, tmp_path, pretend, fastest):
    pretend(**{scope: 1.0 if scope == fastest else 9.0 for scope in ("none", "per_layer", "full_iteration")})
    settings = [*LONG, "train.ema_decay=0.9", "train.eval_every=7", "train.eval_batches=1"]
    chosen = train(tiny(*settings, "graph=auto"), tmp_path / "auto")
    plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
    assert chosen.losses == plain.losses and chosen.eval_losses == plain.eval_losses
    assert chosen.auto["chosen"] == fastest and len(chosen.auto["trials"]) == 3
    assert fastest in chosen.report() and "9.00 ms" in chosen.report()
    assert (chosen.graph["state"] == "captured") is (fastest != "none")


def test_graphs_that_gain_next_to_nothing_are_declined(tiny, tmp_path, pretend):
    pretend(none=1.01, per_layer=1.5, full_iteration=1.0)
    result = train(tiny(*LONG, "graph=auto"), tmp_path)
    assert result.auto["chosen"] == "none" and "no graph is 2% faster" in result.auto["reason"]


def test_real_times_are_measured_and_eager_wins_over_the_emulator(tiny, tmp_path):
    result = train(tiny(*LONG, "graph=auto"), tmp_path)
    assert all(0.01 < trial["ms"] < 1000 for trial in result.auto["trials"])
    assert result.measured_from_step >= trial_steps(Scope.none, 3) + trial_steps(Scope.per_layer, 3)
    assert result.scope == "auto" and result.auto["chosen"] in {scope.value for scope in Scope}
    assert result.report().count("note: these are times of emulated graphs") == 1


def test_a_run_too_short_to_measure_stays_eager_and_says_so(tiny, tmp_path, caplog):
    result = train(tiny("graph=auto", "data.max_bytes=20000"), tmp_path)
    assert result.auto["chosen"] == "none" and "too short to measure (needs 78);" in result.report()
    assert "too short" not in caplog.text, "the report says it, and once is enough"


def test_a_run_that_is_there_to_measure_is_long_enough(settings):
    config = settings("graph=auto", "train=measure", "graph.warmup_steps=6")
    auto = AutoScope(Counting, candidates(False), config.graph.warmup_steps, config.train.steps)
    assert auto.chosen is None


def test_compiled_layers_are_no_candidate_because_they_round_differently():
    assert candidates(compiled=True) == [Scope.none, Scope.full_iteration]


class Counting:
    """A step that only says what it is."""

    def __init__(self, scope):
        self.scope, self.device, self.captures = scope, torch.device("cpu"), 0
        self.stats = type("Stats", (), {"failures": int(scope is Scope.per_layer), "capture_seconds": 0.5})

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def reset(self):
        pass


def test_a_scope_whose_captures_fail_is_not_chosen_however_fast(pretend):
    pretend(none=8.0, per_layer=1.0, full_iteration=4.0)
    auto = AutoScope(Counting, candidates(False), 3, 1000)
    for _ in range(100):
        auto.before_step()
        auto.after_step()
    assert auto.step.scope is auto.chosen is Scope.full_iteration
    assert "1 capture failed" in auto.reason and "capture alone pays off after 125 steps" in auto.reason


def test_what_happens_between_steps_is_not_timed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    auto = AutoScope(Counting, candidates(False), 3, 1000)
    for step in range(trial_steps(Scope.none, 3)):
        auto.before_step()
        clock[0] += 0.002
        auto.after_step()
        clock[0] += 10.0 * (step % 2)  # an evaluation
    auto.before_step()
    assert [trial.ms for trial in auto.trials] == [pytest.approx(2.0)]


class Clock:
    """Runs `AutoScope` on steps that take what they are told."""

    def __init__(self, monkeypatch, scopes, steps=1000):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.auto = AutoScope(Counting, scopes, 3, steps)

    def run(self, ms, captures=0):
        step = self.auto.before_step()
        self.now += ms / 1e3
        step.captures += captures
        self.auto.after_step()

    def trial(self, times):
        """Runs until the present trial is over; returns the steps it took."""
        done, taken = len(self.auto.trials), 0
        while len(self.auto.trials) == done and taken < 200:
            self.run(times[taken % len(times)])
            taken += 1
        return taken - 1  # the end of a trial is noticed at the step after it


def test_times_that_vary_are_taken_for_longer(monkeypatch):
    steady = Clock(monkeypatch, candidates(False))
    assert steady.trial([10.0]) == trial_steps(Scope.none, 3)
    restless = Clock(monkeypatch, candidates(False))
    assert restless.trial([10.0, 14.0, 9.0]) == trial_steps(Scope.none, 3) + 2 * MEASURED
    assert restless.auto.trials[0].ms == pytest.approx(10.0)
    short = Clock(monkeypatch, candidates(False), steps=80)
    assert short.trial([10.0, 14.0, 9.0]) == trial_steps(Scope.none, 3), "more than half of a short run"


def test_a_single_slow_step_does_not_count(monkeypatch):
    clock = Clock(monkeypatch, candidates(False))
    assert clock.trial([10.0] * 6 + [200.0] + [10.0] * 20) == trial_steps(Scope.none, 3)
    assert clock.auto.trials[0].ms == pytest.approx(10.0)


def test_times_that_vary_a_lot_are_noted_with_the_scopes_that_they_are_of(monkeypatch):
    clock = Clock(monkeypatch, [Scope.none, Scope.full_iteration])
    clock.trial([10.0])
    clock.trial([4.0] * 4 + [40.0] * 2)
    varied, emulated = clock.auto.notes
    assert "varied a lot" in varied and "full_iteration (40.00 ms)" in varied and "none" not in varied
    assert "emulated" in emulated and "do not predict a GPU" in emulated
    assert [trial["ms_p95"] for trial in clock.auto.report()["trials"]] == pytest.approx([10.0, 40.0])


def test_steady_times_are_not_noted(monkeypatch):
    clock = Clock(monkeypatch, [Scope.none, Scope.full_iteration])
    clock.trial([10.0, 12.0])
    clock.trial([4.0])
    assert len(clock.auto.notes) == 1 and "varied" not in clock.auto.notes[0]


def test_a_step_that_still_captures_begins_the_timing_anew(monkeypatch):
    clock = Clock(monkeypatch, [Scope.none, Scope.full_iteration])
    clock.trial([10.0])
    settled = trial_steps(Scope.full_iteration, 3) - MEASURED
    for _ in range(settled - 1 + 5):  # the step that ended the first trial was the first of this one
        clock.run(4.0)
    clock.run(900.0, captures=1)
    assert clock.trial([5.0]) == MEASURED
    assert clock.auto.trials[1].ms == pytest.approx(5.0) and clock.auto.chosen is Scope.full_iteration


def test_a_scope_that_captures_all_the_time_is_not_chosen(monkeypatch):
    clock = Clock(monkeypatch, [Scope.none, Scope.full_iteration])
    clock.trial([10.0])
    for _ in range(60):
        clock.run(4.0, captures=1)
    assert clock.auto.chosen is Scope.none and "that should have been replays" in clock.auto.reason


def test_memory_of_what_was_tried_is_given_back_before_the_next(monkeypatch, pretend):
    pretend(none=8.0, per_layer=1.0, full_iteration=4.0)
    order = []
    monkeypatch.setattr(Counting, "reset", lambda self: order.append(f"reset {self.scope.value}"))
    monkeypatch.setattr("graphmod.train.auto.release_memory", lambda device: order.append("release"))

    def make(scope):
        order.append(f"make {scope.value}")
        return Counting(scope)

    auto = AutoScope(make, [Scope.none, Scope.full_iteration], 3, 60)
    for _ in range(40):
        auto.before_step()
        auto.after_step()
    assert order == ["make none", "reset none", "release", "make full_iteration"]


@pytest.mark.gpu
def test_on_a_gpu_a_rejected_scope_leaves_no_memory_behind(tiny, tmp_path, pretend):
    pretend(none=1.0, per_layer=9.0, full_iteration=9.0)
    settings = [*LONG, "train.device=cuda", "data.batch_size=16", "data.seq_len=512", "model.hidden_size=256"]
    chosen = train(tiny(*settings, "graph=auto"), tmp_path / "auto")
    plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
    assert chosen.auto["chosen"] == "none"
    assert chosen.reserved_gib <= 1.1 * plain.reserved_gib


def test_a_scope_beside_auto_is_a_clear_error(tiny):
    with pytest.raises(ConfigError, match="Use graph=auto alone"):
        tiny("graph=auto", "graph.scope=per_layer")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["none", "default"])
def test_on_a_gpu_choosing_changes_no_number(tiny, tmp_path, how):
    settings = [*LONG, "train.device=cuda", "train.deterministic=true", f"graph.compile={how}"]
    chosen = train(tiny(*settings, "graph=auto"), tmp_path / "auto")
    plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
    assert chosen.losses == plain.losses
    assert len(chosen.auto["trials"]) == (3 if how == "none" else 2)
    assert all(trial["failed"] is None for trial in chosen.auto["trials"])
