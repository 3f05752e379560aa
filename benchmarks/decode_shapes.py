"""The shapes that `benchmarks/decode.py` measures, their models and prompts."""

import sys
from typing import Any

QWEN3_0_6B = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b_b1": {"model": QWEN3_0_6B, "batch": 1, "context": 128, "max_seq_len": 1024},
    "8b_b1": {"model": QWEN3_8B, "batch": 1, "context": 512, "max_seq_len": 2048},
    "0.6b_b32": {"model": QWEN3_0_6B, "batch": 32, "context": 512, "max_seq_len": 2048},
    "0.6b_b128": {"model": QWEN3_0_6B, "batch": 128, "context": 512, "max_seq_len": 2048},
    "0.6b_b1_2k": {"model": QWEN3_0_6B, "batch": 1, "context": 512, "max_seq_len": 2048},
    "0.6b_b1_32k": {"model": QWEN3_0_6B, "batch": 1, "context": 512, "max_seq_len": 32768},
    "8b_whole": {"model": QWEN3_8B, "batch": 32, "context": 512, "new": 1024, "max_seq_len": 2048},
    "capture": {"model": QWEN3_0_6B, "batch": 56, "context": 64, "max_seq_len": 2048},
    "ragged": {"model": QWEN3_0_6B, "batch": 128, "requests": 256, "prompt": 512, "new": 256, "max_seq_len": 1024},
}
SMOKE: dict[str, dict[str, Any]] = {
    "tiny_b1": {"model": TINY, "batch": 1, "context": 12, "max_seq_len": 64},
    "tiny_b4": {"model": TINY, "batch": 4, "context": 20, "max_seq_len": 64},
    "tiny_whole": {"model": TINY, "batch": 4, "context": 20, "new": 40, "max_seq_len": 64},
    "capture": {"model": TINY, "batch": 56, "context": 64, "max_seq_len": 128},
    "ragged": {"model": TINY, "batch": 8, "requests": 12, "prompt": 24, "new": 12, "max_seq_len": 64},
}


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def build(shape: dict[str, Any], device: Any) -> Any:
    """A Qwen3 model of the shape with random weights, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    tiny = shape["model"] is TINY
    config = Qwen3Config(
        **shape["model"],
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        vocab_size=512 if tiny else 151936,
        max_position_embeddings=40960,
        tie_word_embeddings=shape["model"]["hidden_size"] < 2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16)
    model.generation_config.eos_token_id = None
    progress(f"model of {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
    return model.eval()


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
