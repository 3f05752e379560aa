"""LoRA adapters by name: rows of a batch that compute with different ones, or none, as their merged models do."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphmod.decode import DecodeEngine, DecodeError, RequestError, Sampling, quantize_weights
from graphmod.decode.adapters import adaptable
from graphmod.decode.sampling import ADAPTED, GREEDY
from graphmod.errors import ConfigError
from graphmod.fuse.compiler import StepCompiler
from tests.support.decode_models import prompts_of, tiny_model

peft = pytest.importorskip("peft")
PROMPTS = prompts_of(5, 70, 9, 3)
CPU = torch.device("cpu")
KINDS = {
    "a": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    "b": {"r": 2, "use_rslora": True, "alpha_pattern": {"down_proj|c_fc": 5}, "rank_pattern": {"q_proj|c_attn": 3}},
}


def saved(folder, name, architecture="llama", **more):
    """An adapter in a folder, and the model that it makes of the tiny one."""
    torch.manual_seed(ord(name))
    settings = {"target_modules": "all-linear", "init_lora_weights": False} | KINDS[name] | more
    model = peft.get_peft_model(tiny_model(architecture, CPU), peft.LoraConfig(**settings))
    model.save_pretrained(folder / name)
    return model.merge_and_unload().eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return folder, {None: tiny_model("llama", CPU)} | {name: saved(folder, name) for name in KINDS}


def engine_with(folder, model, names=("a", "b"), **settings):
    adapters = {"max_adapters": 2, "max_adapter_rank": 8}
    engine = DecodeEngine(model, **{"max_batch_size": 4, "max_seq_len": 100} | adapters | settings)
    for name in names:
        engine.load_adapter(name, folder / name)
    return engine


def generated(engine, names, prompts=PROMPTS, **settings):
    asked = [Sampling(adapter=name, **{"max_new_tokens": 12} | settings) for name in names]
    done = engine.generate(prompts, sampling=asked)
    return [(one.tokens, one.logprobs + (one.prompt_logprobs or [])) for one in done]


_engines = {}


def alone(model, prompt, **settings):
    if model not in _engines:
        _engines[model] = DecodeEngine(model, max_batch_size=4, max_seq_len=100, graphs=False)
    return generated(_engines[model], [None], [prompt], **settings)[0]


def require_same(found, expected):
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-5)


NAMES = ["a", "b", None, "a"]


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        ({}, {}),
        ({"attention": "own"}, {"prompt_logprobs": True}),
        ({"prefill_tokens": 16, "block_size": 4}, {"temperature": 0.9, "top_k": 20, "seed": 3}),
        ({"offload": "layers"}, {"prompt_logprobs": True}),
    ],
    ids=str,
)
def test_each_row_is_that_of_its_merged_model_from_graphs_as_without(models, own, settings):
    folder, merged = models
    engine = engine_with(folder, merged[None], **own)
    found = generated(engine, NAMES, **settings)
    for name, prompt, one in zip(NAMES, PROMPTS, found, strict=True):
        require_same(one, alone(merged[name], prompt, **settings))
    assert engine.stats.total("launches") > 0 and engine.stats.total("failures") == 0
    assert generated(engine_with(folder, merged[None], graphs=False, **own), NAMES, **settings) == found
    assert not any(module._forward_hooks for module in merged[None].modules()), "the model is as it was"


@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_other_models_get_their_adapters(architecture, tmp_path):
    merged = {None: tiny_model(architecture, CPU)} | {name: saved(tmp_path, name, architecture) for name in KINDS}
    found = generated(engine_with(tmp_path, merged[None]), NAMES)
    for name, prompt, one in zip(NAMES, PROMPTS, found, strict=True):
        require_same(one, alone(merged[name], prompt))


def test_adapters_are_beside_weights_of_8_bits_too(models):
    folder, _ = models
    model, other = tiny_model("llama", CPU), tiny_model("llama", CPU)
    for one in (model, other):
        quantize_weights(one, "int8")
    engine = engine_with(folder, model, names=("a",))
    for name, pair in engine.adapters.read(folder / "a").items():

        def add(module, given, result, down=pair["A"], up=pair["B"]):
            return result + given[0] @ down.T @ up.T

        other.get_submodule(name).register_forward_hook(add)
    for one, prompt in zip(generated(engine, ["a"] * 4), PROMPTS, strict=True):
        require_same(one, alone(other, prompt))


def test_who_has_none_runs_from_the_graphs_of_an_engine_without_any(models):
    folder, merged = models
    engine, plain = engine_with(folder, merged[None]), DecodeEngine(merged[None], max_batch_size=4, max_seq_len=100)
    assert generated(engine, [None] * 4) == generated(plain, [None] * 4)
    assert not any(kind & ADAPTED for *_, kind in engine.graphs.wrappers)
    together = generated(engine, ["a", None, None, None])
    assert together[1:] == generated(plain, [None] * 4)[1:], "nor does a row beside it change any"


def test_graphs_that_were_captured_ahead_serve_any_adapter_loaded_later(models):
    folder, merged = models
    engine = engine_with(folder, merged[None], names=(), buckets=[4], prefill_tokens=128, max_seq_len=100)
    engine.warm_up(kinds=(GREEDY, GREEDY | ADAPTED), progress=False)
    before = engine.stats
    for name in KINDS:
        engine.load_adapter(name, folder / name)
    found = generated(engine, NAMES)
    engine.unload_adapter("a")
    engine.load_adapter("a", folder / "b")
    assert [tokens for tokens, _ in generated(engine, ["a"], PROMPTS[1:2])] == [found[1][0]]
    assert engine.stats.total("eager_steps") == before.total("eager_steps")
    assert engine.stats.prefill.eager_steps == before.prefill.eager_steps


def test_compiled_steps_add_what_adapters_do(models):
    folder, merged = models
    graphs = []

    def compile(graph, inputs, tuned):
        graphs.append(graph)
        return graph.forward

    engine = engine_with(folder, merged[None], buckets=[4], attention="sdpa")
    engine.graphs.compiler = StepCompiler(False, False, compile)
    for _ in range(2):
        found = generated(engine, NAMES, max_new_tokens=25)
    for name, prompt, one in zip(NAMES, PROMPTS, found, strict=True):
        require_same(one, alone(merged[name], prompt, max_new_tokens=25))
    assert graphs and engine.stats.total("failures") == 0
    engine.unload_adapter("a")
    engine.load_adapter("c", folder / "b")
    require_same(generated(engine, ["b", "c"], PROMPTS[:2])[1], alone(merged["b"], PROMPTS[1]))


def test_both_halves_of_a_step_with_masks_know_the_adapter(models):
    pytest.importorskip("llguidance")
    from graphmod.text import ByteCodec

    folder, merged = models
    settings = {"structured_outputs": {"regex": "[0-9A-F]+"}, "max_new_tokens": 9}
    found = generated(engine_with(folder, merged[None], codec=ByteCodec()), NAMES, **settings)
    for name, prompt, one in zip(NAMES, PROMPTS, found, strict=True):
        own = DecodeEngine(merged[name], max_batch_size=4, max_seq_len=100, codec=ByteCodec())
        require_same(one, generated(own, [None], [prompt], **settings)[0])


def test_beginnings_of_prompts_are_those_of_one_adapter(models):
    folder, merged = models
    engine = engine_with(folder, merged[None], keep_prefixes=True, block_size=8)
    prompt = [PROMPTS[1]]
    for name in (None, "a", "b"):
        require_same(generated(engine, [name], prompt)[0], alone(merged[name], PROMPTS[1]))
        assert engine.stats.prefix_tokens == 64 * (0 if name is None else {"a": 1, "b": 2}[name])
        generated(engine, [name], prompt)
    engine.unload_adapter("a")
    engine.load_adapter("a", folder / "b")
    require_same(generated(engine, ["a"], prompt)[0], alone(merged["b"], PROMPTS[1]))
    assert engine.stats.prefix_tokens == 3 * 64, "another adapter of the same name has begun nothing"


def test_what_runs_goes_on_with_an_adapter_that_is_unloaded(models):
    folder, merged = models
    engine = engine_with(folder, merged[None])
    expected = alone(merged["a"], PROMPTS[1], max_new_tokens=25)
    handle = engine.submit(PROMPTS[1], adapter="a", max_new_tokens=25)
    engine.step()
    engine.unload_adapter("a")
    with pytest.raises(RequestError, match="adapter 'a' is not loaded; loaded are b"):
        engine.submit(PROMPTS[1], adapter="a")
    with pytest.raises(ConfigError, match=r"room for 2 adapters, and 1 are loaded \(b\), or unloaded and still in use"):
        engine.load_adapter("c", folder / "b")
    while not handle.done:
        engine.step()
    (done,) = handle.completions
    require_same((done.tokens, done.logprobs), expected)
    engine.load_adapter("c", folder / "b")
    require_same(generated(engine, ["c"], PROMPTS[:1])[0], alone(merged["b"], PROMPTS[0]))


def test_adapters_come_while_requests_run(models):
    folder, merged = models
    engine = engine_with(folder, merged[None], names=("a",))
    expected = generated(engine, ["a"] * 4, max_new_tokens=25)
    found = []
    running = threading.Thread(target=lambda: found.extend(generated(engine, ["a"] * 4, max_new_tokens=25)))
    running.start()
    for _ in range(5):
        engine.load_adapter("b", folder / "b")
        engine.unload_adapter("b")
    running.join()
    assert found == expected


def with_config(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_weights(folder, change):
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")


KEY = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
WRONG = {
    "use_dora=True": lambda folder: with_config(folder, use_dora=True),
    "bias='all'": lambda folder: with_config(folder, bias="all"),
    r"modules_to_save=\['lm_head'\]": lambda folder: with_config(folder, modules_to_save=["lm_head"]),
    "a_later_field=1": lambda folder: with_config(folder, a_later_field=1),
    "init_lora_weights='pissa'": lambda folder: with_config(folder, init_lora_weights="pissa"),
    "of kind IA3": lambda folder: with_config(folder, peft_type="IA3"),
    "holds no LoRA adapter that can be read": lambda folder: (folder / "adapter_config.json").unlink(),
    "holds base_model.model.model.embed_tokens.lora_embedding_A": lambda folder: with_weights(
        folder, lambda held: held.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(1)})
    ),
    "adapts lm_head, which cannot have": lambda folder: with_weights(
        folder, lambda held: held.update({"base_model.model.lm_head.lora_A.weight": torch.ones(1, 1)})
    ),
    "has matrices of shapes": lambda folder: with_weights(folder, lambda held: held.pop(KEY)),
    "numbers that are not finite": lambda folder: with_weights(folder, lambda held: held[KEY].fill_(float("nan"))),
}


@pytest.mark.parametrize("said", WRONG, ids=str)
def test_what_cannot_be_added_to_linear_layers_is_refused(said, models, tmp_path):
    saved(tmp_path, "a")
    WRONG[said](tmp_path / "a")
    with pytest.raises(ConfigError, match=said):
        engine_with(tmp_path, models[1][None], names=("a",))


def test_no_room_and_names_that_are_taken_are_told(models):
    folder, merged = models
    engine = engine_with(folder, merged[None], max_adapter_rank=4)
    with pytest.raises(ConfigError, match="an adapter 'a' is loaded already"):
        engine.load_adapter("a", folder / "a")
    with pytest.raises(ConfigError, match=r"room for 2 adapters, and 2 are loaded \(a, b\)"):
        engine.load_adapter("c", folder / "a")
    with pytest.raises(ConfigError, match="adapter 'c' is not loaded; loaded are a, b"):
        engine.unload_adapter("c")
    with pytest.raises(ConfigError, match="has rank 4, and max_adapter_rank=2"):
        engine_with(folder, merged[None], max_adapter_rank=2)
    with pytest.raises(ConfigError, match="no memory for adapters; set max_adapters"):
        engine_with(folder, merged[None], max_adapters=0)
    with pytest.raises(RequestError, match="adapter must be the name of one, got 1"):
        engine.generate(PROMPTS, adapter=1)


def test_layers_that_adapters_would_not_reach_have_none():
    model = tiny_model("llama", CPU)
    whole = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda given: torch.cat([whole(one) for one in given.split(1, 1)], 1)
    found = adaptable(model)
    assert "model.layers.0.mlp.up_proj" not in found and {"model.layers.1.mlp.up_proj"} < {*found}
    assert "lm_head" not in found
    model.model.layers[1].compile()
    with pytest.raises(ConfigError, match=r"cannot be used with code of torch\.compile"):
        adaptable(model)


def test_a_layer_that_is_exchanged_is_noticed(models):
    folder, _ = models
    model = tiny_model("llama", CPU)
    engine = engine_with(folder, model)
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(DecodeError, match="layers of the model were exchanged"):
        engine.submit(PROMPTS[0], adapter="a")
