"""The comparison sets each run beside the one without graphs, and survives runs that failed."""

import json
import sys
import warnings

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graphmod.train.compare import EMULATED, compare, markdown, plot, remarks, swept, table, write_report
from graphmod.train.folders import link_latest
from graphmod.train.result import RunResult
from graphmod.words import counted


def result(scope: str, step_ms: float, losses=(3.0, 2.0, 1.0), steps: int = 10, seed: int = 0) -> RunResult:
    return RunResult(
        scope=scope,
        config={"graph": {"scope": scope}, "train": {"seed": seed, "deterministic": False}},
        tokens_per_step=100,
        losses=[float(loss) for loss in losses],
        step_ms=[1000.0] * 5 + [step_ms] * (steps - 5),
        host_ms=[900.0] * 5 + [step_ms / 2] * (steps - 5),
        measured_from_step=5,
        reserved_gib=1.5,
        graph={"capture_seconds": 0.25},
    )


def test_speed_up_and_equality_are_against_the_run_without_graphs():
    rows = compare({"full": result("full_iteration", 2.0), "none": result("none", 8.0)})
    assert [row.name for row in rows] == ["full", "none"]
    full, none = rows
    assert (full.baseline, full.speedup, full.losses_equal) == ("none", 4.0, True)
    assert (full.step_ms_median, full.step_ms_p95, full.host_ms_median) == (2.0, 2.0, 1.0)
    assert full.tokens_per_s == 50_000 and full.capture_seconds == 0.25 and full.reserved_gib == 1.5
    assert none.speedup == 1.0 and none.losses_equal is None, "it was compared with itself"


def test_one_different_bit_is_a_difference_and_its_step_is_named():
    other = result("per_layer", 4.0, losses=(3.0, 2.0000000000000004, 1.0))
    rows = compare({"none": result("none", 8.0), "per_layer": other})
    assert rows[1].losses_equal is False and rows[1].first_difference == 2
    assert "no, from step 2" in table(rows)
    assert any(
        "train.deterministic" in remark for remark in remarks(rows, {"none": result("none", 8.0), "per_layer": other})
    )


def test_runs_of_different_lengths_are_not_equal():
    rows = compare({"none": result("none", 8.0), "per_layer": result("per_layer", 4.0, losses=(3.0, 2.0))})
    assert rows[1].losses_equal is False and rows[1].first_difference == 3


def test_each_run_is_compared_with_the_baseline_of_its_own_settings():
    rows = compare(
        {
            "none_1": result("none", 8.0, seed=1),
            "none_2": result("none", 6.0, seed=2),
            "layer_2": result("per_layer", 3.0, seed=2),
        }
    )
    assert rows[2].baseline == "none_2" and rows[2].speedup == 2.0


def test_what_a_run_logs_or_writes_beside_its_steps_makes_it_no_other_run():
    full = result("full_iteration", 2.0)
    full.config["train"] |= {"log_every": 1, "log": ["csv"], "sample_every": 5, "eval_every": 5, "checkpoint": False}
    assert compare({"none": result("none", 8.0), "full": full})[1].speedup == 4.0


def test_a_failed_run_is_listed_with_its_reason_and_the_others_are_compared():
    failed = RunResult(scope="per_layer", status="failed", error="out of GPU memory")
    rows = compare({"none": result("none", 8.0), "per_layer": failed, "full": result("full_iteration", 2.0)})
    assert rows[1].error == "out of GPU memory" and rows[2].speedup == 4.0
    assert "per_layer: failed: out of GPU memory" in table(rows).splitlines()[-1]


def test_without_a_baseline_there_is_no_speed_up_and_it_says_so():
    results = {"per_layer": result("per_layer", 4.0), "full": result("full_iteration", 2.0)}
    rows = compare(results)
    assert rows[0].speedup is None and rows[0].losses_equal is None
    assert any("graph=none" in remark for remark in remarks(rows, results))
    del results["full"]
    assert not remarks(compare(results), results), "nobody asked for a speed-up"


def test_a_failed_baseline_is_no_baseline():
    failed = RunResult(scope="none", status="failed", error="x")
    rows = compare({"none": failed, "per_layer": result("per_layer", 4.0)})
    assert rows[1].baseline is None


def test_a_run_too_short_to_be_measured_is_remarked():
    results = {"none": result("none", 8.0, steps=5)}
    rows = compare(results)
    assert rows[0].step_ms_median is None
    assert any("too short" in remark for remark in remarks(rows, results))


def test_runs_whose_times_vary_a_lot_are_named_below_the_table(tmp_path):
    restless = result("per_layer", 4.0, steps=45)
    restless.step_ms[-4:] = [9.0] * 4
    results = {"none": result("none", 8.0), "per_layer": restless, "full": result("full_iteration", 2.0)}
    rows = compare(results)
    assert (rows[1].step_ms_median, rows[1].step_ms_p95) == (4.0, 9.0)
    assert [said for said in remarks(rows, results) if "varied" in said] == [
        "Step times varied a lot in per_layer: p95 is more than twice the median. Compare again on an idle machine."
    ]
    write_report(tmp_path, rows, results)
    assert "- Step times varied a lot in per_layer:" in (tmp_path / "comparison.md").read_text()


def test_emulated_graphs_are_noted_once_and_only_where_there_are_any():
    emulated, eager = result("full_iteration", 2.0), result("none", 8.0)
    emulated.device = eager.device = "CPU, 2 threads"
    emulated.graph["captures"] = 1
    several = {"none": eager, "full": emulated, "again": emulated}
    assert sum("emulated" in said for said in remarks(compare(several), several)) == 1
    on_gpu = {"none": result("none", 8.0), "full": result("full_iteration", 2.0)}
    for runs in ({"none": eager}, on_gpu):
        assert not any("emulated" in said for said in remarks(compare(runs), runs))


def test_the_busy_share_is_kernel_time_over_step_time():
    rows = compare({"none": result("none", 8.0), "full": result("full_iteration", 2.0)}, {"none": 1.9, "full": 1.9})
    assert [row.gpu_busy_share for row in rows] == [1.9 / 8, 1.9 / 2]
    assert "24%" in table(rows) and "95%" in table(rows)


def test_reports_count_one_and_several():
    assert [counted(n, "graph") for n in (0, 1, 2000)] == ["0 graphs", "1 graph", "2,000 graphs"]


def test_payback_counts_what_the_beginning_cost_beyond_eagers():
    slow_start = result("full_iteration", 2.0)
    slow_start.step_ms[:5] = [1000.0] * 4 + [1060.0]  # 60 ms more than eager's first steps; 6 ms won in each later one
    rows = compare({"none": result("none", 8.0), "full": slow_start, "slower": result("per_layer", 9.0)})
    assert [row.payback_steps for row in rows] == [None, 5 + 10, None]


def test_losses_are_compared_among_the_same_kernels_and_times_with_plain_eager():
    def compiled(scope, step_ms, losses):
        made = result(scope, step_ms, losses)
        made.config["graph"]["compile"] = "default"
        return made

    runs = {
        "none": result("none", 8.0, (3.0, 2.0)),
        "none_compiled": compiled("none", 6.0, (3.0, 2.5)),
        "full_compiled": compiled("full_iteration", 2.0, (3.0, 2.5)),
    }
    rows = compare(runs)
    assert rows[2].speedup == 4.0 and rows[2].losses_equal is True
    del runs["none_compiled"]
    rows = compare(runs)
    assert rows[1].speedup == 4.0 and rows[1].losses_equal is None


def test_the_report_is_written_in_every_form(tmp_path):
    failed = RunResult(scope="per_layer", status="failed", error="out of GPU memory")
    results = {"none": result("none", 8.0), "per_layer": failed, "full": result("full_iteration", 2.0)}
    rows = compare(results)
    files = write_report(tmp_path, rows, results)
    assert [path.name for path in files] == ["comparison.json", "comparison.md", "comparison.png"]
    written = json.loads(files[0].read_text())
    assert [run["speedup"] for run in written["runs"]] == [1.0, None, 4.0]
    page = files[1].read_text()
    assert page == markdown(rows, remarks(rows, results), "no device")
    assert "| full | 2.00 |" in page and "- per_layer: failed: out of GPU memory" in page
    assert files[2].read_bytes().startswith(b"\x89PNG") and files[2].stat().st_size > 10_000
    events = EventAccumulator(str(tmp_path / "comparison"))
    events.Reload()
    assert {"comparison/text_summary", "custom_scalars__config__"} <= set(events.Tags()["tensors"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(path.name for path in files)


def learning_rates(**more):
    """Two runs of one scope that differ in a setting that decides the losses."""
    runs = {}
    for rate, last in ((0.001, 1.5), (0.003, 1.25)):
        run = runs[f"rate={rate}"] = result("full_iteration", 2.0, losses=[3.0] * 18 + [last + 0.5, last])
        run.config["optim"] = {"learning_rate": rate}
        run.eval_losses, run.ema_loss = [[10, 2.5], [20, last + 0.25]], last + 0.125
        vars(run).update(more)
    return runs


def test_where_other_settings_differ_losses_are_compared():
    runs = learning_rates()
    assert swept(runs)
    head, first, second = table(compare(runs), swept(runs)).splitlines()
    titles = " ".join(head.split())
    assert titles == "run step ms p95 host ms tokens/s train loss eval loss averaged reserved GiB capture s"
    assert first.split()[5:8] == ["1.7500", "1.7500", "1.6250"], "the mean of the last tenth of the steps"
    assert second.split()[5:8] == ["1.5000", "1.5000", "1.3750"]
    page = markdown(compare(runs), [], "no device", swept(runs))
    assert "| rate=0.003 |" in page and "| 1.5000 | 1.5000 | 1.3750 |" in page and "*Train loss*" in page
    assert "Speed-up" not in page and "Losses as none" not in page


def test_where_only_graphs_differ_they_are_not_shown_and_stay_in_the_file(tmp_path):
    runs = {"none": result("none", 8.0), "full": result("full_iteration", 2.0)}
    assert not swept(runs) and "train loss" not in table(compare(runs), swept(runs))
    files = write_report(tmp_path, compare(runs), runs)
    assert [run["train_loss"] for run in json.loads(files[0].read_text())["runs"]] == [1.0, 1.0]


def test_a_failed_run_sweeps_nothing():
    failed = RunResult(scope="none", status="failed", error="x", config={"train": {"seed": 3}})
    assert not swept({"none": result("none", 8.0), "failed": failed})


def test_runs_that_computed_nan_alike_are_alike():
    runs = {name: result(name, 4.0, losses=(1.0, float("nan"))) for name in ("none", "per_layer")}
    assert compare(runs)[1].losses_equal is True


class TestPicture:
    @pytest.fixture(autouse=True)
    def strict(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    @pytest.fixture
    def drawn(self, tmp_path, monkeypatch):
        """`drawn(runs)`: the matplotlib figure that was saved."""
        from matplotlib.figure import Figure

        saved, original = [], Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), original(self, *a, **k)))

        def draw(runs, device="a device"):
            assert plot(tmp_path / "x.png", compare(runs), runs, device, swept(runs))
            return saved[-1]

        return draw

    def labels(self, axis):
        return [label.get_text() for label in axis.get_ticklabels()]

    @pytest.mark.parametrize(("first", "ticks"), [(1000.0, {"2", "10", "1,000"}), (12.0, {"4", "8", "12"})])
    def test_ticks_are_plain_numbers(self, drawn, first, ticks):
        run = result("per_layer", 2.0)
        run.step_ms[:5] = [first] * 5
        figure = drawn({"none": run})
        figure.canvas.draw()
        labels = self.labels(figure.axes[1].yaxis)
        assert ticks <= set(labels) and not any("10^" in label or "mathdefault" in label for label in labels), labels
        assert all(label.lstrip("\u2212").isdigit() for label in self.labels(figure.axes[1].xaxis))

    def test_emulation_is_said_in_the_picture(self, drawn):
        runs = learning_rates(device="CPU, 2 threads", graph={"captures": 1})
        assert EMULATED in drawn(runs).get_suptitle()
        assert drawn(learning_rates(device="a GPU", graph={"captures": 1}), "a GPU").get_suptitle() == "a GPU"

    def test_losses_are_drawn_where_they_are_compared(self, drawn):
        assert len(drawn({"none": result("none", 8.0), "full": result("full_iteration", 2.0)}).axes) == 2
        losses = drawn(learning_rates()).axes[2]
        assert [len(line.get_xdata()) for line in losses.get_lines()] == [20, 2, 20, 2]
        assert losses.get_ylabel() == "loss, nats per token"

    @pytest.mark.parametrize("steps", [1, 5, 10])
    def test_one_run_however_short_is_drawn_without_a_warning(self, drawn, steps):
        run = result("full_iteration", 2.0, steps=steps)
        run.step_ms = run.step_ms[:steps]
        drawn({"only": run})

    def test_no_run_neither(self, drawn):
        drawn({"failed": RunResult(scope="none", status="failed", error="x")})


def test_the_newest_comparison_has_a_link_that_stays(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for folder in (first, second, second):
        folder.mkdir(exist_ok=True)
        assert link_latest(folder) == tmp_path / "latest"
        assert (tmp_path / "latest").resolve() == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "latest"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    assert link_latest(first) == first, "a folder of that name is not replaced"


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    results = {"none": result("none", 8.0)}
    assert [path.name for path in write_report(tmp_path, compare(results), results)] == [
        "comparison.json",
        "comparison.md",
    ]
