"""The tables from the results of the benchmarks, and those of them that the README has."""

import json

import pytest

from benchmarks import tables
from tests.support.settings import ROOT

SMALL = {"shape": "small", "layers": 12, "width": 768, "batch": 1, "length": 256}
WIDE = {"shape": "wide", "layers": 24, "width": 2048, "batch": 1, "length": 1024}
ENVIRONMENT = {"gpu": "Some GPU", "torch": "2.13.0", "date": "2026-01-02"}
NUMBERS = {"free_ms": 7.5, "host_ms": 1.25, "busy_ms": 4.5, "reserved_gib": 3.0}


def measured(script, mode, shape, step_ms, **more):
    command = f"python benchmarks/{script}.py --shapes {shape['shape']}"
    ran = {"command": command, "environment": {**ENVIRONMENT, "megatron_core": "0.19.2"}}
    return {"mode": mode, **shape, "step_ms": step_ms, **NUMBERS, **ran, **more}


TRAINING = [
    measured("training", "eager", WIDE, 80.0),
    measured("training", "eager", SMALL, 20.0),
    measured("training", "per_layer", SMALL, 8.0),
    {"mode": "per_layer", "shape": "wide", "error": "RuntimeError: something"},
    {"mode": "tensordict", "shape": "small", "error": "ModuleNotFoundError: No module named 'tensordict'"},
]
MEGATRON = [
    measured("megatron", "megatron_eager", SMALL, 40.0),
    measured("megatron", "megatron_graphs", SMALL, 10.0, losses_equal_eager=False, largest_loss_difference=0.25),
    measured("megatron", "megatron_graphmod", SMALL, 8.0, losses_equal_eager=True, largest_loss_difference=0.0),
    {"command": "-", "mode": "megatron_graphmod", "shape": "wide", "error": "exit status 1: RuntimeError: something"},
    measured("megatron", "megatron_eager", WIDE, 80.0),
]
TOKEN = {"shape": "0.6b_b1", "hidden_size": 1024, "batch": 1, "context": 128, "max_seq_len": 1024}
TOKEN["command"] = "python benchmarks/decode.py"
TOKEN["environment"] = {**ENVIRONMENT, "transformers": "5.17.0"}
DECODE = [
    {"mode": "hf_static", "token_ms": 3.0, **TOKEN},
    {"mode": "compiled_max", "token_ms": 1.0, "host_ms": 0.1, "busy_ms": 0.97, **TOKEN},
    {"mode": "compiled", "shape": "0.6b_b1", "error": "exit status 1"},
]
HEADS = "|  | 12 layers, width 768, 1 x 256 tokens | 24 layers, width 2048, 1 x 1024 tokens |"


def test_training_shows_steps_speed_ups_and_where_they_were_measured():
    text = tables.training({"results": TRAINING})
    for line in (
        HEADS,
        "| eager | 20.00 | 80.00 |",
        "| graphmod, `per_layer` | 8.00 (2.50x) | failed |",
        "| tensordict `CudaGraphModule` | not installed | - |",
        "| host ms, graphmod, `per_layer` | 1.25 | - |",
    ):
        assert f"{line}\n" in text
    assert "Some GPU, torch 2.13.0." in text
    for shape in ("small", "wide"):
        assert f"2026-01-02 `python benchmarks/training.py --shapes {shape}`" in text


def test_times_of_two_hosts_have_no_speed_up():
    hosts = [{**one, "environment": {**ENVIRONMENT, "host": str(place)}} for place, one in enumerate(TRAINING[:3])]
    assert "| graphmod, `per_layer` | 8.00 | - |" in tables.training({"results": hosts})


def test_the_summary_has_a_row_for_each_shape():
    text = tables.summary({"results": TRAINING})
    assert "| 12 layers, width 768, 1 x 256 tokens | 20.00 | 8.00 (2.50x) | - | - | - |" in text
    assert "| 24 layers, width 2048, 1 x 1024 tokens | 80.00 | failed | - | - | - |" in text
    assert "Some GPU, torch 2.13.0; in brackets" in text


def test_megatron_shows_steps_ratios_and_losses():
    ours = [{"mode": mode, "shape": "small", "step_ms": step} for mode, step in (("eager", 30.0), ("per_layer", 10.0))]
    text = tables.megatron({"results": MEGATRON}, {"results": ours})
    for words in (
        HEADS,
        "| Megatron-core, eager | 40.00 | 80.00 |",
        "| Megatron-core, its graphs of layers | 10.00 (4.00x) | - |",
        "| Megatron-core, graphmod around its layers | 8.00 (5.00x) | failed |",
        "| speed-up of `graph=per_layer` on the H200, above | 3.00x | - |",
        "| losses, Megatron-core, its graphs of layers | up to 0.25 apart | - |",
        "| losses, Megatron-core, graphmod around its layers | bitwise eager's | - |",
        "Some GPU, torch 2.13.0, Megatron-core 0.19.2. 2026-01-02 `python benchmarks/megatron.py --shapes small`",
    ):
        assert words in text


def test_decode_shows_times_and_ratios():
    text = tables.decode({"results": DECODE})
    for words in (
        "Qwen3-0.6B, B1, 128 of 1024",
        "| 3.000 |",
        "1.000 (3.00x)",
        "| 0.970 |",
        "2026-01-02 `python benchmarks/decode.py`",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("make", "results"),
    [(tables.training, TRAINING[3:]), (tables.summary, TRAINING[3:]), (tables.decode, DECODE[2:])],
)
def test_results_without_a_time_are_an_error(make, results):
    with pytest.raises(tables.BadResults):
        make({"results": results})


def test_the_readme_shows_the_results():
    assert tables.main(["--check"]) == 0


@pytest.fixture
def readme(tmp_path):
    """A copy of the README with another number."""
    page = tmp_path / "README.md"
    page.write_text((ROOT / "README.md").read_text().replace("5.17 (", "5.18 ("))
    return page


def test_a_stale_readme_is_noticed_and_written_anew(readme):
    stale = readme.read_text()
    assert tables.main(["--readme", str(readme), "--check"]) == 1 and readme.read_text() == stale
    assert tables.main(["--readme", str(readme)]) == 0
    assert readme.read_text() == (ROOT / "README.md").read_text()
    assert tables.main(["--readme", str(readme), "--check"]) == 0
    (readme.parent / "docs" / "images" / "steps.svg").write_text("another picture")
    assert tables.main(["--readme", str(readme), "--check"]) == 1


def test_the_picture_has_bars_of_one_host_in_proportion():
    shown = [measured("training", mode, SMALL, 10.0 if mode == "eager" else 5.0) for mode in tables.BARS]
    svg = tables.picture({"results": [*shown, *TRAINING[:1]]})
    assert svg.count(">5.0 ms<") == svg.count('width="185"') == 3 and svg.count('width="370"') == 1
    assert "80.0 ms" not in svg  # eager alone was measured


@pytest.mark.parametrize("broken", ["no markers", "no results", "nothing measured"])
def test_what_cannot_be_shown_is_an_error_and_changes_nothing(broken, readme, tmp_path, monkeypatch, capsys):
    if broken == "no markers":
        readme.write_text("# A title\n")
    else:
        monkeypatch.setattr(tables, "RESULTS", tmp_path)
        if broken == "nothing measured":
            (tmp_path / "training.json").write_text(json.dumps({"results": TRAINING[3:]}))
    before = readme.read_text()
    assert tables.main(["--readme", str(readme)]) == 2
    assert readme.read_text() == before and str(readme) in capsys.readouterr().err


def test_one_table_can_be_asked_for(capsys):
    assert tables.main(["decode"]) == 0
    assert capsys.readouterr().out == tables.render("decode") + "\n"
