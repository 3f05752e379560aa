"""The pages: links lead somewhere, commands compose, code runs."""

import itertools
import re
import shlex

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import tables
from graphmod.cli.app import TRAIN
from graphmod.cli.generate import GENERATE
from graphmod.cli.main import COMMANDS
from graphmod.cli.serve import SERVE
from graphmod.wrap.target import MARK
from tests.support.settings import ROOT, filled, typed

README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def name_of(path):
    return path.name


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def commands(path):
    """The commands of a page that graphmod answers itself, as lists of words."""
    lines = re.findall(
        r"^    ((?:python (?:train|generate|serve)\.py|graphmod \w+)\b.*)$", path.read_text(), flags=re.M
    )
    return [shlex.split(line, comments=True) for line in lines]


def test_the_readme_is_short_and_its_first_screen_says_how_to_start():
    text = README.read_text()
    assert len(text.split()) <= 900
    first_screen = "\n".join(text.splitlines()[:32])
    assert len(re.findall(r"^- \*\*", first_screen, flags=re.M)) == 3
    assert "pip install" in first_screen and "```python" in first_screen
    tables = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.M)
    assert [one.count("\n") for one in tables] == [2 + 4, 2 + 3], "one GPU: four rows; several: three"


def test_the_readme_counts_models_as_their_page_does():
    counts = tables.model_counts(tables.read("models"))
    total, right, refused = map(int, re.search(r"(\d+) models;.*?decode: (\d+) right, (\d+) refused", counts).groups())
    others = total - right - refused
    said = f"Of {total} causal LMs of transformers, {right} decode correctly, {refused} are refused with a reason"
    assert said + (f", and {others} raise an error" if others else "") in " ".join(README.read_text().split())


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_pages_and_headings_that_there_are(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, heading = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{path.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
            assert heading in map(slug, headings), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=name_of)
def test_settings_of_commands_exist(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "small.yaml").write_text("".join(experiment(path)))
    for program, command, *arguments in commands(path):
        name = command.removesuffix(".py")
        assert (program, name) in {
            *(("python", one) for one in ("train", "generate", "serve")),
            *(("graphmod", one) for one in ("train", "generate", "serve", "compare", "check")),
        }
        if {"--help", "--cfg", "--info", "--config-dir"} & set(arguments):
            asked = ["--cfg", "job"] * ("--config-dir" in arguments)
            assert COMMANDS[name]([*arguments, *asked]) == 0, capsys.readouterr().err
        elif name == "generate":
            typed(GENERATE, *arguments)
        elif name == "serve":
            typed(SERVE, *arguments)
        elif name in ("train", "compare"):
            given = TRAIN.readable([one for one in arguments if one not in ("-m", "--multirun")])
            overrides = [one for one in OverridesParser.create().parse_overrides(given) if not one.is_hydra_override()]
            values = [several_of(one) for one in overrides]
            for number in range(max(map(len, values), default=0) or 1):
                job = [
                    f"{one.get_key_element()}={several[number % len(several)]}" if several else one.input_line
                    for one, several in zip(overrides, values, strict=True)
                    if not one.is_sweep_override() or several
                ]
                TRAIN.typed(filled(*job))


@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=name_of)
def test_a_shell_passes_the_arguments_of_commands_on_as_they_are(path):
    for line in re.findall(r"^    ((?:curl|graphmod|make|pip|python) .*)$", path.read_text(), flags=re.M):
        bare = re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*", "", line)
        assert not re.search(r"[][(){}<>*?;&|!$`]", bare), f"{path.name}: {line}"


def several_of(override):
    """The values that an override lists."""
    listed = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
    return [*map(str, override.sweep_string_iterator())] if listed else []


def experiment(path):
    """The lines of the experiment that a page shows."""
    _, header, shown = path.read_text().partition("    # @package _global_\n")
    shown = header + shown
    return [line[4:] + "\n" for line in itertools.takewhile(lambda line: line.startswith("    "), shown.splitlines())]


@pytest.fixture
def names():
    """What the code of the README assumes to be there: a model, its optimizer, tokens and prompts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=1024, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "batches": [torch.randint(64, (2, 16))] * 6,
        "tokens": torch.randint(64, (2, 16)),
        "prompts": [[1, 2, 3], [4, 5]],
    }


def readme_code():
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.M | re.S)


def test_the_step_of_the_readme_is_captured(names, capsys):
    exec(readme_code()[0], names)
    shown = capsys.readouterr().out
    assert "state='captured'" in shown and "eager_calls=3" in shown and "replays=3" in shown
    losses = [names["train_step"](names["tokens"]).item() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert names["train_step"].stats.replays >= 3 and names["train_step"].stats.failures == 0


def test_the_layers_of_the_readme_are_captured(names):
    exec(readme_code()[1], names)
    for _ in range(6):
        names["model"](input_ids=names["tokens"], labels=names["tokens"]).loss.backward()
    body = names["model"].model
    stats = [module.__dict__[MARK].graphed.stats for module in (body, *body.layers)]
    assert [(one.state, one.failures) for one in stats] == [("captured", 0), ("nested", 0), ("nested", 0)]


def test_the_engine_of_the_readme_decodes(names, capsys):
    code = readme_code()[2]
    assert "max_new_tokens=256" in code and "n=8" in code
    exec(code.replace("max_new_tokens=256", "max_new_tokens=4").replace("n=8", "n=2"), names)
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert names["engine"].stats.total("launches") > 0
