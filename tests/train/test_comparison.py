"""The comparison sets each run beside the one without graphs, and survives runs that failed."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graphmod.train.report.comparison import compare
from graphmod.train.report.report import markdown, remarks, table, write_report
from graphmod.train.report.result import RunResult
from graphmod.words import counted


def result(scope: str, step_ms: float, losses=(3.0, 2.0, 1.0), steps: int = 10, seed: int = 0) -> RunResult:
    return RunResult(
        scope=scope,
        config={"graph": {"scope": scope}, "train": {"seed": seed, "deterministic": False}},
        tokens_per_step=100,
        losses=[float(loss).hex() for loss in losses],
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
    assert none.speedup == 1.0


def test_one_different_bit_is_a_difference_and_its_step_is_named():
    other = result("per_layer", 4.0, losses=(3.0, 2.0000000000000004, 1.0))
    rows = compare({"none": result("none", 8.0), "per_layer": other})
    assert rows[1].losses_equal is False and rows[1].first_difference == 1
    assert "no, from step 1" in table(rows)
    assert any(
        "train.deterministic" in remark for remark in remarks(rows, {"none": result("none", 8.0), "per_layer": other})
    )


def test_runs_of_different_lengths_are_not_equal():
    rows = compare({"none": result("none", 8.0), "per_layer": result("per_layer", 4.0, losses=(3.0, 2.0))})
    assert rows[1].losses_equal is False and rows[1].first_difference == 2


def test_each_run_is_compared_with_the_baseline_of_its_own_settings():
    rows = compare(
        {
            "none_1": result("none", 8.0, seed=1),
            "none_2": result("none", 6.0, seed=2),
            "layer_2": result("per_layer", 3.0, seed=2),
        }
    )
    assert rows[2].baseline == "none_2" and rows[2].speedup == 2.0


def test_a_failed_run_is_listed_with_its_reason_and_the_others_are_compared():
    failed = RunResult(scope="per_layer", status="failed", error="out of GPU memory")
    rows = compare({"none": result("none", 8.0), "per_layer": failed, "full": result("full_iteration", 2.0)})
    assert rows[1].error == "out of GPU memory" and rows[2].speedup == 4.0
    assert "per_layer: failed: out of GPU memory" in table(rows).splitlines()[-1]


def test_without_a_baseline_there_is_no_speed_up_and_it_says_so():
    results = {"per_layer": result("per_layer", 4.0)}
    rows = compare(results)
    assert rows[0].speedup is None and rows[0].losses_equal is None
    assert any("graph=none" in remark for remark in remarks(rows, results))


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


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    results = {"none": result("none", 8.0)}
    assert [path.name for path in write_report(tmp_path, compare(results), results)] == [
        "comparison.json",
        "comparison.md",
    ]
