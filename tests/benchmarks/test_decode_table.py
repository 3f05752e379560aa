"""The generated table of decode times."""

import json

import pytest

from benchmarks import decode_table as table

SHAPE = {"shape": "0.6b_b1", "hidden_size": 1024, "batch": 1, "context": 128, "max_seq_len": 1024}
ENVIRONMENT = {"environment": {"gpu": "Some GPU", "torch": "2.13.0", "transformers": "5.17.0", "date": "2026-01-02"}}
RESULTS = [
    {"mode": "hf_static", "token_ms": 3.0, **SHAPE, **ENVIRONMENT},
    {"mode": "compiled_max", "token_ms": 1.0, "host_ms": 0.1, "busy_ms": 0.97, **SHAPE, **ENVIRONMENT},
    {"mode": "compiled", "shape": "0.6b_b1", "error": "exit status 1"},
]


@pytest.fixture
def files(tmp_path):
    """A page, and the arguments for it and results in a folder of their own."""
    page, results = tmp_path / "docs" / "benchmarks.md", tmp_path / "decode.json"
    page.parent.mkdir()
    page.write_text("# A title\n\n<!-- table: decode -->\nold\n<!-- end decode -->\n\nmore\n")
    results.write_text(json.dumps({"commands": ["python benchmarks/decode.py"], "results": RESULTS}))
    return page, ["--root", str(tmp_path), "--results", str(results)]


def test_the_page_shows_times_and_ratios_and_nothing_else_changes(files):
    page, arguments = files
    assert table.main([*arguments, "--check"]) == 1
    assert table.main(arguments) == 0
    text = page.read_text()
    assert text.startswith("# A title\n") and text.endswith("\nmore\n") and "old" not in text
    for words in ("Qwen3-0.6B, B1, 128 of 1024", "| 3.000 |", "1.000 (3.00x)", "| 0.970 |", "Some GPU, torch 2.13.0"):
        assert words in text
    assert table.main([*arguments, "--check"]) == 0


def test_results_without_a_time_are_an_error(files, tmp_path):
    _, arguments = files
    (tmp_path / "decode.json").write_text(json.dumps({"commands": [], "results": RESULTS[2:]}))
    assert table.main(arguments) == 2
