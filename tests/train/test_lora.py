"""Adapters train on a frozen model, in graphs as eagerly, resume bitwise, and load for sampling."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphmod.cli import decode as generation_run
from graphmod.cli import generate as generate_cli
from graphmod.cli.app import parse
from graphmod.cli.decode import load_model, trained
from graphmod.cli.job import job_settings
from graphmod.cli.settings import DeviceName, ModelSource, model_folder
from graphmod.decode import DecodeEngine
from graphmod.errors import ConfigError
from graphmod.text import tokenizer_folder
from graphmod.train.folders import MERGED_FOLDER
from graphmod.train.run import train
from tests.support.made_tokenizers import byte_level
from tests.support.settings import TINY, composed


@pytest.fixture
def base(on_text, tmp_path):
    """The folder of a small model that was trained for a moment."""
    result = train(on_text("graph=none", "train.steps=60", "model.vocab_size=320"), tmp_path / "base")
    return tmp_path / "base" / result.checkpoint


@pytest.fixture
def adapted(base, settings, text):
    """`adapted("graph=none")`: a run that trains adapters of the model in `base`."""
    pytest.importorskip("peft")
    sizes = ("model.layers", "model.hidden_size", "model.heads", "model.intermediate_size")
    tiny = [setting for setting in TINY if not setting.startswith(sizes)]
    lora = ["model=local", f"model.path={base}", "model.lora.r=4", "model.lora.dropout=0.1", "train.steps=16"]
    lora += ["optim.learning_rate=0.02", "model.lora.target_modules=[all-linear]"]
    return lambda *more: settings(*tiny, "data=text", f"data.path={text}", *lora, *more)


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
def test_losses_are_eagers_and_only_adapters_are_saved(adapted, base, tmp_path, scope):
    plain = train(adapted("graph=none"), tmp_path / "none")
    graphed = train(adapted(f"graph={scope}", "train.checkpoint_every=5"), tmp_path / scope)
    assert graphed.losses == plain.losses and graphed.graph["failures"] == 0 and graphed.graph["replays"] > 0
    losses = plain.losses
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.1
    saved = tmp_path / scope / graphed.checkpoint
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_a_stopped_run_resumes_bitwise(adapted, tmp_path, stop_after, monkeypatch):
    whole = train(adapted(), tmp_path / "whole")
    with monkeypatch.context():
        stop_after(6)
        train(adapted(), tmp_path / "parts")
    monkeypatch.undo()
    resumed = train(adapted(f"train.resume={tmp_path / 'parts'}"), tmp_path / "other")
    assert resumed.resumed_at_step == 6 and resumed.losses == whole.losses


def test_adapters_and_the_merged_model_load_for_sampling(adapted, base, tmp_path):
    result = train(adapted("model.lora.merge=true", "train.ema_decay=0.9"), tmp_path / "run")
    saved = tmp_path / "run" / result.checkpoint
    model = load_model(
        model_folder(str(tmp_path / "run")), ModelSource(path=str(tmp_path / "run"), device=DeviceName.cpu)
    )
    merged = AutoModelForCausalLM.from_pretrained(saved / MERGED_FOLDER)
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.arange(40, 52)[None]
    logits = [one.eval()(input_ids=tokens).logits for one in (model, merged, plain)]
    torch.testing.assert_close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-3
    assert {*merged.state_dict()} == {*plain.state_dict()}
    assert (saved / "ema" / MERGED_FOLDER / "model.safetensors").is_file()
    (done,) = DecodeEngine(model, max_batch_size=1, max_seq_len=32).generate(
        [[40, 41]], max_new_tokens=6, temperature=0
    )
    assert done.error is None and len(done.tokens) == 6


def test_merged_models_are_parts_of_their_checkpoint(adapted, tmp_path):
    result = train(adapted("model.lora.merge=true", "train.ema_decay=0.9", "train.steps=2"), tmp_path / "run")
    saved = tmp_path / "run" / result.checkpoint
    for folder in (saved / MERGED_FOLDER, saved / "ema" / MERGED_FOLDER):
        assert model_folder(str(folder)) == folder and tokenizer_folder(folder, None) is None
        assert str(trained(folder)).startswith("trained for 2 of 2 steps")
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"more")
        with pytest.raises(ConfigError, match="is damaged"):
            model_folder(str(folder))


def test_generate_reads_adapters_with_their_tokenizer_and_stops_where_documents_end(
    adapted, text, tmp_path, monkeypatch, capfd
):
    byte_level().save_pretrained(tmp_path / "tokenizer")
    settings = [f"data.tokenizer={tmp_path / 'tokenizer'}", "model.lora.merge=true", "train.steps=2"]
    settings.append("train.ema_decay=0.5")
    result = train(adapted(*settings), tmp_path / "run")
    saved = tmp_path / "run" / result.checkpoint
    ends = []
    original = generation_run.DecodeEngine.__init__
    monkeypatch.setattr(
        generation_run.DecodeEngine,
        "__init__",
        lambda self, model, *more, **named: (
            ends.append(model.generation_config.eos_token_id) or original(self, model, *more, **named)
        ),
    )
    for folder in (saved, saved / MERGED_FOLDER, saved / "ema", saved / "ema" / MERGED_FOLDER):
        arguments = [f"model.path={folder}", "model.device=cpu", "graph=none"]
        said = [*arguments, "prompt=a text", "decode.max_new_tokens=3"]
        assert generate_cli.main(said) == 0, capfd.readouterr().err
    assert ends == [byte_level().eos_token_id] * 4
    assert capfd.readouterr().out.count("a text") == 4


def test_names_that_the_model_does_not_have_are_an_error_with_those_it_has(adapted, tmp_path):
    with pytest.raises(ConfigError, match=r"target_modules=\['nothing'\].*linear layers are down_proj.*q_proj"):
        train(adapted("model.lora.target_modules=[nothing]"), tmp_path / "run")


def test_adapters_need_a_saved_model_and_a_rank(tiny):
    with pytest.raises(ConfigError, match=r"model.lora.r=8 trains adapters of a saved model.*model=local"):
        tiny("model.lora.r=8")
    with pytest.raises(ConfigError, match=r"off without a rank; set model.lora.r=8"):
        tiny("model.lora.dropout=0.1")


def test_without_the_library_the_error_says_what_to_install(adapted, tmp_path, monkeypatch):
    result = train(adapted("train.steps=2"), tmp_path / "run")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model.lora.r=4 needs the peft library: pip install -e '.\[lora\]'"):
        adapted()
    saved = tmp_path / "run" / result.checkpoint
    with pytest.raises(ConfigError, match=r"holds LoRA adapters, needs the peft library"):
        load_model(saved, ModelSource(path=str(saved)))


def resumed(*overrides):
    return parse(job_settings(composed(*overrides), list(overrides))[0])


def test_what_is_saved_beside_adapters_may_change_and_what_they_are_may_not(adapted, tmp_path):
    whole = train(adapted("train.steps=8", "optim.schedule=constant"), tmp_path / "whole")
    first = train(adapted("train.steps=6", "optim.schedule=constant"), tmp_path / "run")
    run, saved = tmp_path / "run", tmp_path / "run" / first.checkpoint
    with pytest.raises(
        ConfigError, match=r"model.lora.r was 4 and is now 8\. Use those it had, or have a whole model sav"
    ):
        resumed(f"train.resume={run}", "model.lora.r=8")
    assert not (saved / MERGED_FOLDER).exists()
    overrides = [f"train.resume={run}", "model.lora.merge=true", "train.steps=8"]
    assert job_settings(composed(*overrides), overrides)[1] == ["model.lora.merge was false and is now true"]
    more = train(resumed(*overrides), tmp_path / "unused")
    assert more.losses == whole.losses and (run / more.checkpoint / MERGED_FOLDER / "config.json").is_file()


def test_the_way_that_the_refusal_of_a_change_names_leads_on(adapted, settings, tmp_path):
    first = train(adapted("train.steps=4"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds LoRA adapters and no whole model.*train.resume="):
        adapted(f"model.path={tmp_path / 'run' / first.checkpoint}")
    with pytest.raises(ConfigError) as refused:
        resumed(f"train.resume={tmp_path / 'run'}", "optim.learning_rate=0.5")
    one, anew = re.search(r"saved \((.*)\) and start anew from that: (.*)$", str(refused.value)).groups()
    train(resumed(*one.split()), tmp_path / "unused")
    path = anew.split()[-1]
    assert anew.startswith("train.resume=none model=local model.path=") and Path(path.partition("=")[2]).is_dir()
    result = train(adapted(path, "optim.learning_rate=0.5", "train.steps=2"), tmp_path / "anew")
    assert result.status == "finished"
    # Where the whole model is there, it is what is named.
    with pytest.raises(ConfigError, match=rf"start anew from its weights: train.resume=none model=local {path}$"):
        resumed(f"train.resume={tmp_path / 'run'}", "optim.learning_rate=0.5")
