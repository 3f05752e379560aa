"""Log-probabilities that are the very ones of a forward over whole sequences, whatever the batch."""

import copy
import importlib

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MixtralConfig, MixtralForCausalLM

from graphmod.decode import DecodeEngine, batch_invariant, quantize_weights
from graphmod.errors import ConfigError
from tests.support.decode_models import ARCHITECTURES, ROTARY, prompts_of, tiny_model
from tests.support.sweeps import sweep

LENGTHS, NEW = (3, 17, 20), 5


def model_of(architecture, device):
    """One of those of the other tests, or one whose layers see windows and cap their scores."""
    if architecture != "gemma2":
        return tiny_model(architecture, device)
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**ROTARY, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)).to(device)


def engine_of(model, **settings):
    settings = {"max_batch_size": 3, "max_seq_len": 64, "buckets": [3], "batch_invariant": True} | settings
    return DecodeEngine(model, **settings)


def sampled(engine, prompts, **settings):
    given = {"temperature": 1.0, "max_new_tokens": NEW, "seed": 0, "ignore_eos": True} | settings
    return engine.generate(prompts, **given)


def padded(done, side, device):
    """Tokens, mask and positions of all sequences, each (B, L), and where in them the generated tokens begin."""
    rows = [[*one.prompt, *one.tokens] for one in done]
    length = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), length, dtype=torch.int64, device=device) for _ in range(2))
    begins = []
    for number, row in enumerate(rows):
        at = length - len(row) if side == "left" else 0
        ids[number, at : at + len(row)] = torch.tensor(row, device=device)
        mask[number, at : at + len(row)] = 1
        begins.append(at + len(done[number].prompt))
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0), begins


def scores(model, ids, mask, positions):
    """(B, L - 1) log-probabilities of each next token, as a trainer takes them."""
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


def of_trainer(model, done, side):
    ids, mask, positions, begins = padded(done, side, model.device)
    with torch.no_grad(), batch_invariant(model):
        found = scores(model, ids, mask, positions)
    return [row[begin - 1 : begin - 1 + NEW].tolist() for row, begin in zip(found, begins, strict=True)]


@sweep(architecture=[*ARCHITECTURES, "gemma2"], dtype=[torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_a_forward_over_whole_sequences(architecture, dtype, device):
    model = model_of(architecture, device).to(dtype)
    engine = engine_of(model)
    done = sampled(engine, prompts_of(*LENGTHS))
    assert engine.stats.total("launches") and not engine.stats.total("failures")
    told = [one.logprobs for one in done]
    assert of_trainer(model, done, "left") == told and of_trainer(model, done, "right") == told
    alone = [of_trainer(model, [one], "right")[0] for one in done]
    assert alone == told


@pytest.mark.parametrize(
    "settings",
    [{"graphs": False}, {"prefill_tokens": 16}, {"max_batch_size": 2}, {"block_size": 16, "buckets": None}],
    ids=["eager", "pieces", "waiting", "blocks"],
)
def test_they_do_not_depend_on_how_the_engine_works(settings, device):
    model = tiny_model("llama", device).bfloat16()
    expected = sampled(engine_of(model), prompts_of(*LENGTHS), top_logprobs=2, prompt_logprobs=1)
    found = sampled(engine_of(model, **settings), prompts_of(*LENGTHS), top_logprobs=2, prompt_logprobs=1)
    assert found == expected


def test_a_beginning_that_is_in_the_cache_has_the_same_numbers(device):
    model = tiny_model("qwen3", device).bfloat16()
    engine = engine_of(model, block_size=16, keep_prefixes=True)
    (prompt,) = prompts_of(20)
    first, second = (sampled(engine, [prompt])[0] for _ in range(2))
    assert engine.stats.prefix_tokens and first.logprobs == second.logprobs and first.tokens == second.tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_gradients_are_those_of_the_model_and_it_stays_as_it_was(architecture, device):
    torch.manual_seed(0)
    model = model_of(architecture, device).eval()
    other = copy.deepcopy(model)
    ids = torch.randint(0, model.config.vocab_size, (3, 24), device=device)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    before = model.config._attn_implementation
    with batch_invariant(model):
        own = scores(model, ids, mask, (mask.cumsum(1) - 1).clamp(min=0))
    assert model.config._attn_implementation == before
    plain = scores(other, ids, mask, (mask.cumsum(1) - 1).clamp(min=0))
    seen = mask[:, :-1].bool()
    torch.testing.assert_close(own[seen], plain[seen], rtol=1e-4, atol=1e-4)
    own[seen].sum().backward()
    plain[seen].sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=lambda told, name=name: name + told
        )


def test_a_backward_within_it_has_those_gradients_too(device):
    model = model_of("gemma2", device).train()
    ids = torch.randint(0, model.config.vocab_size, (2, 20), device=device)
    found = []
    for within in (True, False):
        with batch_invariant(model):
            loss = scores(model, ids, torch.ones_like(ids), torch.arange(20, device=device).expand(2, 20)).sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_other_lengths_and_contents_beside_a_row_change_nothing(device):
    model = tiny_model("llama", device).bfloat16()
    row = torch.randint(0, model.config.vocab_size, (1, 19), device=device)
    found = []
    for others, more in ((0, 0), (1, 13), (3, 20)):
        ids = torch.randint(0, model.config.vocab_size, (1 + others, 19 + more), device=device)
        ids[0, :19] = row
        with torch.no_grad(), batch_invariant(model):
            found.append(model(ids, use_cache=False).logits[0, :19])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def logits_of(model, ids, **given):
    with torch.no_grad(), batch_invariant(model):
        return model(ids, use_cache=False, **given).logits


@pytest.fixture
def llama(device):
    return tiny_model("llama", device)


@pytest.fixture
def ids(device):
    torch.manual_seed(0)
    return torch.randint(0, 96, (2, 40), device=device)


def test_it_may_be_entered_within_itself_and_around_an_engine(llama, ids):
    before = llama.config._attn_implementation
    expected, own = logits_of(llama, ids), batch_invariant(llama)
    with own:
        with own:
            assert torch.equal(logits_of(llama, ids), expected)
        done = sampled(engine_of(llama), prompts_of(*LENGTHS))
        with torch.no_grad():
            assert torch.equal(llama(ids, use_cache=False).logits, expected)
    assert of_trainer(llama, done, "left") == [one.logprobs for one in done]
    assert llama.config._attn_implementation == before


def test_a_mask_that_is_added_says_what_a_token_sees(llama, ids):
    seen = torch.ones(40, 40, dtype=torch.bool, device=ids.device).tril().expand(2, 1, 40, 40)
    added = torch.zeros(seen.shape, device=ids.device).masked_fill(~seen, float("-inf"))
    expected = logits_of(llama, ids)
    assert torch.equal(logits_of(llama, ids, attention_mask=seen), expected)
    assert torch.equal(logits_of(llama, ids, attention_mask=added), expected)
    for given, said in ((added - 0.5, "takes no biases"), (seen.long(), "of bool or float")):
        with pytest.raises(ConfigError, match=said):
            logits_of(llama, ids, attention_mask=given)


def test_rows_with_holes_or_several_sequences_are_refused(llama, ids):
    holes = torch.ones_like(ids)
    holes[:, 5] = 0
    with pytest.raises(ConfigError, match="a mask hides tokens between others"):
        logits_of(llama, ids, attention_mask=holes)
    packed = torch.cat([torch.arange(13), torch.arange(27)]).to(ids.device).expand(2, 40)
    with pytest.raises(ConfigError, match="several are packed into one"):
        logits_of(llama, ids, position_ids=packed)


def test_rows_that_go_on_from_a_cache_are_padded_on_the_right(llama, ids):
    expected, mask = logits_of(llama, ids), torch.ones_like(ids)
    with torch.no_grad(), batch_invariant(llama):
        cache = llama(ids[:, :30], use_cache=True).past_key_values
        assert torch.equal(llama(ids[:, 30:], past_key_values=cache).logits, expected[:, 30:])
        mask[0, :3] = 0
        cache = llama(ids[:, :30], attention_mask=mask[:, :30], use_cache=True).past_key_values
        with pytest.raises(ConfigError, match="rows that go on from a cache have no padding before them"):
            llama(ids[:, 30:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_what_a_backward_after_it_computes_again_is_as_it_was(reentrant, llama, ids):
    other = copy.deepcopy(llama)
    llama.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    layer = llama.model.layers[0]
    before = layer._gradient_checkpointing_func
    with batch_invariant(llama):
        own = llama(ids, use_cache=False).logits.log_softmax(-1).sum()
    assert layer._gradient_checkpointing_func is before
    own.backward()
    other(ids, use_cache=False).logits.log_softmax(-1).sum().backward()
    for mine, theirs in zip(llama.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_under_autocast_they_are_those_of_a_forward_under_autocast(architecture, device):
    model = tiny_model(architecture, device)
    engine = engine_of(model)
    with torch.autocast(device.type, torch.bfloat16):
        done = sampled(engine, prompts_of(*LENGTHS))
        assert of_trainer(model, done, "left") == [one.logprobs for one in done]


def test_sizes_that_fill_no_vector_change_nothing(device):
    torch.manual_seed(0)
    sizes = ROTARY | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "intermediate_size": 1030}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes)).to(device).eval()
    done = sampled(engine_of(model), prompts_of(*LENGTHS))
    assert of_trainer(model, done, "left") == [one.logprobs for one in done]


def test_numbers_without_dimensions_or_of_fp64_are_reduced_as_ever(llama, device):
    one, none, many = torch.ones((), device=device), torch.ones(3, 0, device=device), torch.rand(3, 70, device=device)
    exact, half = many.double(), many.bfloat16() * 30
    with batch_invariant(llama):
        assert one.mean(0) == 1 and one.log_softmax(0) == 0 and one.logsumexp(0) == 1
        assert none.mean(-1).isnan().all() and (none.logsumexp(-1) == float("-inf")).all()
        found = exact.mean(-1), half.log_softmax(-1)
    torch.testing.assert_close(found[0], exact.mean(-1), rtol=1e-14, atol=0)
    # Of which torch's own is off by more than bfloat16 has to be.
    torch.testing.assert_close(found[1].float(), half.float().log_softmax(-1), rtol=2**-8, atol=0)


def test_other_forms_of_products_are_refused(llama, device):
    matrix = torch.ones(2, 2, device=device)
    with batch_invariant(llama):
        for act in (
            lambda: torch.mm(matrix, matrix, out=matrix.clone()),
            lambda: matrix.clone().addmm_(matrix, matrix),
        ):
            with pytest.raises(ConfigError, match="cannot be computed"):
                act()


def test_it_is_for_a_transformers_model():
    with pytest.raises(ConfigError, match="needs a transformers model, and got Linear"):
        batch_invariant(torch.nn.Linear(2, 2))


@pytest.mark.gpu
def test_more_rows_than_one_launch_has():
    device = torch.device("cuda")
    kernels = importlib.import_module("graphmod.decode.kernels")
    rows, (keys, values) = kernels._MOST_ROWS + 5, torch.randn(2, 4, 16, 1, 16, device=device, dtype=torch.bfloat16)
    query = torch.randn(rows, 2, 1, 16, device=device, dtype=torch.bfloat16)
    table = torch.arange(4, device=device).repeat(rows, 1)
    context = torch.full((rows,), 60, device=device)
    for first in (None, context - 8):

        def attended(part, first=first):
            start = None if first is None else first[part]
            own = query[part], keys, values, table[part], context[part], start, None, context, 0.25, None, 16
            return torch.ops.graphmod.triton_decode(*own)

        whole = attended(slice(None))
        assert torch.equal(whole[-20:], attended(slice(-20, None))) and len(whole) == rows


@pytest.mark.gpu
def test_products_of_numbers_that_lie_far_apart():
    device = torch.device("cuda")
    length, columns = 8200, 2**18 + 16
    wide = torch.zeros(length, columns, device=device, dtype=torch.bfloat16)
    wide[:, -8:] = torch.randn(length, 8, device=device)
    right = torch.randn(length, 8, device=device, dtype=torch.bfloat16)
    importlib.import_module("graphmod.decode.kernels")
    found = torch.ops.graphmod.invariant_product(wide.t()[-8:], right, None)
    torch.testing.assert_close(found, wide[:, -8:].t().contiguous() @ right, rtol=2e-2, atol=1)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "change, settings, said",
    [
        (None, {"compile": "default"}, "cannot be used with compile=default"),
        (None, {"attention": "sdpa"}, "attention=sdpa names another; use attention=auto"),
        (None, {"max_adapters": 1}, "cannot be used with max_adapters=1.*the PEFT model itself"),
        (None, {"block_size": 8}, "a block_size that 16 divides, got 8"),
        (lambda model: quantize_weights(model, "int8"), {}, "graphmod::scaled_linear cannot be computed"),
    ],
    ids=["compile", "attention", "adapters", "block_size", "weights"],
)
def test_what_depends_on_the_batch_is_refused(change, settings, said):
    model = tiny_model("llama", torch.device("cpu"))
    if change is not None:
        change(model)
    with pytest.raises(ConfigError, match=said):
        engine_of(model, **settings)


def test_grouped_experts_are_refused_by_name(device):
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 1, "num_local_experts": 4, "vocab_size": 97}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).to(device).eval()
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ConfigError, match=r"aten::_grouped_mm cannot be computed.*dense model"):
        engine_of(model)
