"""Attention that is told where packed documents begin computes what a mask does, in graphs as in eager."""

import numpy as np
import pytest
import torch
from torch import nn

from graphmod.cli.app import parse
from graphmod.errors import ConfigError
from graphmod.trace import recorder
from graphmod.train import attention as varlen
from graphmod.train import batches as sampling
from graphmod.train.batches import choose_attention, document_bounds, most_documents, packed_next_token_loss
from graphmod.train.model import build_model, model_config
from graphmod.train.resume import decisive_settings
from graphmod.train.run import train
from graphmod.train.settings import PackingAttention, Precision, plain_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SCOPES = ["per_layer", "full_iteration"]


def reference(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """What `varlen_attn` computes, with a mask over all tokens at once."""
    assert window_size == (-1, 0) and cu_seq_q is cu_seq_k and cu_seq_q.dtype is torch.int32
    assert query.dtype is key.dtype is value.dtype and query.dim() == 3
    assert enable_gqa is (query.shape[1] != key.shape[1])
    index = torch.arange(query.shape[0], device=query.device)
    document = torch.searchsorted(cu_seq_q[1:].contiguous(), index, right=True)
    seen = (document[:, None] == document[None, :]) & (index[:, None] >= index[None, :])
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
    return out[0].transpose(0, 1).contiguous()


@pytest.fixture
def stand_in(monkeypatch):
    """Lets the CPU use varlen attention; a list of the dtypes and bounds it was given."""
    given = []

    def noting(*args, **kwargs):
        if not torch.compiler.is_compiling():
            given.append((args[0].dtype, args[3]))
        return reference(*args, **kwargs)

    # What it notes is nothing that a step reads: code of the package's own, for the guards.
    noting.__code__ = noting.__code__.replace(co_filename=recorder.__file__)
    monkeypatch.setattr(varlen, "varlen_attn", noting)
    monkeypatch.setattr("graphmod.train.attention.unavailable", lambda *args: None)
    return given


@pytest.fixture
def lines(tiny, tmp_path):
    """`lines("graph=none")`: a packed run on a text whose lines, of 2 to 40 bytes, are the documents."""
    path = tmp_path / "lines.txt"
    rng = np.random.default_rng(0)
    path.write_text("\n".join("abcdefgh"[n % 8] * int(rng.integers(2, 41)) for n in range(400)))
    packed = ["data=text", f"data.path={path}", "data.documents=line", "data.packing=true", "train.steps=16"]
    return lambda *overrides: tiny(*packed, *overrides)


def test_bounds_have_one_size_and_end_where_the_tokens_end():
    documents = torch.tensor([[0, 0, 1, 1, 4], [4, 4, 4, 4, 4]])
    bounds = document_bounds(documents, most=4)
    assert bounds.tolist() == [0, 2, 4, 5, 10, 10, 10, 10, 10] and bounds.dtype is torch.int32
    assert document_bounds(torch.arange(6)[None], most=6).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [1, 2, 7, 50])
def test_no_window_has_more_documents_than_were_counted(seed, length):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (30,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    numbers = torch.repeat_interleave(torch.arange(30), lengths)
    windows = numbers.unfold(0, length, 1) if length <= len(numbers) else numbers[None]
    most = max(len(window.unique()) for window in windows)
    assert most <= most_documents(starts, length) <= most + 1


@pytest.mark.parametrize("name", ["llama_tiny", "qwen3_0_6b", "gpt2_tiny"])
def test_it_computes_what_a_mask_does(tiny, stand_in, name):
    more = {"gpt2_tiny": ["model.dropout=0"], "qwen3_0_6b": ["model.kv_heads=1", "model.head_dim=8"]}
    config = tiny(f"model={name}", *more.get(name, ["model.kv_heads=1"]))
    net = build_model(config.model, model_config(config.model, 256, 24), Precision.fp32, CPU, 0)
    numbers = torch.stack([torch.arange(25) // 7, torch.arange(25) // 3])
    rows = torch.cat([torch.randint(0, 256, (2, 25)), numbers])
    found = []
    for most in (None, 9):
        loss = packed_next_token_loss(net, rows, most)
        found.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
    assert len(stand_in) == config.model.layers
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "more, scope",
    [
        *((["train.precision=bf16_mixed"], "per_layer"), ([], "full_iteration")),
        pytest.param(["train.precision=bf16_mixed"], "full_iteration", marks=pytest.mark.slow),
        pytest.param([], "per_layer", marks=pytest.mark.slow),
        pytest.param(["graph.compile=default"], "full_iteration", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_have_the_losses_of_eager(lines, tmp_path, stand_in, scope, more):
    settings = ["data.packing_attention=varlen", "train.eval_every=6", "train.eval_batches=2", *more]
    plain = train(lines(*settings, "graph=none"), tmp_path / "none")
    graphed = train(lines(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses
    assert graphed.graph["failures"] == 0 and graphed.graph["state"] == "captured"
    masked = train(lines("data.packing_attention=mask", *settings[1:], f"graph={scope}"), tmp_path / "mask")
    ours, theirs = (result.losses for result in (graphed, masked))
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_under_autocast_it_gets_16_bits_from_rotary_embeddings_too(lines, tmp_path, stand_in):
    train(lines("train.precision=bf16_mixed", "graph=none", "train.steps=1"), tmp_path)
    assert stand_in and all(dtype is torch.bfloat16 for dtype, _ in stand_in)
    assert len({bounds.shape for _, bounds in stand_in}) == 1


def test_the_cpu_keeps_the_mask(lines, tmp_path):
    auto = train(lines("graph=none"), tmp_path / "auto")
    mask = train(lines("graph=none", "data.packing_attention=mask"), tmp_path / "mask")
    assert auto.losses == mask.losses


def test_what_cannot_be_is_an_error_before_the_run(lines, tiny):
    with pytest.raises(ConfigError, match=r"varlen cannot be used: it needs a GPU; use mask, or auto"):
        lines("data.packing_attention=varlen")
    with pytest.raises(ConfigError, match=r"packing_attention=mask needs data.packing=true"):
        tiny("data.packing_attention=mask")
    with pytest.raises(ConfigError, match=r"packing_attention.*auto, mask, varlen"):
        parse({"data": {"packing_attention": "flash"}})


@pytest.mark.parametrize(
    ("capability", "precision", "dims", "reason"),
    [
        ((9, 0), Precision.bf16_mixed, {}, None),
        ((7, 5), Precision.bf16_mixed, {}, "this one has 7.5"),
        ((9, 0), Precision.fp32, {}, "train.precision=fp32"),
        ((9, 0), Precision.bf16, {"attention_dropout": 0.1}, "the model's attention does"),
        ((9, 0), Precision.bf16, {"hidden_size": 24}, "the model's have 12"),
    ],
)
def test_where_it_cannot_be_used_auto_takes_the_mask_and_says_why(
    monkeypatch, capability, precision, dims, reason, caplog
):
    from transformers import LlamaConfig

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = LlamaConfig(**{"hidden_size": 64, "num_attention_heads": 2, **dims})
    wanted = choose_attention(PackingAttention.auto, CUDA, precision, config)
    assert wanted is (PackingAttention.varlen if reason is None else PackingAttention.mask)
    if reason is not None:
        with pytest.raises(ConfigError, match=reason):
            choose_attention(PackingAttention.varlen, CUDA, precision, config)


def test_resuming_asks_for_the_same_attention_only_where_documents_are_packed(lines, tiny):
    packed, plain = (decisive_settings(plain_config(config), "cpu") for config in (lines(), tiny()))
    assert packed["data.packing_attention"] == "auto" and "data.packing_attention" not in plain


def test_dropout_in_the_call_is_an_error():
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ConfigError, match="has no dropout"):
        varlen.within_documents(x, x, x, torch.tensor([0, 4]), None, 0.1)


GRAPHS = ["graph=per_layer", "graph=full_iteration", "graph=full_iteration graph.compile=default"]
GPU = ["train.device=cuda", "train.deterministic=true", "model.hidden_size=64"]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_on_a_gpu_the_kernel_computes_what_the_reference_does(kv_heads):
    torch.manual_seed(0)
    query = torch.randn(2, 2, 24, 32, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, 24, 32, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    documents = torch.stack([torch.arange(24) // 7, torch.arange(24) // 3]).to(CUDA)
    bounds = document_bounds(documents, most=11)  # more than there are
    found = []
    for attend in (varlen.varlen_attn, reference):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varlen, "varlen_attn", attend)
            out = varlen.within_documents(query, key, value, bounds, 0.2, 0.0)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))])
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16", "fp16_mixed"])
# Layers compiled one by one round differently from the whole.
@pytest.mark.parametrize("graph", GRAPHS)
def test_on_a_gpu_graphs_have_the_losses_of_eager(lines, tmp_path, monkeypatch, graph, precision):
    taken = []

    def choose(*arguments):
        taken.append(choose_attention(*arguments))
        return taken[-1]

    monkeypatch.setattr(sampling, "choose_attention", choose)
    graph, *compiled = graph.split()
    settings = [*GPU, *compiled, f"train.precision={precision}", "train.eval_every=6", "train.eval_batches=2"]
    plain = train(lines(*settings, "data.packing_attention=varlen", "graph=none"), tmp_path / "none")
    graphed = train(lines(*settings, graph), tmp_path / "graph")  # auto takes it
    assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses
    assert graphed.graph["failures"] == 0 and graphed.graph["state"] == "captured"
    assert set(taken) == {PackingAttention.varlen}
    taken.clear()
    masked = train(lines(*settings, "data.packing_attention=mask", graph), tmp_path / "mask")
    assert set(taken) == {PackingAttention.mask}
    ours, theirs = (result.losses for result in (graphed, masked))
    if graphed.skipped_steps != masked.skipped_steps:  # a gradient overflowed in one alone, which updates once less
        assert precision == "fp16_mixed", (graphed.skipped_steps, masked.skipped_steps)
        ours, theirs = ours[:2], theirs[:2]
    assert ours == pytest.approx(theirs, rel=2e-2)


@pytest.mark.gpu
def test_on_a_gpu_float32_keeps_the_mask(lines, tmp_path):
    auto = train(lines(*GPU, "graph=none"), tmp_path / "auto")
    mask = train(lines(*GPU, "graph=none", "data.packing_attention=mask"), tmp_path / "mask")
    assert auto.losses == mask.losses
    with pytest.raises(ConfigError, match="precision=fp32"):
        lines(*GPU, "data.packing_attention=varlen")
