"""Reinforcement learning in the manner of GRPO: an engine samples from the very weights that are trained, each of its
decode steps one graph, and the policy-gradient step is one graph as well. While a step trains, the engine's KV memory
is free for it; the engine's graphs stay."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod import CUDAGraphModule
from graphmod.decode import DecodeEngine
from graphmod.train.attention import use_static_causal_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PROMPTS, GROUP, LENGTH = 2, 4, 8


def reward(completions: torch.Tensor) -> torch.Tensor:
    """What is wanted: even tokens. A rule, so that no other model is needed."""
    return (completions % 2 == 0).float().mean(1)


def main(steps: int = 40, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None)).to(device)
    rate = torch.tensor(3e-3, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    rows = PROMPTS * GROUP  # decoded together, from the first step to the last: one batch size is enough
    engine = DecodeEngine(model, max_batch_size=rows, max_seq_len=32, buckets=[rows], graphs=graphs)

    def train_step(tokens, old, advantage):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -LENGTH - 1 : -1]
        new = logits.float().log_softmax(-1).gather(2, tokens[:, -LENGTH:, None]).squeeze(-1)
        ratio = (new - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if graphs:
        use_static_causal_attention(model)  # completions are of one length here: no padding
        train_step = CUDAGraphModule(train_step)

    losses = []
    for step in range(steps):
        engine.resume()
        prompts = torch.randint(64, (PROMPTS, 4)).tolist()
        done = list(engine.generate(prompts, n=GROUP, temperature=1.0, max_new_tokens=LENGTH, seed=step))
        engine.suspend(keep="graphs")
        done.sort(key=lambda one: (one.request, one.sample))
        tokens = torch.tensor([[*one.prompt, *one.tokens] for one in done], device=device)
        old = torch.tensor([one.logprobs for one in done], device=device)
        rewards = reward(tokens[:, -LENGTH:]).view(PROMPTS, GROUP)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        for _ in range(2):
            losses.append(train_step(tokens, old, advantage.view(-1, 1)).item())
        print(f"step {step}: reward {rewards.mean():.3f}, loss {losses[-1]:.4f}")
    if graphs:
        print(train_step.stats)
        print(engine.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
