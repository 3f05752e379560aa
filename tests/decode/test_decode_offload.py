"""Keys and values in the memory of the host: the tokens are those of a cache on the device, and each edge is needed."""

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

from graphmod.decode import DecodeEngine, EngineConfig, offload
from graphmod.decode import cache as caches
from graphmod.decode.offload import Passage, Reader, far_layers
from graphmod.decode.types import DecodeError
from graphmod.errors import ConfigError
from tests.support.decode_models import CONFIGS, ROTARY, prompts_of, reference, tiny_model

LAYERS = 5
DEEP = ROTARY | {"num_hidden_layers": LAYERS}


@pytest.fixture(autouse=True)
def deep_models(monkeypatch):
    monkeypatch.setitem(CONFIGS, "llama", lambda: LlamaConfig(**DEEP))
    monkeypatch.setitem(CONFIGS, "mistral", lambda: MistralConfig(**DEEP, sliding_window=11))
    gemma = DEEP | {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8}
    monkeypatch.setitem(CONFIGS, "gemma3", lambda: Gemma3TextConfig(**gemma))


def engine_of(model, **settings):
    usual = {"max_batch_size": 4, "block_size": 8, "steps_per_sync": 3, "offload": "layers"}
    return DecodeEngine(model, **usual | settings)


def tokens_of(engine, prompts, count=24):
    return [done.tokens for done in engine.generate(prompts, max_new_tokens=count)]


@pytest.mark.parametrize(
    ("buffers", "resident"),
    [(1, 0.0), (9, 0.25), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 0.0), (3, 0.25), (1, 0.6)))],
)
def test_tokens_are_those_of_generate(buffers, resident, device):
    model = tiny_model("llama", device)
    prompts = prompts_of(3, 17, 8, 30, 5, 24)
    engine = engine_of(model, offload_buffers=buffers, offload_resident=resident)
    expected = [reference(model, prompt, 24) for prompt in prompts]
    for _ in range(2):  # the second round from graphs that are there
        assert tokens_of(engine, prompts) == expected
    stats = engine.stats
    assert stats.total("launches") > 20 and stats.total("failures") == 0 and stats.blocks_used == 0


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *((architecture, {}) for architecture in ("mistral", "gemma3", "gpt2", "qwen3")),
        *(("mistral", one) for one in ({"graphs": False}, {"attention": "own"}, {"prefill_tokens": 16})),
    ],
)
def test_so_are_those_of_other_models_and_settings(architecture, settings, device):
    model = tiny_model(architecture, device)
    prompts = prompts_of(40, 3, 21)
    assert tokens_of(engine_of(model, **settings), prompts) == [reference(model, prompt, 24) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("least", [1, 4096, 2**30])  # of an extent: all by the copy engine, some, none
def test_kernels_read_what_was_brought(attention, buffers, least, monkeypatch):
    monkeypatch.setattr(offload, "_LEAST_BYTES", least)
    monkeypatch.setattr(offload, "_BRIDGE_BYTES", 0)
    monkeypatch.setattr(offload, "_EXTENTS", 3)
    device = torch.device("cuda")
    model = tiny_model("qwen3", device)
    prompts = prompts_of(3, 60, 33, 17, 50, 8)
    near = DecodeEngine(model, max_batch_size=4, block_size=16, attention=attention)
    far = engine_of(model, block_size=16, attention=attention, offload_buffers=buffers)
    expected = tokens_of(near, prompts, 60)
    for _ in range(2):
        assert tokens_of(far, prompts, 60) == expected
    assert far.stats.total("launches") > 50 and far.stats.host_cache_bytes > 0


@pytest.mark.gpu
def test_extents_are_copied_to_memory_that_was_given_back(monkeypatch):
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1)
    model = tiny_model("llama", torch.device("cuda"))
    prompts = prompts_of(3, 60, 33)
    expected = [reference(model, prompt, 24) for prompt in prompts]
    engine = engine_of(model)
    for _ in range(3):
        assert tokens_of(engine, prompts) == expected
        engine.suspend(keep="graphs")
        engine.resume()


@pytest.mark.gpu
def test_extents_are_left_to_the_copy_engine(monkeypatch):
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1)
    model = tiny_model("llama", torch.device("cuda"))
    prompts, copies = prompts_of(3, 60, 33), offload.CopyNodes.set
    engine = engine_of(model, graphs=True)
    expected = [reference(model, prompt, 24) for prompt in prompts]
    assert tokens_of(engine, prompts) == expected
    monkeypatch.setattr(offload.CopyNodes, "set", lambda self, source, target, spans: copies(self, source, target, []))
    engine.memory.ring.clear()
    engine.memory.ring.expect([])
    assert tokens_of(engine, prompts) != expected


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_a_step_needs_nothing_that_an_earlier_one_has_brought(architecture, device, monkeypatch):
    monkeypatch.setattr(offload, "_LEAST_BYTES", 600)
    model = tiny_model(architecture, device)
    prompts = prompts_of(40, 3, 21, 60, 9)
    engine = engine_of(model, steps_per_sync=5)
    launch = engine.graphs.launch

    def launch_after_garbage(*given):
        for tensor in engine.memory.ring.tensors():
            tensor.fill_(100)
        return launch(*given)

    engine.graphs.launch = launch_after_garbage
    for _ in range(2):
        assert tokens_of(engine, prompts) == [reference(model, prompt, 24) for prompt in prompts]


# -- sharing, joining, leaving ------------------------------------------------------------------------------------


def test_samples_share_the_blocks_of_their_prompt_and_prefixes_are_found(device):
    model = tiny_model("llama", device)
    (prompt,) = prompts_of(33)
    engine = engine_of(model, keep_prefixes=True)
    expected = reference(model, prompt, 24)
    assert [done.tokens for done in engine.generate([prompt], n=3, max_new_tokens=24)] == [expected] * 3
    assert tokens_of(engine, [prompt]) == [expected] and engine.stats.prefix_tokens > 0


def test_nan_of_a_request_reaches_nobody(device):
    model = tiny_model("llama", device)
    (prompt,) = prompts_of(12)
    expected = reference(model, prompt, 24)
    poison = next(token for token in range(3, 96) if token not in (*prompt, *expected))
    with torch.no_grad():
        model.get_input_embeddings().weight.data[poison] = float("nan")
    engine = engine_of(model, max_batch_size=1, cache_tokens=64)
    assert engine.generate([[poison] * 30], max_new_tokens=3)[0].finish_reason == "error"
    assert tokens_of(engine, [prompt]) == [expected]


def test_suspended_it_has_no_memory_at_all(device):
    model = tiny_model("llama", device)
    prompts = prompts_of(9, 20)
    engine, usual = engine_of(model), DecodeEngine(model, max_batch_size=4, block_size=8)
    expected, stats = tokens_of(engine, prompts), engine.stats
    assert stats.host_cache_bytes == usual.stats.cache_bytes == stats.cache_bytes * LAYERS / 2
    engine.suspend()
    assert engine.stats.cache_bytes == engine.stats.host_cache_bytes == 0
    engine.resume()
    assert tokens_of(engine, prompts) == expected


# -- each edge is needed ------------------------------------------------------------------------------------------


class Late:
    """Copies at the last moment that is allowed: when somebody waits for them."""

    def __init__(self, device):
        self.acts = []

    def here(self):
        return None

    def run(self, act, after):
        self.acts.append(act)
        return act

    def wait(self, end):
        while end in self.acts:
            self.acts.pop(0)()


def early(self, layer):
    """Copies at the first moment that is possible without what they have to come after: all at the beginning."""
    return len(self._ring.far)


def offloaded(monkeypatch, device, without):
    """Tokens of an engine, and what they should be. `without` takes an edge away, once the engine is made."""
    model = tiny_model("llama", device)
    prompts = prompts_of(3, 17, 30)
    engine = engine_of(model)
    if without == "a copy comes after computation":
        monkeypatch.setattr(Passage, "_due", early)
    elif without == "computation comes after its copy":
        monkeypatch.setattr(Late, "wait", lambda self, end: None)
    elif without == "what is new is kept":
        monkeypatch.setattr(caches.PagedCache, "write", lambda *given: None)
    elif without == "what is new is near":
        monkeypatch.setattr(caches.PagedCache, "write_near", lambda *given: None)
    elif without == "what is read is expected":
        monkeypatch.setattr(caches.PagedCache, "expect", lambda *given: None)
    try:
        found = tokens_of(engine, prompts)
    except DecodeError:  # the first tokens are compared
        found = None
    return found, [reference(model, prompt, 24) for prompt in prompts], engine


@pytest.mark.parametrize("branch", [caches.Branch, Late])
def test_copies_may_come_as_late_as_they_are_waited_for(branch, monkeypatch, device):
    monkeypatch.setattr(caches, "Branch", branch)
    found, expected, engine = offloaded(monkeypatch, device, None)
    assert found == expected and engine.stats.total("launches") > 10
    assert branch is caches.Branch or not engine.memory.ring.branch.acts


@pytest.mark.parametrize(
    "without",
    [
        "a copy comes after computation",
        "computation comes after its copy",
        "what is new is kept",
        "what is new is near",
        "what is read is expected",
    ],
)
def test_without_an_edge_tokens_are_others(without, monkeypatch):
    monkeypatch.setattr(caches, "Branch", Late if "its copy" in without else caches.Branch)
    found, expected, _ = offloaded(monkeypatch, torch.device("cpu"), without)
    assert found != expected


def test_who_is_interrupted_while_it_is_said_leaves_nothing_that_seems_to_be_done(monkeypatch):
    memory = engine_of(tiny_model("llama", torch.device("cpu"))).memory
    (listed,) = memory.ring._listed.values()
    first, other = Reader([1, 2], 12, 12), Reader([5, 6, 7], 20, 20)
    memory.expect([first])
    expected = listed[:4].clone()

    class Interrupted:
        def set(self, *given):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory.ring, "_nodes", Interrupted())
        patch.setattr(offload, "_LEAST_BYTES", 1)
        with pytest.raises(KeyboardInterrupt):
            memory.expect([other])
    memory.expect([first])
    assert torch.equal(listed[:4], expected)


# -- settings -----------------------------------------------------------------------------------------------------


def test_layers_that_stay_are_spread(device):
    assert far_layers(8, 0) == [*range(8)] and far_layers(8, 1) == []
    assert far_layers(8, 0.25) == [1, 2, 3, 5, 6, 7] and far_layers(5, 0.5) == [0, 2, 4]
    engine = engine_of(tiny_model("llama", device), offload_resident=1.0)
    assert engine.stats.host_cache_bytes == 0 and engine.memory.ring is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"offload": "all"}, "offload"),
        ({"offload_buffers": 0}, "offload_buffers"),
        ({"offload_resident": 1.5}, "from 0 to 1, got 1.5"),
        ({"offload_resident": "half"}, "from 0 to 1"),
        ({"offload": "layers", "compile": "max"}, "use compile=none"),
        ({"offload_resident": 0.5}, "add offload=layers"),
        ({"offload_buffers": 3}, "add offload=layers"),
    ],
)
def test_what_cannot_be_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**settings)
