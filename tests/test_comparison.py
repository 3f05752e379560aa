"""The comparison sets each run beside the one without graphs, and survives runs that failed."""

import json

from graphmod.train.comparison import compare, remarks, table, write_comparison
from graphmod.train.result import RunResult


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


def test_comparison_json_holds_every_row(tmp_path):
    rows = compare({"none": result("none", 8.0), "full": result("full_iteration", 2.0)})
    written = json.loads(write_comparison(tmp_path, rows).read_text())
    assert [run["speedup"] for run in written["runs"]] == [1.0, 4.0]
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]
