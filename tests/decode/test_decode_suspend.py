"""An engine that gives its memory back while a model is trained, keeps its graphs, and goes on with them."""

import gc
import random
import sys
import threading

import pytest
import torch

from graphmod.decode import DecodeEngine, DecodeError, EngineLoop
from graphmod.decode import memory as module
from graphmod.decode.memory import Ordinary
from graphmod.errors import ConfigError
from tests.decode.test_decode_pages import lay_on
from tests.support.decode_models import prompts_of, reference, tiny_model
from tests.support.fake_driver import FakeDriver, all_of_them

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system takes no pages back")


@pytest.fixture(scope="module")
def drivers():
    with all_of_them() as made:
        yield made


@pytest.fixture
def fake(monkeypatch, drivers):
    """Caches lie in the memory of a driver, which cannot be touched while it is not mapped."""
    found = FakeDriver()
    drivers.append(found)
    lay_on(found, monkeypatch)
    yield found
    assert found.wrong == []


@pytest.fixture(params=["cpu", "driver", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where engines run: with the memory of the system, with that of a driver, and on a GPU."""
    if request.param == "driver":
        request.getfixturevalue("fake")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


# For tests that take seconds: the memory of a driver shows more, since nobody can touch it while it is away.
on_a_driver = pytest.mark.parametrize(
    "device",
    ["driver", pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
    indirect=True,
)


def tokens_of(engine, prompts, **settings):
    return [done.tokens for done in engine.generate(prompts, **settings)]


def references(model, prompts, count):
    return [reference(model, prompt, count) for prompt in prompts]


def captures(engine):
    return engine.stats.total("captures") + engine.stats.prefill.captures


def addresses(engine):
    memory = engine.memory
    near = [] if memory.ring is None else memory.ring.tensors()
    return [one.data_ptr() for one in (*memory.keys, *memory.values, *near, memory.spare_slots)]


def warm(model, **settings):
    engine = DecodeEngine(
        model, **{"max_batch_size": 2, "buckets": [2], "max_seq_len": 64, "prefill_tokens": 64, **settings}
    )
    engine.warm_up(progress=False)
    return engine


@on_a_driver
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"attention": "sdpa"}, marks=pytest.mark.slow),
        pytest.param({"attention": "own"}, marks=pytest.mark.slow),
        {"offload": "layers", "offload_resident": 0.5},
    ],
)
def test_graphs_that_were_kept_go_on_with_the_same_tokens_and_addresses(settings, device):
    model = tiny_model("llama", device)
    engine, other = (warm(model, **settings) for _ in range(2))
    where = addresses(engine)
    prompts, settings = prompts_of(5, 19, 3, 40), {"max_new_tokens": 20}
    for count in range(2):
        assert tokens_of(engine, prompts, **settings) == references(model, prompts, 20)
        mine, others = (one.generate(prompts, n=2, temperature=1.0, seed=count, **settings) for one in (engine, other))
        assert [(done.tokens, done.logprobs) for done in mine] == [(done.tokens, done.logprobs) for done in others]
        if not count:
            before = captures(engine)  # with the graphs of other kinds of sampling
        engine.suspend(keep="graphs")
        assert engine.stats.cache_bytes == 0 and engine.stats.state == "valid"
        engine.resume()
        assert addresses(engine) == where and engine.stats.resume_seconds > 0
    assert tokens_of(engine, prompts, **settings) == references(model, prompts, 20)
    assert captures(engine) == before
    assert engine.stats.total("recaptures") == engine.stats.total("failures") == 0


def test_what_is_only_read_is_zeros_again(device):
    engine = warm(tiny_model("llama", device))
    for one in (*engine.memory.keys, *engine.memory.values):
        one.fill_(float("nan"))
    engine.suspend(keep="graphs")
    engine.resume()
    assert not any(bool(one.any()) for one in (*engine.memory.keys, *engine.memory.values))
    assert engine.memory.spare_slots.tolist() == [64, 65], "what lies elsewhere stays"


def test_memory_of_the_host_stays_and_buffers_for_it_go(fake):
    engine = warm(tiny_model("llama", torch.device("cpu")), offload="layers", offload_resident=0.5)
    stats, memory = engine.stats, engine.memory
    assert stats.host_cache_bytes > 0 and fake.used >= stats.cache_bytes > 0
    torch._foreach_add_(memory.ring.tensors(), float("nan"))
    engine.suspend(keep="graphs")
    assert (fake.used, engine.stats.cache_bytes) == (0, 0)
    assert engine.stats.host_cache_bytes == stats.host_cache_bytes
    engine.resume()
    assert engine.stats.cache_bytes == stats.cache_bytes and not any(one.any() for one in memory.ring.tensors())
    engine.suspend()
    assert fake.nothing_left() and engine.stats.host_cache_bytes == 0


def test_a_trainer_and_a_sampler_take_turns(device):
    model = tiny_model("llama", device)
    engine, prompts = warm(model, keep_prefixes=True), prompts_of(5, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch, seen, before = torch.tensor(prompts_of(16, 16), device=device), set(), captures(engine)
    for _ in range(4):
        engine.suspend(keep="graphs")
        model.train()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        engine.resume()
        found = tokens_of(engine, prompts, max_new_tokens=12)
        assert found == references(model, prompts, 12)
        seen.add(str(found))
    assert len(seen) > 1, "training changed nothing, so the test showed nothing"
    assert captures(engine) == before


def test_prefixes_are_forgotten_with_the_memory_they_lay_in(device):
    engine = warm(tiny_model("llama", device), block_size=8, keep_prefixes=True)
    (prompt,) = prompts_of(30)
    expected = tokens_of(engine, [prompt], max_new_tokens=8)
    tokens_of(engine, [prompt], max_new_tokens=8)
    found = engine.stats.prefix_tokens
    assert found > 0
    engine.suspend(keep="graphs")
    engine.resume()
    assert tokens_of(engine, [prompt], max_new_tokens=8) == expected
    assert engine.stats.prefix_tokens == found


def test_a_suspended_engine_says_so_and_does_nothing(device):
    engine, prompts = warm(tiny_model("llama", device)), prompts_of(5)
    engine.suspend(keep="graphs")
    for act in (
        lambda: engine.generate(prompts),
        lambda: engine.stream(prompts),
        lambda: engine.submit(prompts[0]),
        lambda: engine.warm_up(progress=False),
    ):
        with pytest.raises(DecodeError, match="suspended"):
            act()
    assert engine.step() == [] and not engine.unfinished
    with engine.pause():
        pass
    engine.abort_all()
    engine.resume()
    assert len(tokens_of(engine, prompts, max_new_tokens=5)[0]) == 5


def test_who_has_paused_may_suspend_and_resume(device):
    engine, prompts = warm(tiny_model("llama", device)), prompts_of(5, 9)
    expected, before = tokens_of(engine, prompts, max_new_tokens=12), captures(engine)
    with engine.pause():
        engine.suspend(keep="graphs")
    with engine.pause():
        engine.resume()
        engine.suspend(keep="graphs")
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected and captures(engine) == before


def test_what_is_done_twice_is_done_once(device):
    engine, prompts = warm(tiny_model("llama", device)), prompts_of(5, 9)
    expected, before = tokens_of(engine, prompts, max_new_tokens=12), captures(engine)
    engine.suspend(keep="graphs")
    engine.suspend(keep="graphs")
    engine.resume()
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected and captures(engine) == before


def test_suspend_gives_the_rest_back_too(device):
    engine, prompts = warm(tiny_model("llama", device)), prompts_of(5, 9)
    expected, before = tokens_of(engine, prompts, max_new_tokens=12), captures(engine)
    engine.suspend(keep="graphs")
    engine.suspend()
    assert engine.stats.state == "invalid" and engine.stats.cache_bytes == 0
    engine.suspend(keep="graphs")
    assert engine.stats.state == "invalid", "what was given back is not kept"
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=30) and captures(engine) > before
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected
    assert engine.stats.total("recaptures") == 0


def test_a_driver_gets_everything_back_by_and_by(fake):
    engine = warm(tiny_model("llama", torch.device("cpu")))
    size = engine.stats.cache_bytes
    assert fake.used >= size > 0
    fake.synchronized = False  # as if a step still ran
    engine.suspend(keep="graphs")
    assert fake.used == 0 and fake.ranges
    engine.suspend()
    assert fake.nothing_left()
    engine.resume()
    assert fake.used >= size
    engine.suspend()
    assert fake.nothing_left()


@pytest.mark.parametrize("keep", ["none", "graphs", None])
def test_an_engine_that_is_deleted_leaves_nothing(keep, fake):
    engine = warm(tiny_model("llama", torch.device("cpu")))
    tokens_of(engine, prompts_of(5), max_new_tokens=12)
    if keep:
        engine.suspend(keep)
    del engine
    gc.collect()
    assert fake.nothing_left()


def test_an_engine_without_graphs_gives_its_memory_back_too(device):
    model = tiny_model("gpt2", device)
    engine, prompts = DecodeEngine(model, max_batch_size=2, graphs=False), prompts_of(5, 9)
    for _ in range(2):
        assert tokens_of(engine, prompts, max_new_tokens=12) == references(model, prompts, 12)
        engine.suspend(keep="graphs")
        assert engine.stats.cache_bytes == 0
        engine.resume()


@pytest.mark.parametrize("keep", ["graph", "", None, 1, "all"])
def test_what_cannot_be_kept_is_refused_and_nothing_is_given_back(keep, device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    with pytest.raises(ConfigError, match=rf"keep={keep!r} is not known; choose one of: none, graphs"):
        engine.suspend(keep=keep)
    assert len(tokens_of(engine, prompts_of(5), max_new_tokens=5)[0]) == 5


def test_memory_of_another_kind_says_why_graphs_cannot_stay(monkeypatch):
    def refusing(device, nbytes):
        raise DecodeError("this CUDA driver has no cuMemMap")

    monkeypatch.setattr(module, "_space", refusing)
    engine, prompts = warm(tiny_model("llama", torch.device("cpu"))), prompts_of(5, 9)
    expected, before = tokens_of(engine, prompts, max_new_tokens=12), captures(engine)
    assert isinstance(engine.memory.pages, Ordinary)
    with pytest.raises(DecodeError, match=r"has no cuMemMap\. Use suspend\(\) without keep"):
        engine.suspend(keep="graphs")
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected and captures(engine) == before
    engine.suspend()
    assert engine.stats.cache_bytes == 0
    engine.suspend(keep="graphs")
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected


def test_requests_that_run_are_not_disturbed(device):
    model = tiny_model("llama", device)
    engine, prompts = warm(model), prompts_of(5)
    stream = engine.stream(prompts, max_new_tokens=30)
    first = next(stream).token
    with pytest.raises(DecodeError, match="let them end, or abort them"):
        engine.suspend(keep="graphs")
    assert [first, *(event.token for event in stream)] == reference(model, prompts[0], 30)
    engine.suspend(keep="graphs")


@pytest.mark.parametrize("keep", ["none", "graphs"])
def test_too_little_memory_leaves_the_engine_suspended_for_another_try(keep, fake):
    engine, prompts = warm(tiny_model("llama", torch.device("cpu"))), prompts_of(5, 9)
    expected, before = tokens_of(engine, prompts, max_new_tokens=12), captures(engine)
    engine.suspend(keep)
    fake.free -= (gone := fake.free)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="MiB, which are not free"):
            engine.resume()
        with pytest.raises(DecodeError, match="suspended"):
            engine.generate(prompts)
    fake.free += gone
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected
    assert (captures(engine) == before) == (keep == "graphs")


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemsetD32"])
def test_a_driver_that_fails_leaves_the_engine_suspended_for_another_try(call, fake):
    engine, prompts = warm(tiny_model("llama", torch.device("cpu"))), prompts_of(5, 9)
    expected, before = tokens_of(engine, prompts, max_new_tokens=12), captures(engine)
    engine.suspend(keep="graphs")
    fake.fails[call] = 1
    with pytest.raises(DecodeError, match=call):
        engine.resume()
    assert fake.used == 0
    fake.fails.clear()
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected and captures(engine) == before


def test_memory_that_the_driver_does_not_take_back_stays_in_use(fake):
    engine, prompts = warm(tiny_model("llama", torch.device("cpu"))), prompts_of(5, 9)
    expected = tokens_of(engine, prompts, max_new_tokens=12)
    fake.fails["cuMemUnmap"] = 1
    with pytest.raises(DecodeError, match="cuMemUnmap"):
        engine.suspend(keep="graphs")
    fake.fails.clear()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected


def test_errors_of_late_requests_touch_no_memory(device):
    """A request may arrive while the engine is on its way to be suspended."""
    engine, read = warm(tiny_model("llama", device)), None
    read = engine.requests.read

    def suspending(*given):
        found = read(*given)
        engine.suspend(keep="graphs")
        return found

    engine.requests.read = suspending
    handle = engine.submit([5], max_new_tokens=5)
    engine.requests.read = read
    with pytest.raises(DecodeError, match="suspended"):
        engine.step()
    assert "suspended" in str(handle.error) and not engine.unfinished
    engine.resume()
    assert len(tokens_of(engine, [[5]], max_new_tokens=5)[0]) == 5


@on_a_driver
def test_threads_may_suspend_resume_and_submit_at_any_time(device):
    model = tiny_model("llama", device)
    engine, (prompt,) = warm(model), prompts_of(7)
    expected, before = reference(model, prompt, 10), captures(engine)
    stop, wrong, served, rests = threading.Event(), [], [], []

    def trainer():
        while not stop.is_set():
            try:
                engine.suspend(keep="graphs")
                rests.append(engine.stats.cache_bytes)
                engine.resume()
            except DecodeError as error:
                if "requests are running" not in str(error):
                    wrong.append(error)

    def sampler(loop):
        while len(served) < 60:
            try:
                (done,) = loop.submit(prompt, max_new_tokens=10).wait(timeout=60)
                served.append(done.tokens)
            except DecodeError as error:
                if "suspended" not in str(error):
                    wrong.append(error)

    loop = EngineLoop(engine)
    trainers = [threading.Thread(target=trainer) for _ in range(2)]
    samplers = [threading.Thread(target=sampler, args=(loop,)) for _ in range(2)]
    for thread in (*trainers, *samplers):
        thread.start()
    for thread in samplers:
        thread.join()
    stop.set()
    for thread in trainers:
        thread.join()
    loop.close()
    engine.resume()
    assert not wrong and rests and all(tokens == expected for tokens in served)
    assert tokens_of(engine, [prompt], max_new_tokens=10) == [expected] and captures(engine) == before


@on_a_driver
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_any_order_of_calls_gives_what_an_engine_gives_that_was_never_suspended(seed, device):
    model = tiny_model("qwen3", device)
    engine, plain = (DecodeEngine(model, max_batch_size=2, block_size=8) for _ in range(2))
    draw, resting = random.Random(seed), False
    prompts = prompts_of(20, 5, 40, 12)
    for count in range(25):
        act = draw.choice(["suspend", "keep", "resume", "generate", "generate", "train"])
        if act in ("suspend", "keep"):
            engine.suspend("graphs" if act == "keep" else "none")
            resting = True
        elif act == "resume":
            engine.resume()
            resting = False
        elif act == "train":
            with torch.no_grad():
                model.lm_head.weight.mul_(1.01)
                model.model.layers[0].mlp.up_proj.weight.add_(0.01)
        elif resting:
            with pytest.raises(DecodeError, match="suspended"):
                engine.generate(prompts)
        else:
            given, settings = draw.sample(prompts, 2), {"temperature": draw.choice([0.0, 1.0]), "seed": count}
            settings["max_new_tokens"] = draw.randint(1, 30)
            mine, others = (one.generate(given, **settings) for one in (engine, plain))
            assert [(done.tokens, done.logprobs) for done in mine] == [(done.tokens, done.logprobs) for done in others]
    assert engine.stats.total("failures") == 0


@pytest.mark.gpu
def test_other_tensors_get_the_memory_of_a_suspended_engine():
    model = tiny_model("llama", torch.device("cuda"))
    engine, prompts = DecodeEngine(model, max_batch_size=4, max_seq_len=128, cache_tokens=2**22), prompts_of(5, 9)
    engine.warm_up(progress=False)
    expected, size = tokens_of(engine, prompts, max_new_tokens=12), engine.stats.cache_bytes
    assert not isinstance(engine.memory.pages, Ordinary), engine.memory.pages.reason
    free = torch.cuda.mem_get_info()[0]
    engine.suspend(keep="graphs")
    given = torch.cuda.mem_get_info()[0] - free
    assert given >= size
    taken = torch.ones(torch.cuda.mem_get_info()[0] - size // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        engine.resume()
    del taken  # which stays with PyTorch, until the engine asks for it
    engine.resume()
    assert engine.stats.resume_seconds < 1
    before = captures(engine)
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected and captures(engine) == before
