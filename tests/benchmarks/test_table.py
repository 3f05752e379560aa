"""The generated tables of training steps."""

import json

import pytest

from benchmarks import table

PAGE = "# A title\n\n<!-- table: training -->\nplaceholder\n<!-- end training -->\n\nmore\n"
README = "# graphmod\n\n<!-- table: summary -->\nplaceholder\n<!-- end summary -->\n\nmore\n"
SMALL = {"shape": "small", "layers": 12, "width": 768, "batch": 1, "length": 256}
WIDE = {"shape": "wide", "layers": 24, "width": 2048, "batch": 1, "length": 1024}


def measured(mode, shape, step_ms):
    environment = {"gpu": "Some GPU", "torch": "2.13.0", "date": "2026-01-02"}
    numbers = {"step_ms": step_ms, "host_ms": 1.25, "busy_ms": 4.5, "reserved_gib": 3.0}
    command = f"python benchmarks/training.py --shapes {shape['shape']}"
    return {"command": command, "mode": mode, **shape, **numbers, "environment": environment}


RESULTS = [
    measured("eager", WIDE, 80.0),
    measured("eager", SMALL, 20.0),
    measured("per_layer", SMALL, 8.0),
    {"mode": "per_layer", "shape": "wide", "error": "RuntimeError: something"},
    {"mode": "tensordict", "shape": "small", "error": "ModuleNotFoundError: No module named 'tensordict'"},
]


@pytest.fixture
def files(tmp_path):
    """The page, results in a folder of their own, and the arguments for both; a README lies beside them."""
    page, results = tmp_path / "docs" / "benchmarks.md", tmp_path / "training.json"
    page.parent.mkdir()
    page.write_text(PAGE)
    (tmp_path / "README.md").write_text(README)
    results.write_text(json.dumps({"results": RESULTS}))
    return page, results, ["--root", str(tmp_path), "--results", str(results)]


def test_the_readme_has_a_row_for_each_shape(files):
    page, _, arguments = files
    assert table.main(arguments) == 0
    text = (page.parent.parent / "README.md").read_text()
    assert "| 12 layers, width 768, 1 x 256 tokens | 20.00 | 8.00 (2.50x) | - | - | - |" in text
    assert "| 24 layers, width 2048, 1 x 1024 tokens | 80.00 | failed | - | - | - |" in text
    assert "Some GPU, torch 2.13.0; in brackets" in text and "placeholder" not in text and text.endswith("\n\nmore\n")


def test_a_stale_readme_is_noticed_too(files):
    page, _, arguments = files
    table.main(arguments)
    readme = page.parent.parent / "README.md"
    readme.write_text(readme.read_text().replace("8.00", "7.00"))
    assert table.main([*arguments, "--check"]) == 1


def test_the_table_shows_steps_speed_ups_and_where_they_were_measured(files):
    page, _, arguments = files
    assert table.main(arguments) == 0
    text = page.read_text()
    assert "|  | 12 layers, width 768, 1 x 256 tokens | 24 layers, width 2048, 1 x 1024 tokens |" in text
    assert "| eager | 20.00 | 80.00 |" in text
    assert "| graphmod, `per_layer` | 8.00 (2.50x) | failed |" in text
    assert "| tensordict `CudaGraphModule` | not installed | - |" in text
    assert "| host ms, graphmod, `per_layer` | 1.25 | - |" in text
    assert "Some GPU, torch 2.13.0." in text
    for shape in ("small", "wide"):
        assert f"2026-01-02 `python benchmarks/training.py --shapes {shape}`" in text


def test_everything_outside_the_markers_stays(files):
    page, _, arguments = files
    table.main(arguments)
    text = page.read_text()
    assert text.startswith("# A title\n\n<!-- table: training -->\n")
    assert text.endswith("<!-- end training -->\n\nmore\n")
    assert "placeholder" not in text


def test_checking_tells_a_stale_page_from_a_fresh_one_and_writes_nothing(files):
    page, results, arguments = files
    assert table.main([*arguments, "--check"]) == 1
    assert page.read_text() == PAGE
    table.main(arguments)
    assert table.main([*arguments, "--check"]) == 0
    results.write_text(results.read_text().replace("20.0", "21.0"))
    assert table.main([*arguments, "--check"]) == 1


@pytest.mark.parametrize("broken", ["no markers", "no results", "nothing measured"])
def test_what_cannot_be_shown_is_an_error_and_changes_nothing(files, broken, capsys):
    page, results, arguments = files
    if broken == "no markers":
        page.write_text("# A title\n")
    elif broken == "no results":
        results.unlink()
    else:
        results.write_text(json.dumps({"results": RESULTS[3:]}))
    before = page.read_text()
    assert table.main(arguments) == 2
    assert page.read_text() == before
    assert str(results) in capsys.readouterr().err
