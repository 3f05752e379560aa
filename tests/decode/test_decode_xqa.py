"""FlashInfer's kernel as a decode attention: when it is refused, what it is given, and, on a GPU, what it computes."""

import importlib.metadata
import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod.decode import DecodeEngine, attention
from graphmod.decode.attention import IMPLEMENTATIONS, paged_sdpa
from graphmod.decode.cache import CacheView, PagedCache, uniform
from graphmod.decode.types import AttentionName
from graphmod.errors import ConfigError
from graphmod.trace.dispatch import hidden
from tests.decode.test_decode_attention import KV_HEADS, WIDTH, Layer, attend, filled, plain
from tests.support.decode_models import prompts_of, reference, tiny_model


def cache(**changes):
    """What `unavailable` looks at: a cache the kernel would take, but for the changes."""
    wanted = {"dtype": torch.bfloat16, "block_size": 64, "device": torch.device("cuda")}
    sizes = {"heads": 32, "kv_heads": 8, "width": 128} | changes
    layers = uniform(sizes.pop("heads"), sizes.pop("kv_heads"), sizes.pop("width"), 2)
    return SimpleNamespace(**wanted | {"layers": layers} | sizes)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "needs a GPU"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16, and the model has torch.float32"),
        ({"block_size": 8}, "block_size=8 is not one of 16, 32, 64, 128"),
        ({"block_size": 256}, "block_size=256"),
        ({"width": 40}, "heads of 40"),
        ({"width": 288}, "heads of 288"),
        ({"heads": 71, "kv_heads": 1}, "71 query heads"),
        ({"heads": 12}, "12 query heads"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_the_reason(hopper, changes, reason):
    assert reason in attention.xqa_unavailable(cache(**changes))


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "compute capability 9.x" in attention.xqa_unavailable(cache())


def test_a_missing_package_and_an_old_one_are_told_apart(hopper, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "not installed (pip install" in attention.xqa_unavailable(cache())
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.1")
    assert "FlashInfer 0.6.1 is older than" in attention.xqa_unavailable(cache())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.18.post1")
    assert attention.xqa_unavailable(cache()) is None


def test_an_engine_without_a_gpu_says_so():
    with pytest.raises(
        ConfigError, match=r"attention=flashinfer cannot be used: it needs a GPU.*use auto, or: sdpa, own$"
    ):
        DecodeEngine(tiny_model("llama", torch.device("cpu")), attention="flashinfer")


def test_what_fails_while_the_kernel_is_loaded_becomes_the_reason(monkeypatch):
    memory = cache(device=torch.device("cpu"))
    output = "Ninja build failed\nnvcc -c mha.cu\nmha.cu(1): error: no such thing\nninja: stopped"

    def broken():
        raise RuntimeError(output)

    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode())
    monkeypatch.setattr(attention, "_kernel", broken)
    assert (
        attention.prepare_xqa(memory) == "FlashInfer does not run here: RuntimeError: mha.cu(1): error: no such thing"
    )
    monkeypatch.setattr(attention, "_kernel", lambda: lambda q, k_cache: None)
    assert "does not take enable_pdl, num_kv_heads, output" in attention.prepare_xqa(memory)


def stand_in(q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, **settings):
    """Computes what the kernel is documented to, from the arguments and layouts that it is documented to take."""
    rows, beams, heads, width = q.shape
    _, size, kv_heads, _ = k_cache.shape
    assert beams == 1 and q.is_contiguous() and k_cache.is_contiguous() and page_table.is_contiguous()
    assert seq_lens.dtype == semaphores.dtype == torch.uint32 and page_table.dtype == torch.int32
    assert seq_lens.shape == (rows, 1) and semaphores.numel() >= rows * kv_heads
    assert (settings["num_kv_heads"], settings["page_size"]) == (kv_heads, size)
    with hidden():  # a kernel reads them on the GPU, which is no read on the host
        lengths = seq_lens.view(torch.int32)[:, 0].tolist()
    for row, length in enumerate(lengths):
        assert length > 0
        pages = page_table[row, : -(-length // size)].long()
        keys, values = (
            held[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1)
            for held in (k_cache, v_cache)
        )
        weights = torch.einsum("hd,thd->ht", q[row, 0].float(), keys) * settings["q_scale"] / math.sqrt(width)
        output[row, 0] = torch.einsum("ht,thd->hd", weights.softmax(-1), values)


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in for the kernel, which runs without a GPU."""
    monkeypatch.setattr(attention, "_kernel", lambda: stand_in)
    monkeypatch.setattr(attention, "_processors", lambda _: 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_given_what_it_takes(kernel, dtype):
    memory, table, context, query = filled(16, torch.device("cpu"), dtype)
    memory.scratch["xqa"] = attention.xqa_scratch(memory, 8)
    got = attend(attention.paged_xqa, memory, table, context, query, None)
    torch.testing.assert_close(got.double(), plain(memory, table, context, query), rtol=0, atol=2e-2)
    context[1] = 0
    again = attend(attention.paged_xqa, memory, table, context, query, None)
    assert again.isfinite().all() and torch.equal(again[[0, 2, 3]], got[[0, 2, 3]])


def test_compiled_steps_store_keys_in_place_and_convert_the_block_table_once(kernel):
    memory, table, context, query = filled(16, torch.device("cpu"), torch.bfloat16)
    memory.scratch["xqa"] = attention.xqa_scratch(memory, 8)
    layers = [SimpleNamespace(layer_idx=0), SimpleNamespace(layer_idx=1)]

    def step(query, table, context, key):
        view = CacheView(memory, torch.arange(4) + 20, table, context, None)
        for layer in layers:
            view.update(key, key * 2, layer.layer_idx)
            query = attention.paged_xqa(layer, query, cache_view=view)[0].transpose(1, 2) * 1.5
        return query

    key = torch.randn(4, KV_HEADS, 1, WIDTH).bfloat16()
    # The code is to be written anew; its C++ may have been compiled before, which takes most of the time.
    with torch.inference_mode(), torch._inductor.config.patch(fx_graph_cache=False):
        expected = step(query, table, context, key)
        compiled = torch.compile(step, dynamic=False, fullgraph=True)
        got, (code,) = run_and_get_code(compiled, query, table, context, key)
    torch.testing.assert_close(got, expected)
    cache_size = "({}, {}, {}, {})".format(*memory.keys[0].shape)
    assert f"empty_strided_cpu({cache_size}" not in code, "no copy of the cache"
    taken = [line for line in code.splitlines() if "empty_strided_cpu(" in line and "torch.int32" in line]
    assert len(taken) == 2, "block table and contexts, for both layers"


def test_an_engine_with_it_decodes_the_tokens_of_generate(kernel, monkeypatch):
    model = tiny_model("llama", torch.device("cpu"))

    def prepare(memory):
        memory.scratch["xqa"] = attention.xqa_scratch(memory, 8)

    found = IMPLEMENTATIONS[AttentionName.flashinfer]._replace(unavailable=lambda _: None, prepare=prepare)
    monkeypatch.setitem(IMPLEMENTATIONS, AttentionName.flashinfer, found)
    engine = DecodeEngine(model, max_batch_size=4, block_size=16, attention="flashinfer")
    prompts = prompts_of(5, 20, 33)
    for _ in range(2):
        for prompt, done in zip(prompts, engine.generate(prompts, max_new_tokens=30), strict=True):
            assert done.tokens == reference(model, prompt, 30)
        engine.suspend()
        engine.resume()
    assert engine.stats.total("failures") == 0 and engine.stats.total("recaptures") == 0


def gpu_cache(heads, kv_heads, width, block_size, rows, tokens, dtype=torch.bfloat16):
    """A prepared cache of random numbers, a scattered block table for `tokens` tokens a row, and queries."""
    device, table = torch.device("cuda"), -(-tokens // block_size)
    memory = PagedCache(uniform(heads, kv_heads, width, 2), rows * table, block_size, rows, dtype, device)
    reason = attention.xqa_unavailable(memory) or attention.prepare_xqa(memory)
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    for tensor in (*memory.keys, *memory.values):
        tensor[memory.first_block :].normal_()
    order = torch.randperm(rows * table, device=device) + memory.first_block
    return memory, order.view(rows, table), torch.randn(rows, heads, 1, width, device=device, dtype=dtype)


def compare(memory, table, context, query, visited):
    got = on_gpu(attention.paged_xqa, memory, table, context, query, None)
    # In float32: SDPA in bf16 rounds the weights, too, and is no better reference than what it is to judge.
    wide = PagedCache.__new__(PagedCache)
    keys, values = ([held.float() for held in both] for both in (memory.keys, memory.values))
    wide.__dict__.update(memory.__dict__, keys=keys, values=values)
    expected = on_gpu(paged_sdpa, wide, table, context, query.float(), visited)
    some = context > 0
    torch.testing.assert_close(got[some].float(), expected[some], rtol=2e-2, atol=2e-2)
    assert got.isfinite().all()
    return got


def on_gpu(function, memory, table, context, query, visited):
    with torch.inference_mode():
        view = CacheView(memory, table.new_zeros(len(table)), table, context, visited)
        return function(Layer, query, None, None, None, 1 / math.sqrt(query.shape[-1]), cache_view=view)[0]


# Query heads, KV heads, head_dim, block_size. FlashInfer compiles a kernel for each, so there are few.
SHAPES = [
    (32, 8, 128, 16),
    (32, 8, 128, 64),
    (32, 8, 128, 128),
    (16, 8, 128, 64),
    (8, 8, 64, 64),
    (14, 2, 64, 16),
    (8, 4, 80, 128),
    (8, 1, 256, 64),
    (4, 2, 16, 16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width", "block_size"), SHAPES)
def test_the_kernel_agrees_with_the_reference(heads, kv_heads, width, block_size):
    tokens = 2048  # several parts a row, most of them empty where the context is short
    lengths = [1, 0, block_size - 1, block_size, block_size + 1, 255, 256, 257, 0, 700, 2047, 2048]
    memory, table, query = gpu_cache(heads, kv_heads, width, block_size, len(lengths), tokens)
    for rows in (len(lengths), 5, 1):
        context = torch.tensor(lengths[-rows:], device="cuda")
        compare(memory, table[:rows], context, query[:rows], tokens)
    assert not memory.scratch["xqa"][1].any(), "semaphores are as they were found"


@pytest.mark.gpu
def test_half_precision_and_large_batches_agree_too():
    memory, table, query = gpu_cache(16, 8, 128, 64, 130, 1024, torch.float16)
    context = torch.arange(130, device="cuda") * 7 % 1025
    compare(memory, table, context, query, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_follows_contexts_that_change(compiled):
    memory, table, query = gpu_cache(32, 8, 128, 64, 4, 1024)
    context = torch.tensor([1, 64, 65, 1000], device="cuda")

    def call(query, table, context):
        view = CacheView(memory, table.new_zeros(4), table, context, None)
        return attention.paged_xqa(Layer, query, cache_view=view)[0] * 1

    run = torch.compile(call, dynamic=False, fullgraph=True) if compiled else call
    with torch.inference_mode():
        run(query, table, context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(query, table, context)
    for lengths in ([1, 64, 65, 1000], [0, 128, 513, 1024], [1024, 1, 0, 256], [2, 65, 66, 1001]):
        context.copy_(torch.tensor(lengths))
        for _ in range(3):
            graph.replay()
        assert torch.equal(got, compare(memory, table, context, query, 1024)), "the same kernel, so the same bits"


@pytest.mark.gpu
def test_a_row_has_the_same_bits_whatever_the_other_rows_hold():
    """In a batch of one size, where each row is divided into as many parts; another size may divide it otherwise."""
    memory, table, query = gpu_cache(32, 8, 128, 64, 4, 2048)
    context = torch.tensor([1500, 3, 0, 2048], device="cuda")
    first = on_gpu(attention.paged_xqa, memory, table, context, query, None)
    for lengths in ([1500, 2048, 2048, 1], [1500, 0, 0, 0]):
        context.copy_(torch.tensor(lengths))
        query[1:].normal_()
        for _ in range(20):
            assert torch.equal(on_gpu(attention.paged_xqa, memory, table, context, query, None)[0], first[0])


def small_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "default"])
def test_an_engine_gives_a_request_the_same_bits_in_any_company_of_that_size(mode):
    """In batches and prefills of one shape: bf16 products of another shape round otherwise, with every attention."""
    model = small_model()
    try:
        engine = DecodeEngine(model, max_batch_size=4, attention="flashinfer", compile=mode, buckets=[4])
    except ConfigError as error:
        pytest.skip(str(error))
    lengths = (9, 70, 130, 300)
    first, *_ = together = engine.generate(prompts_of(*lengths), max_new_tokens=90)
    others = prompts_of(*lengths, seed=2)
    other, *_ = engine.generate([first.prompt, *others[1:]], max_new_tokens=90)
    assert (other.tokens, other.logprobs) == (first.tokens, first.logprobs)
    engine.suspend()
    engine.resume()
    again = engine.generate(prompts_of(*lengths), max_new_tokens=90)
    assert [(done.tokens, done.logprobs) for done in again] == [(done.tokens, done.logprobs) for done in together]
    assert engine.stats.total("failures") == 0 and engine.stats.total("captures") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "default"])
def test_an_engine_with_it_computes_the_log_probabilities_of_one_forward_pass(mode):
    model = small_model()
    try:
        engine = DecodeEngine(model, max_batch_size=2, attention="flashinfer", compile=mode, buckets=[2])
    except ConfigError as error:
        pytest.skip(str(error))
    for prompt, done in zip((found := prompts_of(60, 200)), engine.generate(found, max_new_tokens=80), strict=True):
        whole = torch.tensor([prompt + done.tokens], device="cuda")
        with torch.inference_mode():
            logits = model(whole).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(1, whole[0, len(prompt) :, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=0.1)
