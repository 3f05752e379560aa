"""What graphmod makes of every causal LM of the installed transformers, and of other models, small and with random
weights.

    python benchmarks/models.py                      # all, to benchmarks/results/models.json; some minutes
    python benchmarks/models.py --models "llama,gemma3_text,T5"    # these, in place of what was found of them before

Training: seven steps with `graph_layers` and with the whole step as one graph, losses and weights compared with plain
PyTorch, bit for bit. Decode: the greedy tokens and log-probabilities of `DecodeEngine`, compared with the model's own
forward over the whole text, without a cache. Other models (encoders, images, sound, diffusion) train in fp32 and under
autocast to bf16; those of diffusers and timm where these are installed. On a GPU where there is one, else with
emulated graphs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import logging
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
WAYS = ("layers", "step", "decode")
OTHER_WAYS = ("layers", "step", "layers in bf16", "step in bf16")
_ALLOWED = 2e-3  # of log-probabilities, in fp32
_TIMEOUT = 300  # seconds for one model


def decode(model: Any) -> dict[str, Any]:
    """Tokens and log-probabilities against those of the model's own forward."""
    from graphmod.decode import DecodeEngine
    from graphmod.decode.types import DecodeError

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 90, (count,), generator=generator).tolist() for count in (1, 7, 30, 64)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # so that logits differ clearly
    try:
        engine = DecodeEngine(model, max_batch_size=4, max_seq_len=100)
    except DecodeError as error:
        return {"outcome": "refused", "detail": str(error)}
    worst = 0.0
    for _ in range(2):
        for done in engine.generate(prompts, max_new_tokens=24, ignore_eos=True):
            whole = torch.tensor([done.prompt + done.tokens[:-1]], device=model.device)
            with torch.no_grad():
                own = model(input_ids=whole).logits[0, -len(done.tokens) :].float().log_softmax(-1)
            chosen = own.gather(1, torch.tensor(done.tokens, device=model.device)[:, None])[:, 0]
            found = torch.tensor(done.logprobs, device=model.device)
            worst = max(worst, float((own.max(-1).values - chosen).max()), float((chosen - found).abs().max()))
    stats = engine.stats
    graph = next(iter(engine.graphs.wrappers.values()))
    return {
        "outcome": "right" if worst < _ALLOWED else "wrong",
        "worst": worst,
        "attention": engine.attention.name or "own",
        "captured": stats.total("launches") > 0,
        "detail": graph.last_failure,
    }


def own_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss


def text(number: int) -> dict[str, Any]:
    """The arguments of a causal LM in step `number`."""
    tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def train(
    model: Any, batch: Callable = text, loss_of: Callable = own_loss, how: str = "eager"
) -> tuple[list[float], list[Any], dict[str, Any]]:
    """Losses of seven steps, the weights after them, and what was captured.

    Args:
        batch: step number -> arguments; loss_of: the loss of the model and those; how: one of the ways, or `eager`.
    """
    from transformers import set_seed

    from graphmod import CUDAGraphModule, graph_layers

    way, _, precision = how.partition(" in ")
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)

    def step(given: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(precision)):
            loss = loss_of(model, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Callable = step
    wrappers = []
    if way == "layers":
        wrappers = graph_layers(model, body=False)  # one graph for all would hide what each layer does
    if way == "step":
        run = CUDAGraphModule(step)
        wrappers = [run]
    losses = []
    for number in range(7):
        set_seed(number)  # numpy's too, which masks what wav2vec 2 hears
        given = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in batch(number).items()}
        losses.append(run(given).item())
    said = [one.last_failure for one in wrappers if one.last_failure]
    captured = sum(one.stats.replays > 0 for one in wrappers)
    about = {"captured": captured, "wrapped": len(wrappers), "detail": said[0] if said else ""}
    return losses, [one.detach().clone() for one in model.parameters()], about


def small(kind: str) -> tuple[torch.nn.Module, tuple]:
    """The model, and how to train it: its arguments and loss.

    Raises:
        NotSmall: it cannot be built.
    """
    from causal_models import NotSmall, small_model
    from other_models import OTHERS

    if kind not in OTHERS:
        return small_model(kind), (text, own_loss)
    torch.manual_seed(0)
    try:
        return OTHERS[kind].make(), OTHERS[kind][1:]
    except ImportError as error:
        raise NotSmall(str(error)) from error


def one_model(kind: str, ways: list[str]) -> dict[str, Any]:
    """The results of one model; in a process of its own."""
    from causal_models import NotSmall

    from graphmod.errors import ConfigError

    warnings.filterwarnings("ignore")
    logging.getLogger("graphmod").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model, task = small(kind)
    except NotSmall as error:
        return {"model": kind, "not_built": str(error)}
    model = model.to(device)
    found: dict[str, Any] = {"model": kind, "class": type(model).__name__}
    expected: dict[str, Any] = {}
    for way in ways:
        try:
            if way == "decode":
                found[way] = decode(copy.deepcopy(model).eval())
                continue
            plain = way.replace("layers", "eager").replace("step", "eager")
            if plain not in expected:
                try:
                    expected[plain] = train(copy.deepcopy(model).train(), *task, plain)
                except Exception as error:  # of a model's own code: it does not train as it is
                    expected[plain] = f"{type(error).__name__}: {error}"[:200]
            if isinstance(expected[plain], str):
                found[way] = {"outcome": "-", "detail": expected[plain]}
                continue
            losses, weights, about = train(copy.deepcopy(model).train(), *task, way)
            same = losses == expected[plain][0] and all(map(torch.equal, weights, expected[plain][1]))
            found[way] = {"outcome": "right" if same else "wrong", **about}
        except ConfigError as error:  # what to name instead
            found[way] = {"outcome": "refused", "detail": f"because {error}"}
        except Exception as error:  # is a result
            found[way] = {"outcome": "raises", "detail": f"{type(error).__name__}: {error}"[:300]}
    return found


def without_paths(text: str) -> str:
    """A message without where things are installed."""
    return re.sub(r"/\S*/site-packages/", "", text).replace(f"{ROOT}{os.sep}", "")


def in_process(kind: str, ways: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, "--ways", ",".join(ways)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"model": kind, **{way: {"outcome": "raises", "detail": f"took over {_TIMEOUT} s"} for way in ways}}
    try:
        return json.loads(without_paths(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [""])[-1][:200]
        return {"model": kind, **{way: {"outcome": "raises", "detail": f"process ended: {said}"} for way in ways}}


def main() -> int:
    from causal_models import kinds
    from other_models import OTHERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="model types, or names of other models, with commas; all without")
    parser.add_argument("--ways", help=f"of {', '.join(dict.fromkeys(WAYS + OTHER_WAYS))}, with commas; all without")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = dict.fromkeys(WAYS + OTHER_WAYS)
    chosen_ways = options.ways.split(",") if options.ways else list(every)
    unknown = [way for way in chosen_ways if way not in every]
    if unknown:
        parser.error(f"--ways: {', '.join(unknown)} is none of {', '.join(every)}")
    if options.one:
        print(json.dumps(one_model(options.one, chosen_ways)))
        return 0
    import transformers

    known = [*kinds(), *OTHERS]
    chosen = options.models.split(",") if options.models else known
    unknown = [kind for kind in chosen if kind not in known]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}: no causal LM of transformers, and none of {', '.join(OTHERS)}")

    def run(kind: str) -> dict[str, Any]:
        of_kind = OTHER_WAYS if kind in OTHERS else WAYS
        return {**in_process(kind, [way for way in chosen_ways if way in of_kind]), "other": kind in OTHERS}

    with ThreadPoolExecutor(options.processes) as pool:
        models = []
        for one in pool.map(run, chosen):
            models.append(one)
            said = one.get("not_built") or ", ".join(f"{way} {one[way]['outcome']}" for way in every if way in one)
            print(f"{one['model']:28s} {said}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, emulated graphs"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    environment = f"{device}, {versions}, {datetime.date.today()}"
    results = {"command": "python benchmarks/models.py", "environment": environment, "models": models}
    if options.models and options.out.is_file():  # some, in place of what was found of them before
        results = json.loads(options.out.read_text())
        new = {one["model"]: one | {"environment": environment} for one in models}
        results["models"] = [new.pop(one["model"], one) for one in results["models"]] + list(new.values())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    bad = [one["model"] for one in models for way in every if one.get(way, {}).get("outcome") in ("wrong", "raises")]
    print(f"wrong, or raises: {', '.join(dict.fromkeys(bad)) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
