"""Models, data sets and losses of one's own train as the built-in ones do, or are refused in words."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from graphmod.cli.settings import model_folder
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.batches import ShuffledEpochs
from graphmod.train.optim import learning_rates
from graphmod.train.run import check_training, train
from graphmod.train.settings import DataConfig, ModelConfig, Source, check
from tests.support import my_parts
from tests.support.settings import ROOT

SCOPES = ("none", "per_layer", "full_iteration")
CPU = torch.device("cpu")


def named(name, **arguments):
    return {"_target_": name if "." in name else f"tests.support.my_parts.{name}", **arguments}


@pytest.fixture
def own(tiny):
    """`own("graph=none", model=named("Net"))`: checked settings of a tiny run with parts of one's own."""

    def made(*overrides, model=None, data=None, loss=None, sizes=None, **data_settings):
        if data is None:
            overrides = ("data=synthetic", "data.vocab_size=60", *overrides)
        config = tiny(*overrides)
        if model is not None:
            config.model = ModelConfig("custom", target=model, **(sizes or {}))
        if data is not None:
            settings = {"seq_len": 16, "batch_size": 2, "eval_fraction": 0.2} | data_settings
            config.data = DataConfig(Source.custom, target=data, **settings)
        config.train.loss = loss or {}
        check(config)
        return config

    return made


def complaint(config, tmp_path):
    with pytest.raises(ConfigError) as caught:
        train(config, tmp_path)
    return str(caught.value)


COMBINATIONS = {
    "model": {"model": named("Net")},
    "model and accumulated": {"model": named("Net"), "accumulation": 3},
    "model with output, data": {"model": named("NetWithOutput"), "data": named("Tokens")},
    "all": {"model": named("Net", width=8), "data": named("Labelled"), "accumulation": 2},
    "function": {"model": named("Net"), "loss": named("smoothed", smoothing=0.1)},
    "object": {"model": named("Net"), "loss": named("Weighted", factor=2.0), "accumulation": 2},
    "criterion": {"model": named("Net"), "loss": named("torch.nn.CrossEntropyLoss", label_smoothing=0.1)},
    "another task": {"model": named("Classifier"), "data": named("Pairs"), "loss": named("classified"), "seq_len": 256},
    "built-in model": {"data": named("Labelled"), "loss": named("torch.nn.CrossEntropyLoss", label_smoothing=0.1)},
    "model of transformers": {"model": named("llama")},
}
FOUND_IN_OTHERS = ("model", "model and accumulated", "function", "criterion")


ON = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in FOUND_IN_OTHERS else []) for one in COMBINATIONS]
)
def test_own_parts_train_in_every_scope_to_eagers_bits(own, tmp_path, name, kind):
    parts = dict(COMBINATIONS[name])
    settings = [f"train.device={kind}", "train.deterministic=true"]
    settings += [f"train.grad_accumulation={parts.pop('accumulation', 1)}", "train.eval_every=4", "train.ema_decay=0.9"]
    found = {}
    for scope in SCOPES:
        config = own(f"graph={scope}", "train.eval_batches=2", "train.checkpoint=false", *settings, **parts)
        found[scope] = train(config, tmp_path / scope)
        assert found[scope].losses == found["none"].losses
        assert found[scope].eval_losses == found["none"].eval_losses and found[scope].eval_losses
        assert found[scope].ema_loss == found["none"].ema_loss
        if scope != "none":
            assert found[scope].graph["replays"] > 0 and not found[scope].graph["failures"]
    assert len({*found["none"].losses}) == 8


def test_per_layer_has_the_loss_of_a_criterion_in_a_graph(own, tmp_path):
    parts = {"model": named("Net"), "loss": named("torch.nn.CrossEntropyLoss")}
    captured = []
    for loss in (None, named("smoothed"), named("torch.nn.CrossEntropyLoss")):
        config = own("graph=per_layer", "train.checkpoint=false", **parts | {"loss": loss})
        captured.append(train(config, tmp_path / str(len(captured))).graph["captures"])
    assert captured[0] == captured[2] > captured[1]


def test_a_graph_is_chosen_for_own_parts(own, tmp_path):
    config = own("graph=auto", "train.steps=90", "train.checkpoint=false", model=named("Net"), data=named("Tokens"))
    result = train(config, tmp_path)
    assert [trial["scope"] for trial in result.auto["trials"]] == [*SCOPES]
    plain = own("graph=none", "train.steps=90", "train.checkpoint=false", model=named("Net"), data=named("Tokens"))
    assert result.losses == train(plain, tmp_path / "plain").losses


def test_a_model_without_layers_is_captured_as_a_whole_or_by_the_modules_that_are_named(own, tmp_path):
    chosen = {"auto": ["graph=auto", "train.steps=90"], "named": ["graph=per_layer", "graph.layers=[head]"]}
    runs = {name: train(own(*some, model=named("Unsplit")), tmp_path / name) for name, some in chosen.items()}
    assert [trial["scope"] for trial in runs["auto"].auto["trials"]] == ["none", "full_iteration"]
    assert runs["named"].graph["replays"] > 0
    assert runs["named"].losses == train(own("graph=none", model=named("Unsplit")), tmp_path / "none").losses


@ON
@pytest.mark.parametrize("setting", ["precision=bf16", "precision=fp16_mixed", "activation_checkpointing=true"])
def test_precision_and_recomputed_layers_keep_eagers_bits(own, tmp_path, setting, kind):
    on = [f"train.device={kind}", "train.deterministic=true", "train.checkpoint=false"]
    runs = [
        train(own(f"graph={scope}", f"train.{setting}", *on, model=named("Net")), tmp_path / scope) for scope in SCOPES
    ]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    if setting == "activation_checkpointing=true":  # dropout draws the same numbers again
        assert runs[0].losses == train(own("graph=none", *on, model=named("Net")), tmp_path / "kept").losses


def by_hand(config, model, items, loss):
    """The same training with nothing but PyTorch."""
    count, rows = len(items) - int(len(items) * config.data.eval_fraction), config.data.batch_size
    order = ShuffledEpochs(count, config.train.seed)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.0), betas=config.optim.betas, fused=True)
    torch.manual_seed(config.train.seed)  # of dropout
    seen = []
    for step, rate in enumerate(learning_rates(config.optim, config.train.steps)):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate)
        value = loss(model, [items[index] for index in order(step * rows, rows).tolist()])
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(value.item())
    return seen


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().train()


def test_the_losses_are_those_of_a_loop_written_by_hand(own, tmp_path):
    config = own("graph=full_iteration", model=named("Net", width=8), data=named("Tokens"))

    def next_token(model, items):
        rows = torch.stack(items)
        logits = model(rows[:, :-1])
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))

    model = seeded(lambda: my_parts.Net(64, width=8))  # 50 tokens, rounded up
    assert train(config, tmp_path).losses == by_hand(config, model, my_parts.Tokens(16), next_token)
    assert json.loads((tmp_path / "result.json").read_text())["tokens_per_step"] == 2 * 16


def test_labels_are_those_of_transformers(own, tmp_path):
    config = own("graph=per_layer", model=named("Net", p=0.0), data=named("Labelled"))

    def labelled(model, items):
        chances = model(torch.stack([item["input_ids"] for item in items])).log_softmax(-1)
        wanted = [
            -chances[row, place - 1, token]
            for row, item in enumerate(items)
            for place, token in enumerate(item["labels"].tolist())
            if place and token != -100
        ]
        return torch.stack(wanted).mean()

    expected = by_hand(config, seeded(lambda: my_parts.Net(64, p=0.0)), my_parts.Labelled(16), labelled)
    torch.testing.assert_close(train(config, tmp_path).losses, expected, atol=1e-4, rtol=1e-4)


def test_microbatches_weigh_as_many_targets_as_the_loss_counts(own, tmp_path):
    parts = {"model": named("Net", p=0.0), "data": named("Tokens"), "loss": named("trained_on_few", smoothing=0.1)}
    whole = train(own(**parts, batch_size=4), tmp_path / "whole")
    cut = train(own("train.grad_accumulation=4", **parts, batch_size=1), tmp_path / "cut")
    torch.testing.assert_close(cut.losses, whole.losses, atol=1e-4, rtol=1e-4)


def test_parts_within_parts_are_made(own, tmp_path):
    size = {"_target_": "builtins.max", "_args_": [3, 8]}
    result = train(own(model=named("Net", width=size)), tmp_path)
    model = my_parts.Net(64, width=8)
    load_model(model, tmp_path / result.checkpoint / "model.safetensors")


def test_a_loss_of_ones_own_is_what_it_says(own, tmp_path):
    config = own(model=named("Net", p=0.0), data=named("Tokens"), loss=named("Weighted", factor=2.0))

    def weighted(model, items):
        rows = torch.stack(items)
        chances = model(rows[:, :-1]).log_softmax(-1)
        losses = -chances.gather(-1, rows[:, 1:, None]).squeeze(-1)
        return 2 * losses[rows[:, 1:] < 25].mean()

    expected = by_hand(config, seeded(lambda: my_parts.Net(64, p=0.0)), my_parts.Tokens(16), weighted)
    torch.testing.assert_close(train(config, tmp_path).losses, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("parts", "scope"),
    [
        *(("all", scope) for scope in SCOPES),
        *(("another task", "full_iteration"), ("model of transformers", "per_layer")),
        *(pytest.param("another task", scope, marks=pytest.mark.slow) for scope in ("none", "per_layer")),
        *(pytest.param("model of transformers", scope, marks=pytest.mark.slow) for scope in ("none", "full_iteration")),
    ],
)
def test_a_stopped_run_goes_on_with_the_same_bits(own, tmp_path, monkeypatch, stop_after, scope, parts):
    chosen = dict(COMBINATIONS[parts])
    settings = [f"graph={scope}", f"train.grad_accumulation={chosen.pop('accumulation', 1)}", "train.ema_decay=0.9"]
    settings += ["train.eval_every=4", "train.eval_batches=1"]
    whole = train(own(*settings, **chosen), tmp_path / "whole")
    stop_after(3)
    stopped = train(own(*settings, **chosen), tmp_path / "run")
    assert stopped.status == "interrupted" and len(stopped.losses) == 3
    monkeypatch.undo()
    resumed = train(own(*settings, "train.resume=auto", **chosen), tmp_path / "run")
    assert resumed.losses == whole.losses and resumed.eval_losses == whole.eval_losses and resumed.resumed_at_step == 3
    files = [tmp_path / name / whole.checkpoint / part for part in (".", "ema") for name in ("whole", "run")]
    one, other, average, other_average = (load_file(file / "model.safetensors") for file in files)
    assert one and all(torch.equal(value, other[name]) for name, value in one.items())
    assert all(torch.equal(value, other_average[name]) for name, value in average.items())
    assert not all(torch.equal(value, average[name]) for name, value in one.items())


def test_a_checkpoint_loads_as_safetensors_does_it_with_tied_weights(own, tmp_path):
    result = train(own(model=named("Net", width=8)), tmp_path)
    model = my_parts.Net(64, width=8)
    load_model(model, tmp_path / result.checkpoint / "model.safetensors")
    assert model.head.weight is model.embed.weight and model.calls == 8


def test_a_model_of_transformers_that_a_function_made_is_one(own, tmp_path):
    result = train(
        own(
            "data.vocab_size=250",
            "train.sample_every=8",
            "train.sample_tokens=3",
            model=named("llama"),
            sizes={"layers": 1},
        ),
        tmp_path,
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / result.checkpoint)
    assert len(model.model.layers) == 1 and model.config.vocab_size == 256


def test_epochs_see_each_item_that_is_not_held_out_once(own, tmp_path, monkeypatch):
    read = []
    original = my_parts.Tokens.__getitem__
    config = own("graph=none", "train.epochs=2", model=named("Net"), data=named("Tokens", size=20))
    monkeypatch.setattr(
        my_parts.Tokens, "__getitem__", lambda self, index: (read.append(index), original(self, index))[1]
    )
    result = train(config, tmp_path)
    assert len(result.losses) == 16
    assert sorted(read[-16:]) == [*range(16)] and sorted(read[-32:-16]) == [*range(16)]


def test_data_that_is_drawn_is_that_of_the_seed(own, tmp_path):
    runs = [
        train(
            own(f"train.seed={seed}", "train.steps=2", model=named("Net"), data=named("Drawn")), tmp_path / str(number)
        )
        for number, seed in enumerate((1, 1, 2))
    ]
    assert runs[0].losses == runs[1].losses != runs[2].losses


def test_rows_of_the_datasets_library_are_items(own, text, tmp_path):
    pytest.importorskip("datasets")
    config = own("train.steps=20", data=named("rows_of"), path=str(text), seq_len=16)
    result = train(config, tmp_path)
    assert result.losses[-1] < result.losses[0] and result.tokens_per_step == 2 * 17


def test_settings_that_it_takes_are_handed_on(own, tmp_path):
    result = train(own(data=named("Tokens"), model=named("Net"), sizes={"layers": 1}, seq_len=8), tmp_path)
    assert result.tokens_per_step == 2 * 8 and result.config["data"]["target"] == named("Tokens")
    assert sum("layers" in name for name in my_parts.Net(64, layers=1).state_dict()) == 6
    model = my_parts.Net(64, layers=1)
    load_model(model, tmp_path / result.checkpoint / "model.safetensors")


def test_a_run_says_what_it_is_made_of(own, tmp_path):
    train(own(model=named("Net", width=8), data=named("Labelled")), tmp_path)
    said = (tmp_path / "train.log").read_text()
    assert "Net, " in said
    items = "each input_ids: (17,) int64, labels: (17,) int64"
    assert f"40 items of data._target_=tests.support.my_parts.Labelled, {items}" in said
    assert "each of 2 x 17 tokens" in said


def test_the_check_of_a_step_knows_own_parts(own, tmp_path):
    for scope in SCOPES[1:]:
        parts = {"model": named("Net"), "data": named("Labelled"), "loss": named("torch.nn.CrossEntropyLoss")}
        assert check_training(own(f"graph={scope}", **parts), tmp_path).captured
    report = check_training(own(model=named("Net"), loss=named("reads")), tmp_path)
    assert not report.captured


def test_what_is_tried_before_the_first_step_leaves_no_trace(own, tmp_path, monkeypatch):
    config = own("graph=none", "train.steps=2", model=named("Net"), data=named("Tokens"))
    tried = train(config, tmp_path / "tried")
    monkeypatch.setattr("graphmod.train.fitting._try_logits", lambda *args: None)
    monkeypatch.setattr("graphmod.train.fitting._try_loss", lambda *args, **kwargs: None)
    assert train(config, tmp_path / "untried").losses == tried.losses


@pytest.mark.parametrize("setting", ["model", "data", "loss"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        (named("no_such_package.Net"), "there is nothing of that name; its module must lie in the present folder"),
        (named("tests.support.my_parts.nothing.Net"), "there is nothing of that name"),
        (named("Netz"), "there is nothing of that name"),
        (named("constant"), "is a int, which cannot be called"),
        (named("broken_module.Net"), "cannot be imported: ZeroDivisionError: division by zero ("),
        (named("missing_library.Net"), "cannot be imported: ModuleNotFoundError: No module named 'nope'"),
        (named("wrong_syntax.Net"), "cannot be imported: SyntaxError: "),
    ],
)
def test_a_name_that_means_nothing_is_told(own, tmp_path, monkeypatch, setting, target, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "missing_library.py").write_text("import nope\n")
    (tmp_path / "wrong_syntax.py").write_text("def (:\n")
    message = complaint(own(**{setting: target}), tmp_path)
    assert said in message and message.startswith(f"{'train.loss' if setting == 'loss' else setting}._target_=")


def test_the_line_that_failed_is_told_wherever_it_lies(own, tmp_path, monkeypatch):
    (folder := tmp_path / "lib" / "python").mkdir(parents=True)
    (folder / "lies_deep.py").write_text("def make(**sizes):\n    raise KeyError('width')\n")
    monkeypatch.syspath_prepend(folder)
    assert f"({folder}/lies_deep.py:2)" in complaint(own(model={"_target_": "lies_deep.make"}), tmp_path / "run")


def test_a_module_in_the_present_folder_is_found(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lies_here.py").write_text("from tests.support.my_parts import Net as Mine\n")
    assert train(own("train.steps=1", model=named("lies_here.Mine")), tmp_path / "run").losses


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"model": named("Net", depth=3)},
            "cannot be made with vocab_size=64, depth=3: TypeError: Net.__init__() got an unexpected keyword",
        ),
        ({"model": named("Classifier", vocab_size=3)}, "unexpected keyword argument 'vocab_size'"),
        ({"model": named("Net", width=named("nope.Width"))}, "Error loading 'nope.Width'"),
        ({"model": named("Net", width="${nothing}")}, "Interpolation key 'nothing' not found"),
        ({"model": named("Unmakeable")}, "cannot be made with no arguments: OSError: weights.bin is not there ("),
        ({"model": named("number")}, "made a int; a model must be a torch.nn.Module"),
        ({"model": named("Frozen")}, "without parameters to train"),
        (
            {"model": named("Net", vocab_size=20)},
            "the data has a vocabulary of 60 and the model 20; return a logit for each token",
        ),
        (
            {"model": named("Failing")},
            "for its logits (a tensor, or `.logits` of what it returns) fails: RuntimeError: no such luck (",
        ),
        (
            {"model": named("OfIntegers")},
            "returned (1, 16) int64 for tokens (1, 16); expected logits (1, 16, vocabulary)",
        ),
        (
            {"model": named("OfDict")},
            "of what it returns) fails: AttributeError: 'dict' object has no attribute 'logits'",
        ),
        (
            {"model": named("Classifier")},
            "calling the model with tokens (1, 16) int64 for its logits (a tensor, or `.logits` of what it returns) ",
        ),
        ({"model": named("Ahead")}, "looks ahead"),
        ({"data": named("Tokens", length=3)}, "unexpected keyword argument 'length'"),
        ({"data": named("number"), "seq_len": 256}, "made a int without a length: TypeError"),
        (
            {"data": named("Tokens"), "pattern": "*.txt"},
            "data.pattern=*.txt does nothing: data._target_=tests.support.my_parts.Tokens",
        ),
        ({"data": named("Pairs"), "seq_len": 16}, "data.seq_len=16 does nothing"),
        ({"data": named("Stream"), "seq_len": 256}, "made a Stream without a length: TypeError"),
        ({"data": named("Empty")}, "made an empty Empty"),
        ({"data": named("Unmeasured")}, "made a Unmeasured without a length: TypeError: 'str' object cannot be"),
        ({"data": named("Tokens", size=3)}, "has 3 items, of which data.eval_fraction=0.2 leaves 3 to train on and 0"),
        ({"data": named("Restless")}, "items are others each time that they are read"),
        ({"data": named("Words")}, "item 0 is not made of tensors on the host ('labels' is a list)"),
        ({"data": named("Uneven")}, "must have equal shapes; item "),
        ({"data": named("TooLarge"), "batch_size": 32}, "item 7 holds the token 20, and the vocabulary is 0 to 19"),
        ({"data": named("Broken"), "batch_size": 32}, "item 5 cannot be read: KeyError: 'five' ("),
        ({"data": named("Pairs"), "seq_len": 256}, "does not say how many different tokens it has"),
        ({"data": named("Pairs"), "seq_len": 256, "model": named("Classifier")}, "no built-in loss is for the items"),
        ({"data": named("Tokens"), "seq_len": 2000}, "longer than the 1024 positions of the model"),
        (
            {"loss": named("classified", smoothing=1)},
            "unexpected keyword argument 'smoothing'",
        ),
        (
            {"model": named("Net"), "loss": named("misspelt"), "overrides": ["train.eval_every=4"]},
            "my_parts.misspelt: the loss of a microbatch (",
        ),
        ({"model": named("Net"), "loss": named("of_rows")}, "the loss returned (32,) float32; a loss is the mean"),
        ({"model": named("Net"), "loss": named("detached")}, "the loss returned () float32 without a gradient"),
        ({"model": named("Net"), "loss": named("on_the_host")}, "the loss returned a float; a loss is the mean"),
        (
            {"loss": named("smoothed")},
            "train.loss._target_=tests.support.my_parts.smoothed: the loss of a microbatch ((2, 17) int64) fails",
        ),
        ({"loss": named("Trained")}, "has parameters, which nothing would train"),
        ({"loss": named("Tokens", seq_len=3)}, "made a Tokens, which cannot be called"),
        ({"loss": named("torch.nn.CrossEntropyLoss", ignore_index=0)}, "has ignore_index=0 and reduction=mean"),
        (
            {"data": named("Pairs"), "model": named("Classifier"), "loss": named("torch.nn.MSELoss"), "seq_len": 256},
            "do not say what these are; give a function loss(model, microbatch)",
        ),
        ({"model": named("Net"), "overrides": ["data.packing=true"]}, "data.packing=true tells the attention"),
        ({"loss": named("smoothed"), "overrides": ["data.packing=true"]}, "keeps packed documents apart"),
        (
            {"model": named("Net"), "overrides": ["train.sample_every=2"]},
            "writes text, with a model of transformers and a tokenizer of transformers",
        ),
        (
            {"data": named("Tokens"), "overrides": ["train.sample_every=2"]},
            "data of your own has as its attribute `tok",
        ),
        (
            {"model": named("Unsplit"), "overrides": ["train.activation_checkpointing=true"]},
            "has no list of like layers",
        ),
        (
            {"model": named("Unsplit"), "overrides": ["graph=per_layer"]},
            "nn.Sequential, name modules (graph.layers=[embed,head]), or use graph=full_iteration",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(str(part) for part in value.values()),
)
def test_what_does_not_fit_is_one_clear_error(own, tmp_path, parts, said):
    parts = dict(parts)
    message = complaint(own(*parts.pop("overrides", ()), **parts), tmp_path)
    assert said in message, message


@pytest.mark.parametrize(
    ("group", "settings", "said"),
    [
        ("model", {"architecture": "custom"}, "model=custom needs model._target_=my_package.Net"),
        ("model", {"architecture": "custom", "target": {"width": 3}}, "full name of something in a module"),
        (
            "model",
            {"architecture": "custom", "target": named("Net"), "options": {"a": 1}},
            "do nothing with model=custom",
        ),
        (
            "model",
            {"architecture": "llama", "target": named("Net")},
            "model._target_ does nothing with model=llama; leave",
        ),
        ("data", {"source": Source.custom}, "data=custom needs data._target_=my_package.Items"),
        ("data", {"source": Source.custom, "target": {"_target_": "Items"}}, "such as data._target_=my_package.Name"),
        (
            "data",
            {"source": Source.custom, "target": named("Tokens"), "packing": True},
            "data.packing does nothing with data=custom",
        ),
        (
            "data",
            {"source": Source.stdlib, "target": named("Tokens")},
            "data._target_ does nothing with data=stdlib; leave",
        ),
        ("train", {"loss": {"_target_": "loss"}}, "such as train.loss._target_=my_package.Name, got 'loss'"),
    ],
)
def test_settings_that_go_with_something_else_are_refused_before_anything_is_loaded(tiny, group, settings, said):
    config = tiny()
    changed = replace(config, **{group: replace(getattr(config, group), **settings)})
    with pytest.raises(ConfigError) as caught:
        check(changed)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": named("Net", width=8, p=0.2)}, "model.target was .* and is now .*or start anew: train.resume=none$"),
        ({"loss": named("smoothed")}, "train.loss was {} and is now"),
        ({"data": named("Tokens", size=41)}, "trained on different data"),
    ],
)
def test_parts_that_decide_the_numbers_may_not_change(own, tmp_path, stop_after, changed, said):
    parts = {"model": named("Net", width=8), "data": named("Tokens")}
    stop_after(2)
    train(own(**parts), tmp_path)
    with pytest.raises(ConfigError, match=said):
        train(own("train.resume=auto", **parts | changed), tmp_path)


def test_the_parts_of_the_page_train(own, tmp_path, monkeypatch):
    (code, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "own_parts.md").read_text(), flags=re.M | re.S)
    (tmp_path / "my_package.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    parts = {"model": named("my_package.Net", width=8), "data": named("my_package.Items", size=30)}
    for loss in (None, named("my_package.loss", smoothing=0.1)):
        found = [
            train(own(f"graph={scope}", loss=loss, **parts), tmp_path / f"{scope}{bool(loss)}") for scope in SCOPES
        ]
        assert found[0].losses == found[1].losses == found[2].losses
        assert found[1].graph["replays"] and found[2].graph["replays"]


def test_what_needs_a_model_of_transformers_says_so_of_a_checkpoint(own, tiny, tmp_path):
    result = train(own("train.ema_decay=0.9", "train.steps=2", model=named("Net")), tmp_path)
    for folder in (tmp_path, tmp_path / result.checkpoint, tmp_path / result.checkpoint / "ema"):
        resume = rf"train\.resume={tmp_path}\. .*load_model\(model, "
        with pytest.raises(ConfigError, match=rf"your own, tests\.support\.my_parts\.Net, .*{resume}"):
            model_folder(str(folder))
    with pytest.raises(ConfigError, match=r"your own, tests\.support\.my_parts\.Net"):
        tiny("model=local", f"model.path={tmp_path / result.checkpoint}")


def test_a_loss_that_keeps_something_is_refused(own, tmp_path):
    message = complaint(own("graph=none", loss=named("Counting")), tmp_path)
    assert message.startswith("train.loss._target_=tests.support.my_parts.Counting keeps something from step to step")


def test_code_of_ones_own_that_fails_later_is_one_line(own, tmp_path):
    with pytest.raises(GraphmodError) as caught:
        train(own("graph=none", model=named("FailingLater")), tmp_path)
    said = str(caught.value)
    failing = "model._target_=tests.support.my_parts.FailingLater"
    assert said.startswith(f"{failing}: step 5: ValueError: no more tokens, please (")
    assert "my_parts.py:" in said


def test_a_loss_that_needs_gradients_says_that_an_evaluation_has_none(own, tmp_path):
    parts = {"model": named("Net"), "loss": named("penalized")}
    message = complaint(own("graph=none", "train.eval_every=4", **parts), tmp_path)
    assert "the loss in an evaluation, which has no gradients (train.eval_every=0 makes none), fails: " in message
    assert len(train(own("graph=none", "train.eval_every=0", **parts), tmp_path / "without").losses) == 8


def test_what_an_object_counts_begins_where_it_does_without_a_trial(own, tmp_path):
    model = named("Net", p=0.0)
    losses = [
        train(own("graph=none", model=model, loss=loss), tmp_path / str(loss)).losses
        for loss in (None, named("Annealed"))
    ]
    assert losses[0][0] == losses[1][0] and losses[1][1] < losses[0][1] * 0.6
