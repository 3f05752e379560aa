"""Rollouts of TRL's trainers from an engine over the weights that they train."""

import sys

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, ProcessorMixin

from graphmod.decode import DecodeError, use_decode_engine
from graphmod.errors import ConfigError
from tests.support.made_tokenizers import llama_like

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

TRAINERS = ["GRPO", "RLOO"]
PROMPTS, SAMPLES, LENGTH = 2, 2, 6


@pytest.fixture(autouse=True)
def without_global_state():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def tokenizer():
    return llama_like(["one two three four five six"], vocabulary=280)


def policy(tokenizer, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def trained(kind, model, tokenizer, folder, **settings):
    """A trainer of three steps, each with a rollout."""
    given = {"learning_rate": 1e-2, "beta": 0.0, "bf16": False, "max_completion_length": LENGTH} | settings
    arguments = getattr(trl, f"{kind}Config")(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=model.device.type == "cpu",
        **given,
    )
    prompts = [{"prompt": text} for text in ("one", "two three", "four five six", "six one", "two", "three four")]
    return getattr(trl, f"{kind}Trainer")(
        model,
        lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer,
    )


def watched(trainer, look):
    """Has `look(prompts, completions)` called after each rollout."""
    sample = trainer._generate_single_turn

    def seen(prompts, *args, **kwargs):
        found = sample(prompts, *args, **kwargs)
        look(prompts, found)
        return found

    trainer._generate_single_turn = seen


def logits_of(trainer, prompt, tokens):
    """Of the places of `tokens`, as the trainer's own model gives them at this moment."""
    ids = torch.tensor([[*prompt, *tokens]], device=trainer.model.device)
    with torch.no_grad(), trainer.accelerator.autocast():
        return trainer.model(ids).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "dtype, bf16, close", [("float32", False, 1e-5), ("float32", True, 0.06), ("bfloat16", True, 0.06)]
)
def test_log_probabilities_are_those_of_the_trainers_own_forward(dtype, bf16, close, temperature, tokenizer, tmp_path):
    model = policy(tokenizer, getattr(torch, dtype))
    trainer = trained("GRPO", model, tokenizer, tmp_path, bf16=bf16, temperature=temperature, learning_rate=1e-3)
    errors = []
    use_decode_engine(trainer, max_seq_len=64)

    def look(prompts, found):
        for prompt, tokens, told in zip(prompts, *found, strict=True):
            own = (logits_of(trainer, prompt, tokens) / temperature).log_softmax(-1).cpu()
            errors.extend((own.gather(1, torch.tensor(tokens)[:, None])[:, 0] - torch.tensor(told)).abs().tolist())

    watched(trainer, look)
    trainer.train()
    assert len(errors) > 3 * PROMPTS * SAMPLES and max(errors) < close


@pytest.mark.parametrize("kind", TRAINERS)
def test_rollouts_are_what_generate_makes_of_the_weights_of_that_moment(kind, tokenizer, tmp_path):
    model = policy(tokenizer)
    first = model.generate(torch.tensor([tokenizer("one")["input_ids"]]), max_new_tokens=LENGTH, do_sample=False)[0]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, int(first[-3])]  # so that some end early
    trainer = trained(kind, model, tokenizer, tmp_path, generation_kwargs={"do_sample": False})
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    rollouts, seen = use_decode_engine(trainer, max_seq_len=64), []

    def look(prompts, found):
        completions = found[0] if kind == "GRPO" else found
        for prompt, tokens in zip(prompts, completions, strict=True):
            greedy = GenerationConfig(
                max_new_tokens=LENGTH, do_sample=False, eos_token_id=trainer.eos_token_ids, pad_token_id=0
            )
            training = model.training
            model.eval()
            with torch.no_grad():
                ids = torch.tensor([prompt])
                expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            model.train(training)
            assert tokens == expected[0, len(prompt) :].tolist()
        assert rollouts.engine.stats.cache_bytes == 0  # given back, while the trainer works
        seen.append(completions)

    watched(trainer, look)
    trainer.train()
    assert len(seen) == 3 and any(len(tokens) < LENGTH for one in seen for tokens in one)
    assert rollouts.engine.model is model and addresses == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("bf16", [False, True])
def test_a_graph_serves_all_rollouts_and_the_model_stays_as_it_was(bf16, tokenizer, tmp_path):
    """Also with gradient checkpointing, which is switched on anew for each rollout, and under autocast."""
    model = policy(tokenizer)
    trainer = trained("GRPO", model, tokenizer, tmp_path, bf16=bf16, gradient_checkpointing=True)
    rollouts, kept = use_decode_engine(trainer, max_seq_len=64, max_batch_size=4, buckets=[4]), []
    sample, embeddings = trainer._generate_single_turn, model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, given, result: None)  # comes after those of checkpointing

    def state():
        return model.forward, [*embeddings._forward_hooks.items()], model.generation_config, model.training

    def seen(*args, **kwargs):
        before = state()
        found = sample(*args, **kwargs)
        kept.append(state() == before)
        return found

    trainer._generate_single_turn = seen
    trainer.train()
    stats = rollouts.engine.stats
    assert kept == [True] * 3
    assert (stats.total("captures"), stats.prefill.captures) == (1, 1)
    assert stats.total("eager_steps") == 1 and stats.total("failures") == 0


def test_adapters_of_peft_are_sampled_from(tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(policy(tokenizer), config)
    trainer = trained("GRPO", model, tokenizer, tmp_path, generation_kwargs={"do_sample": False})
    use_decode_engine(trainer, max_seq_len=64)

    def look(prompts, found):
        for prompt, tokens in zip(prompts, found[0], strict=True):
            assert tokens == logits_of(trainer, prompt, tokens).argmax(-1).tolist()

    watched(trainer, look)
    trainer.train()


class Processor(ProcessorMixin):
    def __init__(self):
        pass


@pytest.mark.parametrize(
    "change, message",
    [
        ({"args.use_vllm": True}, "use_vllm=True"),
        ({"args.use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True"),
        ({"rollout_func": print}, "a rollout_func"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"processing_class": Processor()}, "a processor"),
    ],
)
def test_a_trainer_that_needs_another_sampler_is_refused(change, message, tokenizer, tmp_path):
    trainer = trained("GRPO", policy(tokenizer), tokenizer, tmp_path)
    for path, value in change.items():
        owner, _, name = path.rpartition(".")
        setattr(trainer.args if owner else trainer, name, value)
    with pytest.raises(ConfigError, match=f"the trainer has {message}.*leave that out"):
        use_decode_engine(trainer)


def test_what_is_no_such_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"must be a GRPOTrainer or RLOOTrainer of trl .*, got object"):
        use_decode_engine(object())


def test_a_rollout_that_fails_says_why_and_leaves_the_model_as_it_was(tokenizer, tmp_path):
    model = policy(tokenizer)
    trainer = trained("GRPO", model, tokenizer, tmp_path)
    rollouts = use_decode_engine(trainer, max_seq_len=64)
    prompts = [tokenizer("one")["input_ids"]] * 4
    forward = model.forward
    rollouts(prompts)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(DecodeError, match=r"prompt 0 of a rollout: .*NaN"):
        rollouts(prompts)
    assert model.forward == forward and rollouts.engine.stats.cache_bytes == 0
