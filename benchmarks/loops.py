"""Programs as people write them, each beside the one that it is to be as fast as; one process for each.

    python benchmarks/loops.py --out benchmarks/results/loops.json
    python benchmarks/loops.py --groups compiled,moe --steps 50
    python benchmarks/loops.py --smoke            # tiny shapes on the CPU, to see that everything runs

`compiled`: a step of one's own around `torch.compile(model)`, wrapped, beside `TrainStep(compile="default")`; the loss
outside of the compiled model, and inside (`labels`), where TrainStep has it; and with `compiled_update`, too.
`plain`: a transformers model as it comes in such a step, beside the same with `use_static_causal_attention`.
`padded`: a model of transformers that is given a mask, of batches with and without padding in turn, beside eager.
`moe`: a mixture of experts, whole step, beside eager.
`decode`, `decode_compiled`: models with sliding windows beside a Llama of equal size.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.options import chosen, gpu_is_there, in_process, keep, tell

# Group -> its programs; each is compared with the last one of its group that ends in "*".
GROUPS: dict[str, tuple[str, ...]] = {
    "compiled": ("train_step*", "own_step", "own_step_with_labels", "own_step_compiled_update", "own_step_eager"),
    "plain": ("qwen3_static*", "qwen3", "llama_static*", "llama", "gemma_static*", "gemma"),
    "padded": ("eager*", "whole_step", "layers"),
    "moe": ("eager*", "whole_step", "layers"),
    "decode": ("llama*", "mistral_window", "gemma3"),
    "decode_compiled": ("llama*", "mistral_window", "gemma3"),
}
SIZE = {"layers": 12, "width": 768, "length": 256, "vocabulary": 32_000, "window": 512, "context": 1024}
SMOKE = {"layers": 2, "width": 64, "length": 16, "vocabulary": 96, "window": 8, "context": 24}
FLAGS = ("groups", "steps")
PADDING = 0


def config_of(kind: str, size: dict[str, int], **more: Any) -> Any:
    """The configuration of a model of one size, whatever its kind."""
    from transformers import AutoConfig

    width, heads = size["width"], max(2, size["width"] // 64)
    settings = {
        "hidden_size": width,
        "intermediate_size": -(-width * 8 // 3 // 64) * 64,
        "num_hidden_layers": size["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "vocab_size": size["vocabulary"],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return AutoConfig.for_model(kind, **(settings | more))


def model_of(config: Any, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def training(group: str, program: str, size: dict[str, int], device: str) -> tuple[Any, Any]:
    """`(step(batch) -> loss, the wrappers)` of one program."""
    import torch

    from graphmod import CUDAGraphModule, compiled_update, graph_layers
    from graphmod.train.attention import use_static_causal_attention
    from graphmod.train.settings import TrainGraphConfig
    from graphmod.train.step import TrainStep

    kind, more = "llama", {}
    if group == "plain":
        kind = program.split("_")[0]
    elif group == "moe":
        kind = "qwen3_moe"
        more = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": size["width"] // 4}
        more |= {"num_hidden_layers": min(8, size["layers"]), "decoder_sparse_step": 1}
        if device == "cpu":
            more |= {"num_experts": 4, "num_experts_per_tok": 2}
    model = model_of(config_of(kind, size, **more), device)
    if device == "cpu" and group == "moe":
        model.set_experts_implementation("batched_mm")
    rate = torch.tensor(1e-4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device == "cuda")
    if group == "compiled" or program.endswith("_static"):
        use_static_causal_attention(model)
    if program == "train_step":
        step = TrainStep(model, optimizer, compile="default", config=TrainGraphConfig(scope="full_iteration"))
        return lambda tokens: step(tokens.unsqueeze(0)), [step]
    called = torch.compile(model) if group == "compiled" else model
    update = compiled_update(optimizer) if program == "own_step_compiled_update" else optimizer.step

    def own(tokens: Any) -> Any:
        if program in ("own_step_with_labels", "own_step_compiled_update"):
            loss = called(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss
        else:
            mask = (tokens[:, :-1] != PADDING).long() if group == "padded" else None
            logits = called(input_ids=tokens[:, :-1], attention_mask=mask, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    if program in ("eager", "own_step_eager"):
        return own, []
    if program == "layers":
        return own, graph_layers(model)
    wrapper = CUDAGraphModule(own)
    return wrapper, [wrapper]


def measure_training(group: str, program: str, size: dict[str, int], steps: int, device: str) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    length = (1024 if group == "moe" and device == "cuda" else size["length"]) + 1
    if group == "moe" and device == "cuda":
        size = size | {"width": 1024}
    step, wrappers = training(group, program, size, device)
    batches = [torch.randint(1, size["vocabulary"], (1, length), generator=generator) for _ in range(8)]
    for batch in batches[1::2] if group == "padded" else ():
        batch[:, -length // 4 :] = PADDING
    batches = [batch.to(device) for batch in batches]
    began = time.perf_counter()
    losses = [float(step(batch)) for batch in batches]
    result: dict[str, Any] = {"first_8_steps_s": time.perf_counter() - began, "first_losses": losses}
    said = [getattr(one, "last_failure", "") for one in wrappers]
    result["failure"] = next((text for text in said if text), "")
    result["state"] = wrappers[0].stats.state if wrappers else "eager"
    if device == "cuda":
        from benchmarks.measure import gpu_busy_ms, memory, time_steps

        def run(index: int) -> Any:
            return step(batches[index % 8])

        result |= time_steps(run, steps) | memory() | gpu_busy_ms(run)
    return result


def measure_decode(program: str, size: dict[str, int], steps: int, device: str, how: str) -> dict[str, Any]:
    """Milliseconds a token of one row, beyond the prompt."""
    import torch

    from graphmod.decode import DecodeEngine

    if device == "cuda":
        size = size | {"width": 1024, "layers": 28}
    more: dict[str, Any] = {} if program == "llama" else {"sliding_window": size["window"]}
    kind = {"mistral_window": "mistral", "gemma3": "gemma3_text"}.get(program, program)
    if device == "cuda":  # heads as of Qwen3 0.6B
        more |= {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
    model = model_of(config_of(kind, size, **more), device).eval()
    model.generation_config.eos_token_id = None
    engine = DecodeEngine(model, max_batch_size=1, max_seq_len=size["context"] + 8 * steps, buckets=[1], compile=how)
    prompt = torch.randint(3, size["vocabulary"], (size["context"],), generator=torch.Generator().manual_seed(1))
    given = [prompt.tolist()]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        engine.generate(given, max_new_tokens=tokens, ignore_eos=True)
        return time.perf_counter() - began

    began = time.perf_counter()
    seconds(2 * steps)
    result: dict[str, Any] = {"first_tokens_s": time.perf_counter() - began}
    rounds = [(seconds(5 * steps) - seconds(steps)) / (4 * steps) * 1e3 for _ in range(5)]
    stats = engine.stats
    failures = [one.last_failure for one in engine.graphs.wrappers.values() if one.last_failure]
    return result | {
        "step_ms": statistics.median(rounds),
        "rounds": rounds,
        "attention": engine.attention.name or "own",
        "state": stats.state,
        "failure": failures[0] if failures else "",
    }


def work(group: str, program: str, steps: int, smoke: bool) -> dict[str, Any]:
    """Measures one program in this process."""
    import transformers

    from benchmarks.measure import environment

    size, device = (SMOKE, "cpu") if smoke else (SIZE, "cuda")
    if group.startswith("decode"):
        how = "default" if group.endswith("compiled") and not smoke else "none"
        result = measure_decode(program, size, steps, device, how)
    else:
        result = measure_training(group, program, size, steps, device)
    about = {"environment": environment() | {"transformers": transformers.__version__}}
    return {"group": group, "program": program} | result | about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one program")
    parser.add_argument("--caches", type=Path, help="keep what inductor compiles there, for the next run")
    parser.add_argument("--out", type=Path, help="write the results there as JSON, in place of earlier ones")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--worker", nargs=2, metavar=("GROUP", "PROGRAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return tell(work(*options.worker, options.steps, options.smoke))
    groups = chosen(parser, options.groups, GROUPS, "--groups")
    if not options.smoke and not gpu_is_there():
        return 2
    failed = False
    for group in groups:
        reference = None
        for name in GROUPS[group]:
            program = name.removesuffix("*")
            more = ["--steps", str(options.steps), *(["--smoke"] if options.smoke else [])]
            result = {"group": group, "program": program}
            with tempfile.TemporaryDirectory() as own:  # each compiles what it needs itself
                cache = str(options.caches / f"{group}-{program}") if options.caches else own
                found = in_process(__file__, (group, program), more, options.timeout, TORCHINDUCTOR_CACHE_DIR=cache)
            result |= found
            if "error" in result:
                print(f"{group:16} {program:16} failed: {result['error'][:300]}", flush=True)
                failed = True
            else:
                reference = result if name.endswith("*") else reference
                result["against"] = reference["program"] if reference else None
                print(f"{group:16} {program:16} {report(result, reference)}", flush=True)
            keep(options.out, result, ("group", "program"), FLAGS)
    return int(failed)


def report(result: dict[str, Any], reference: dict[str, Any] | None) -> str:
    numbers = [result["state"]]
    if "step_ms" in result:
        numbers.append(f"{result['step_ms']:.3f} ms")
    if reference is not None and reference is not result and "step_ms" in result:
        numbers.append(f"{result['step_ms'] / reference['step_ms']:.3f} x {reference['program']}")
    for key in ("host_ms", "free_ms", "busy_ms", "first_8_steps_s", "first_tokens_s", "reserved_gib"):
        if key in result:
            numbers.append(f"{key} {result[key]:.3f}")
    if result.get("attention"):
        numbers.append(result["attention"])
    if result.get("failure"):
        numbers.append(f"not captured: {result['failure'][:300]}")
    return "  ".join(numbers)


if __name__ == "__main__":
    sys.exit(main())
