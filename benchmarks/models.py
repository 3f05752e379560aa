"""What graphmod makes of every causal LM of the installed transformers, small and with random weights.

    python benchmarks/models.py                      # all, to benchmarks/results/models.json; some minutes
    python benchmarks/models.py --models llama,gemma3_text
    python benchmarks/models.py --table              # writes docs/models.md from the results

Training: seven steps with `graph_layers` and with the whole step as one graph, losses and weights compared with plain
PyTorch, bit for bit. Decode: the greedy tokens and log-probabilities of `DecodeEngine`, compared with the model's own
forward over the whole text, without a cache. On a GPU where there is one, else with emulated graphs.
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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"
WAYS = ("layers", "step", "decode")
_ALLOWED = 2e-3  # of log-probabilities, in fp32
_TIMEOUT = 300  # seconds for one model


def decode(model: Any) -> dict[str, Any]:
    """Tokens and log-probabilities against those of the model's own forward."""
    import torch

    from graphmod.decode import DecodeEngine
    from graphmod.decode.errors import DecodeError

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


def train(model: Any, how: str) -> tuple[list[float], list[Any], dict[str, Any]]:
    """Losses of seven steps, the weights after them, and what was captured."""
    import torch

    from graphmod import CUDAGraphModule, graph_layers

    device = model.device
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Callable = step
    wrappers = []
    if how == "layers":
        wrappers = graph_layers(model)
    if how == "step":
        run = CUDAGraphModule(step)
        wrappers = [run]
    generator, losses = torch.Generator().manual_seed(3), []
    for number in range(7):
        torch.manual_seed(number)
        losses.append(run(torch.randint(3, 90, (2, 24), generator=generator).to(device)).item())
    said = [one.last_failure for one in wrappers if one.last_failure]
    captured = sum(one.stats.replays > 0 for one in wrappers)
    about = {"captured": captured, "wrapped": len(wrappers), "detail": said[0] if said else ""}
    return losses, [one.detach().clone() for one in model.parameters()], about


def one_model(kind: str, ways: list[str]) -> dict[str, Any]:
    """The results of one model; in a process of its own."""
    import torch
    from causal_models import NotSmall, small_model

    from graphmod.errors import ConfigError

    warnings.filterwarnings("ignore")
    logging.getLogger("graphmod").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = small_model(kind).to(device)
    except NotSmall as error:
        return {"model": kind, "not_built": str(error)}
    found: dict[str, Any] = {"model": kind, "class": type(model).__name__}
    expected = None
    for way in ways:
        try:
            if way == "decode":
                found[way] = decode(copy.deepcopy(model).eval())
                continue
            if expected is None:
                try:
                    expected = train(copy.deepcopy(model).train(), "eager")
                except Exception as error:  # of a model's own code: it does not train as it is
                    expected = f"{type(error).__name__}: {error}"[:200]
            if isinstance(expected, str):
                found[way] = {"outcome": "-", "detail": expected}
                continue
            losses, weights, about = train(copy.deepcopy(model).train(), way)
            same = losses == expected[0] and all(map(torch.equal, weights, expected[1]))
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
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"model": kind, **{way: {"outcome": "raises", "detail": f"took over {_TIMEOUT} s"} for way in ways}}
    try:
        return json.loads(without_paths(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [""])[-1][:200]
        return {"model": kind, **{way: {"outcome": "raises", "detail": f"process ended: {said}"} for way in ways}}


def _word(found: dict[str, Any] | None) -> str:
    if found is None or found["outcome"] == "-":
        return "-"
    detail = " ".join(found.get("detail", "").replace("|", "\\|").split())
    if found["outcome"] == "right":
        if "wrapped" in found:
            all_of_them = found["captured"] == found["wrapped"]
            return "captured" if all_of_them else f"eager: {_cause(detail)}" if not found["captured"] else "in part"
        attention = {"own": ", own attention"}.get(found["attention"], "")
        return f"right{attention}" if found["captured"] else f"right, eager{attention}: {_cause(detail)}"
    if found["outcome"] == "refused":
        return "refused: " + detail.partition("because ")[2].removesuffix(". Use model.generate")[:110]
    return f"**{found['outcome']}** {detail[:90]}"


def _cause(detail: str) -> str:
    operation, _, rest = detail.partition(" at ")
    return (operation if rest else detail.partition(" (")[0])[:60] or "not captured"


def table(results: dict[str, Any]) -> str:
    """The page docs/models.md."""
    found = [one for one in results["models"] if "not_built" not in one]
    others = [one for one in results["models"] if "not_built" in one]
    counts = {way: sum(one.get(way, {}).get("outcome") == "right" for one in found) for way in WAYS}
    refused = sum(one.get("decode", {}).get("outcome") == "refused" for one in found)
    lines = [
        "# Models",
        "",
        "What graphmod makes of each causal LM of transformers, built small, with random weights, in fp32.",
        "`python benchmarks/models.py` runs them; `python benchmarks/models.py --table` writes this page.",
        "",
        "- `graph_layers`, whole step: losses and weights of seven training steps, compared bit for bit with plain",
        "  PyTorch. **captured**: from graphs. **eager**: not from graphs, for the reason given; same numbers.",
        "- decode: greedy tokens and log-probabilities of `DecodeEngine`, compared with the model's own forward over",
        "  the whole text. **own attention**: the model's, over gathered keys and values, because no faster one can",
        "  stand in for it. **refused**: when the engine is made, with the reason.",
        "",
        f"{results['environment']}. {len(found)} models; equal to plain PyTorch: {counts['layers']} with",
        f"`graph_layers`, {counts['step']} as a whole step; decode: {counts['decode']} right, {refused} refused.",
        "",
        "| model | `graph_layers` | whole step | decode |",
        "|---|---|---|---|",
    ]
    for one in found:
        lines.append(f"| {one['model']} | {' | '.join(_word(one.get(way)) for way in WAYS)} |")
    lines += ["", f"Not built small from their config alone ({len(others)}): "]
    lines[-1] += ", ".join(one["model"] for one in others) + "."
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="model types, with commas; all without")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only write docs/models.md from the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ways = options.ways.split(",")
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        parser.error(f"--ways: {', '.join(unknown)} is none of {', '.join(WAYS)}")
    if options.one:
        print(json.dumps(one_model(options.one, ways)))
        return 0
    if options.table:
        try:
            PAGE.write_text(table(json.loads(options.out.read_text())))
        except OSError as error:
            print(f"error: no results to show: {error}; run python benchmarks/models.py", file=sys.stderr)
            return 2
        return 0
    import torch
    import transformers
    from causal_models import kinds

    chosen = options.models.split(",") if options.models else kinds()
    unknown = [kind for kind in chosen if kind not in kinds()]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}: transformers has no such causal LM")
    with ThreadPoolExecutor(options.processes) as pool:
        models = []
        for one in pool.map(lambda kind: in_process(kind, ways), chosen):
            models.append(one)
            said = one.get("not_built") or ", ".join(f"{way} {one[way]['outcome']}" for way in ways if way in one)
            print(f"{one['model']:28s} {said}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, emulated graphs"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    results = {
        "command": "python benchmarks/models.py",
        "environment": f"{device}, {versions}, {datetime.date.today()}",
        "models": models,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    bad = [one["model"] for one in models for way in ways if one.get(way, {}).get("outcome") in ("wrong", "raises")]
    print(f"wrong, or raises: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
