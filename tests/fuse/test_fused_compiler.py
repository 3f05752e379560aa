"""Decode steps that are compiled after they were captured: when compiled code takes over, and what undoes that."""

import gc
import threading
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from graphmod.decode import DecodeEngine, DecodeError
from graphmod.fuse.compiler import StepCompiler
from graphmod.text import ByteCodec
from graphmod.wrap.extension import serving
from tests.support.decode_models import ROTARY, prompts_of, tiny_model

SLIDING = ["sliding_attention", "full_attention"] * 3
MODELS = {
    "llama": (LlamaConfig(**ROTARY | {"num_hidden_layers": 6}), 3),
    "qwen3": (Qwen3Config(**ROTARY | {"num_hidden_layers": 6}, head_dim=16), 3),
    # The first of each kind makes its mask; else they are alike up to what they are given.
    "gemma3": (Gemma3TextConfig(**ROTARY | {"num_hidden_layers": 6}, layer_types=SLIDING, sliding_window=4), 4),
}
PROMPTS = prompts_of(5, 9, 2)


class Compiler:
    """Stands for a compiler: runs a graph as it is, and can be held up or fail."""

    def __init__(self, error=None):
        self.graphs, self.error = [], error
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, graph, inputs, tuned):
        assert self.may_go_on.wait(60)
        if self.error is not None:
            raise self.error
        self.graphs.append(graph)
        return graph.forward


class LooksOn(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def tokens_of(engine, prompts, **settings):
    return [done.tokens for done in engine.generate(prompts, **settings)]


def engine_with(model, compile, background=False, **settings):
    engine = DecodeEngine(model, **{"max_batch_size": 4, "max_seq_len": 64, "attention": "sdpa", **settings})
    engine.graphs.compiler = StepCompiler(False, background, compile)
    return engine


def expected_of(model, count=40):
    return tokens_of(
        DecodeEngine(model, max_batch_size=4, max_seq_len=64, attention="sdpa"), PROMPTS, max_new_tokens=count
    )


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3", "gemma3"))])
def test_a_models_layers_are_compiled_once_and_generate_the_same(kind):
    config, pieces = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    compile = Compiler()
    engine = engine_with(model, compile, buckets=[4])
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert len(compile.graphs) == pieces
    stats = engine.stats
    assert stats.total("captures") == 1 and stats.total("eager_steps") == 2 and stats.total("failures") == 0
    other = engine_with(model, compile, buckets=[4])
    assert tokens_of(other, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert len(compile.graphs) == pieces, "an engine of the same shapes compiles nothing"


def test_sampling_is_part_of_what_is_compiled():
    model = tiny_model("llama", torch.device("cpu"))
    settings = {"max_new_tokens": 30, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}
    plain = DecodeEngine(model, max_batch_size=4, max_seq_len=64, attention="sdpa")
    compile = Compiler()
    engine = engine_with(model, compile)
    assert tokens_of(engine, PROMPTS, **settings) == tokens_of(plain, PROMPTS, **settings)
    assert compile.graphs


def test_both_halves_of_a_step_with_masks_are_compiled():
    pytest.importorskip("llguidance")
    model = tiny_model("llama", torch.device("cpu"))
    settings = {"max_new_tokens": 30, "temperature": 0.9, "seed": 3, "structured_outputs": {"regex": "[0-9A-F]+"}}
    plain = DecodeEngine(model, max_batch_size=4, max_seq_len=64, attention="sdpa", codec=ByteCodec())
    compile = Compiler()
    engine = engine_with(model, compile, buckets=[4], codec=ByteCodec())
    assert tokens_of(engine, PROMPTS, **settings) == tokens_of(plain, PROMPTS, **settings)
    assert compile.graphs and all(serving(wrapper).succeeded for wrapper in engine.graphs.wrappers.values())


def test_weights_that_change_are_seen_and_weights_that_move_are_captured_anew():
    model = tiny_model("qwen3", torch.device("cpu"))
    compile = Compiler()
    engine = engine_with(model, compile, buckets=[4])
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    count = len(compile.graphs)
    model.load_state_dict(tiny_model("qwen3", torch.device("cpu"), seed=1).state_dict())
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert engine.stats.total("recaptures") == 0
    model.load_state_dict(tiny_model("qwen3", torch.device("cpu"), seed=2).state_dict(), assign=True)
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert engine.stats.total("recaptures") == 1 and len(compile.graphs) == count, "pieces hold no weights"


def test_python_that_changes_is_noticed_by_compiled_steps():
    model = tiny_model("llama", torch.device("cpu"))
    engine = engine_with(model, Compiler(), buckets=[4])
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5
    found = tokens_of(engine, PROMPTS, max_new_tokens=40)
    assert found == expected_of(model)


def test_an_engine_serves_uncompiled_until_code_is_there():
    model = tiny_model("llama", torch.device("cpu"))
    compile = Compiler()
    compile.may_go_on.clear()
    engine = engine_with(model, compile, background=True, buckets=[4])
    expected = expected_of(model)
    for _ in range(2):
        assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    before = engine.stats.total("eager_steps")
    assert engine.graphs.compiler.waiting == 1 and not compile.graphs and before == 1
    compile.may_go_on.set()
    for _ in range(600):
        if not engine.graphs.compiler.waiting:
            break
        threading.Event().wait(0.05)
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    assert engine.stats.total("eager_steps") == before + 1, "compiled code ran once before it was captured"
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected


def test_steps_that_run_eagerly_meanwhile_change_nothing_about_what_is_compiled():
    model = tiny_model("llama", torch.device("cpu"))
    compile = Compiler()
    compile.may_go_on.clear()
    engine = engine_with(model, compile, background=True, buckets=[4])
    expected = expected_of(model)
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    compile.may_go_on.set()
    (wrapper,) = engine.graphs.wrappers.values()
    while engine.graphs.compiler.waiting:
        threading.Event().wait(0.01)
    with LooksOn():  # a mode of somebody else: no graph serves these calls
        assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    assert serving(wrapper).succeeded and compile.graphs


def test_tokens_of_compiled_code_are_compared_with_the_models_own():
    model = tiny_model("llama", torch.device("cpu"))

    def compile(graph, inputs, tuned):  # as a compiler with a defect
        return lambda *given: tuple(one.flip(-1) if one.is_floating_point() else one for one in graph(*given))

    engine = engine_with(model, compile, buckets=[4])
    engine.graphs.compiler.taken_over = engine._traffic._first.await_again
    with pytest.raises(DecodeError, match="differ by"):
        tokens_of(engine, PROMPTS, max_new_tokens=40)


def test_a_background_compiler_keeps_no_engine_alive():
    model = tiny_model("llama", torch.device("cpu"))
    compile = Compiler()
    compile.may_go_on.clear()
    engine = engine_with(model, compile, background=True, buckets=[4])
    state = torch.get_rng_state()
    tokens_of(engine, PROMPTS, max_new_tokens=20)
    thread, cache = engine.graphs.compiler._thread, weakref.ref(engine.memory.keys[0])
    del engine
    gc.collect()
    assert cache() is None, "while it compiles"
    compile.may_go_on.set()
    thread.join(60)
    assert not thread.is_alive() and torch.equal(torch.get_rng_state(), state)


def test_a_compiler_that_fails_leaves_the_graphs_that_there_are(caplog):
    model = tiny_model("llama", torch.device("cpu"))
    engine = engine_with(model, Compiler(RuntimeError("no such instruction")), buckets=[4])
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert "'decode step of 4 rows' stays uncompiled: RuntimeError: no such instruction" in caplog.text
    assert engine.stats.total("failures") == 0 and engine.stats.total("eager_steps") == 1


def test_a_compilation_that_is_interrupted_is_made_by_the_next_call():
    model = tiny_model("llama", torch.device("cpu"))
    compile = Compiler(KeyboardInterrupt())
    engine = engine_with(model, compile, buckets=[4])
    with pytest.raises(KeyboardInterrupt):
        tokens_of(engine, PROMPTS, max_new_tokens=40)
    compile.error = None
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert compile.graphs and engine.stats.total("eager_steps") == 2


def test_compiled_code_that_cannot_be_captured_is_left(caplog):
    model = tiny_model("llama", torch.device("cpu"))

    def compile(graph, inputs, tuned):
        def run(*given):
            given[0].sum().item()  # which no graph can repeat
            return graph(*given)

        return run

    engine = engine_with(model, compile, buckets=[4])
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert "keeps the kernels it has" in caplog.text and engine.stats.total("failures") == 0


def test_compiled_code_that_fails_in_a_step_ends_its_requests_and_is_not_used_again():
    model = tiny_model("llama", torch.device("cpu"))

    def compile(graph, inputs, tuned):
        runs = []

        def run(*given):
            runs.append(None)
            if len(runs) > 1:  # the first is on other memory
                raise RuntimeError("illegal instruction")
            return graph.forward(*given)

        return run

    engine = engine_with(model, compile, buckets=[4])
    with pytest.raises(Exception, match="illegal instruction"):
        tokens_of(engine, PROMPTS, max_new_tokens=40)
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)


def test_compiled_code_that_fails_on_other_memory_is_not_used(caplog):
    model = tiny_model("llama", torch.device("cpu"))

    def compile(graph, inputs, tuned):
        def run(*given):
            raise RuntimeError("illegal instruction")

        return run

    engine = engine_with(model, compile, buckets=[4])
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected_of(model)
    assert "stays uncompiled: RuntimeError: illegal instruction" in caplog.text


@pytest.mark.parametrize("keep", ["none", "graphs"])
def test_a_suspended_engine_has_given_its_memory_back(keep):
    model = tiny_model("llama", torch.device("cpu"))
    compile = Compiler()
    engine = engine_with(model, compile, buckets=[4])
    expected = expected_of(model)
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    cache = weakref.ref(engine.memory.keys[0])
    count = len(compile.graphs)
    engine.suspend(keep=keep)
    gc.collect()
    assert (cache() is None) == (keep == "none")
    engine.resume()
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    assert len(compile.graphs) == count


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "max"])
@pytest.mark.parametrize("attention", ["triton", "sdpa"])
def test_on_a_gpu_compiled_code_takes_over_while_the_engine_runs(mode, attention):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS["qwen3"][0]).eval().cuda()
    settings = {"max_batch_size": 4, "max_seq_len": 64, "block_size": 16, "attention": attention, "buckets": [4]}
    expected = tokens_of(DecodeEngine(model, **settings), PROMPTS, max_new_tokens=40)
    engine = DecodeEngine(model, **settings, compile=mode, compile_in_background=True)
    rounds = 0
    while engine.graphs.compiler.waiting or not rounds:
        assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
        rounds += 1
    assert tokens_of(engine, PROMPTS, max_new_tokens=40) == expected
    assert engine.stats.total("failures") == 0
    assert all(serving(wrapper).succeeded for wrapper in engine.graphs.wrappers.values()), "it took over"
