"""A model by its name on the Hugging Face hub: what `hf download` left in the cache, for training and for decoding."""

import subprocess
import sys

import huggingface_hub
import pytest
import torch

from graphmod.cli.settings import model_folder
from graphmod.errors import ConfigError
from graphmod.train.folders import saved_folder
from graphmod.train.model import build_model, model_config
from graphmod.train.run import train
from graphmod.train.settings import LOCAL, ModelConfig, Precision, check_model
from tests.support.settings import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache, with a small model under the name someone/tiny."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    folder = cache / "models--someone--tiny"
    sizes = ModelConfig("llama", layers=1, hidden_size=16, heads=2, intermediate_size=16, max_positions=64)
    model = build_model(sizes, model_config(sizes, 256, 16), Precision.fp32, torch.device("cpu"), 0)
    model.save_pretrained(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    return folder / "snapshots" / COMMIT


def test_a_name_means_what_is_in_the_cache(cache):
    assert saved_folder("someone/tiny") == cache
    assert model_folder("someone/tiny") == cache
    model = ModelConfig(LOCAL, path="someone/tiny")
    check_model(model)
    assert model.path == str(cache)


def test_a_folder_comes_before_the_cache(cache, tmp_path):
    mine = tmp_path / "someone" / "tiny"
    mine.mkdir(parents=True)
    assert saved_folder("someone/tiny").resolve() == mine
    (mine / "config.json").write_text("{}")
    model = ModelConfig(LOCAL, path="someone/tiny")
    check_model(model)
    assert model.path == "someone/tiny"


def test_a_run_starts_from_it(cache, on_text, tmp_path):
    tokens = [f"model.{name}=null" for name in ("layers", "hidden_size", "heads", "intermediate_size")]
    result = train(on_text("model=local", "model.path=someone/tiny", *tokens, "train.steps=2"), tmp_path / "run")
    assert len(result.losses) == 2 and result.config["model"]["path"] == str(cache)


@pytest.mark.parametrize("name", ["someone/other", "gpt2"])
def test_a_name_that_is_not_there_says_what_brings_it(cache, name):
    for look in (saved_folder, model_folder):
        with pytest.raises(ConfigError) as caught:
            look(name)
        said = str(caught.value)
        assert "is not a folder" in said and "nothing is downloaded" in said and f"`hf download {name}`" in said


@pytest.mark.parametrize("path", ["./someone/tiny", "/no/such/folder", "a/b/c", "file.txt"])
def test_what_is_no_name_is_not_looked_for(cache, tmp_path, path):
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(ConfigError) as caught:
        saved_folder(path)
    assert "hf download" not in str(caught.value)


def test_finding_it_loads_no_torch(cache):
    code = (
        "import sys; from graphmod.cli.settings import model_folder; print(model_folder('someone/tiny'));"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [
        sys.executable,
        "-c",
        f"import huggingface_hub.constants as c; c.HF_HUB_CACHE = {str(cache.parents[2])!r}; {code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip() == str(cache), done.stderr


def test_checking_settings_of_own_parts_loads_no_torch_and_no_hydra():
    code = (
        "import sys; from graphmod.train.settings import RunConfig, check; config = RunConfig(); "
        "config.model.architecture, config.model.target = 'custom', {'_target_': 'a.Net'}; "
        "config.train.loss = {'_target_': 'a.loss'}; check(config); "
        "assert not {'torch', 'hydra', 'transformers', 'a'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
