"""Tiny causal LMs for the tests of decode, and what transformers' own `generate` makes of them."""

import hashlib

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from graphmod.decode.cache import Layer

VOCABULARY = 96
POSITIONS = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": None,
    "bos_token_id": None,
}
ROTARY = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": POSITIONS}
CONFIGS = {
    "llama": lambda: LlamaConfig(**ROTARY),
    "qwen3": lambda: Qwen3Config(**ROTARY, head_dim=16),
    "gpt2": lambda: GPT2Config(**SIZES, n_positions=POSITIONS),
}
ARCHITECTURES = tuple(CONFIGS)


def uniform(heads: int, kv_heads: int, head_dim: int, count: int) -> tuple[Layer, ...]:
    """`count` layers that are all alike and see everything."""
    return (Layer(heads, kv_heads, head_dim, head_dim),) * count


def tiny_model(architecture: str, device: torch.device, seed: int = 0, scale: float = 3.0) -> PreTrainedModel:
    """A model with random weights, `scale` times the usual ones so that its logits differ clearly, in fp32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.to(device).eval()


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


_known: dict[tuple, list[int]] = {}


def reference(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The tokens of transformers' greedy `generate` for one prompt alone: the same, whoever asks with equal weights."""
    if not _is_plain(model):
        return _generated(model, prompt, new_tokens)
    asked = (_contents(model), *prompt, "then", new_tokens)
    if asked not in _known:
        _known[asked] = _generated(model, prompt, new_tokens)
    return list(_known[asked])


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether its weights and settings say all of a model: it has no adapters, no hooks, and no forward of its own."""
    return all(
        type(module).__module__.startswith(("torch.nn.", "transformers."))
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in model.modules()
    )


def _contents(model: PreTrainedModel) -> str:
    about = (type(model), model.device, model.dtype, model.training, model.config, model.generation_config)
    found = hashlib.sha256(repr(about).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        plain = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found.update(repr((name, tensor.shape, tensor.dtype)).encode() + plain.cpu().numpy().tobytes())
    return found.hexdigest()


def _generated(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    given = torch.tensor([prompt], device=model.device)
    attention = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"
    try:
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            use_cache=True,
        )
    finally:
        model.config._attn_implementation = attention
    return out[0, len(prompt) :].tolist()
