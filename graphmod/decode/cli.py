"""What `generate.py` does: compose the config with Hydra, generate, print or write, and word every error.

The only part of decode that imports `graphmod.train` (for the wording of config errors), hydra and omegaconf. Exit
status: 0 all went well, 1 something failed while generating, 2 the command line, config, model or prompts cannot be
used, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from graphmod.decode.config import CompileMode
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.errors import RequestError
from graphmod.decode.loading import load_model, model_folder
from graphmod.decode.requests import Codec
from graphmod.decode.results import Completion
from graphmod.decode.sampling import FILTERED, GREEDY, PLAIN
from graphmod.decode.schema import GenerateConfig
from graphmod.decode.text import TextStream, codec_for
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.explain import explain

_TEXTS = ("prompt", "prompts_file", "out", "tokenizer", "model.path")
HELP = """Samples from a causal language model, decode steps in CUDA graphs (emulated where there is no GPU).

  python generate.py model.path=FOLDER prompt="..." [GROUP=CHOICE ...] [KEY=VALUE ...]
  python generate.py model.path=FOLDER prompts_file=FILE [out=FILE]

model.path is a saved transformers model, a checkpoint of train.py, or runs/train for the latest one. A prompt is
streamed; the prompts of a file (one a line, or JSONL with "prompt") share batches and are written as JSONL.

Groups and their choices (files under configs_generate/):

  graph: decode (default), none
  decode: greedy (default), sample

Keys one changes most:

  decode.max_new_tokens=128     tokens to generate at most
  decode.temperature=0.8        0 takes the most likely token
  decode.top_k=50 decode.top_p=0.9
  decode.seed=0 decode.n=1      random numbers, and samples of each prompt
  decode.stop=['END']           texts or token ids that end a sequence
  decode.logprobs=true          print or write the log-probability of each token
  decode.max_batch_size=16      sequences decoded at the same time
  graph.compile=max             on a GPU: none | default | max (minutes to compile, the fastest steps)
  graph.ahead=true              capture all batch sizes before the first prompt
  model.precision=saved         saved | fp32 | bf16
  tokenizer=FOLDER              or bytes; otherwise what the model was saved with

All keys with their values: python generate.py --cfg job
All keys with their meaning: graphmod/decode/schema.py, graphmod/decode/config.py"""


def _complain(message: object) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _texts(arguments: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """Texts among the arguments, by key, and the other arguments. Hydra's grammar would want most of them quoted."""
    texts: dict[str, str | None] = {}
    others = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key in _TEXTS and equals:
            texts[key] = None if value == "null" else value
        else:
            others.append(argument)
    return texts, others


def parse(config_dir: Path, arguments: list[str]) -> GenerateConfig:
    """The typed and checked settings for these arguments.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind, an impossible combination.
    """
    ConfigStore.instance().store(name="generate_schema", node=GenerateConfig)
    texts, others = _texts(arguments)
    try:
        with initialize_config_dir(str(config_dir.resolve()), version_base="1.3"):
            composed = compose("generate", overrides=others)
        plain = OmegaConf.to_container(composed, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GenerateConfig), plain))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, GenerateConfig)) from error
    for key, value in texts.items():
        group, _, name = key.rpartition(".")
        setattr(getattr(config, group) if group else config, name, value)
    return config


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts_file={path} cannot be read: {error}") from error
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ConfigError(f"prompts_file={path} holds no prompt")
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f'line {number} of {path} is not like {{"prompt": "..."}}') from None
    return prompts


def _speed(tokens: int, seconds: float, engine: DecodeEngine) -> str:
    stats = engine.stats
    return (
        f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s; graphs {stats.state}: "
        f"{stats.total('launches')} launches, {stats.total('eager_steps')} eager steps, "
        f"{stats.total('captures')} captures in {stats.capture_seconds:.2f} s"
    )


def _kind(config: GenerateConfig) -> int:
    decode = config.decode
    return GREEDY if decode.temperature <= 0 else FILTERED if decode.top_k or decode.top_p < 1 else PLAIN


def _stream(engine: DecodeEngine, config: GenerateConfig, codec: Codec) -> int:
    """Prints one prompt and what follows, as it comes."""
    length = len(engine.requests.tokens(config.prompt, 0))
    if engine.config.graphs:
        if engine.config.compile is not CompileMode.none:
            print("compiling decode steps; this takes a while", file=sys.stderr, flush=True)
        # First, so that the text does not stop for it, nor log lines come in between.
        engine.warm_up(max_context=length + config.decode.max_new_tokens, kinds=(_kind(config),), progress=False)
    text = TextStream(codec)
    tokens, began, error = 0, time.perf_counter(), None
    print(config.prompt, end="", flush=True)
    try:
        for event in engine.stream([config.prompt], sampling=config.sampling()):
            error = event.error
            if event.token is not None:
                tokens += 1
                shown = text.add(event.token)
                print(f"{shown}[{event.logprob:.3f}]" if config.decode.logprobs else shown, end="", flush=True)
    finally:
        print(text.rest(), flush=True)
        print(_speed(tokens, time.perf_counter() - began, engine), file=sys.stderr, flush=True)
    if error is not None:
        _complain(error)
    return int(error is not None)


def _line(completion: Completion, prompt: str, codec: Codec, logprobs: bool) -> str:
    line: dict[str, Any] = {
        "index": completion.request,
        "sample": completion.sample,
        "prompt": prompt,
        "text": codec.decode(completion.tokens),
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    if logprobs:
        line["logprobs"] = completion.logprobs
    if completion.error is not None:
        line["error"] = completion.error
    return json.dumps(line, ensure_ascii=False)


def _many(engine: DecodeEngine, config: GenerateConfig, codec: Codec, prompts: list[str]) -> int:
    """Writes the completions of all prompts, each as soon as it is there, so that an interruption keeps them."""
    total, finished, failed, tokens = len(prompts) * config.decode.n, 0, 0, 0
    began = time.perf_counter()
    source = Path(config.prompts_file or "")
    out = None
    if config.prompts_file is not None:
        out = Path(config.out) if config.out else source.with_suffix(".out.jsonl")
        out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("w", encoding="utf-8") if out else contextlib.nullcontext(sys.stdout) as file,
        tqdm(total=total, unit="sample", disable=out is None) as bar,
    ):

        def finish(completion: Completion) -> None:
            nonlocal finished, failed, tokens
            finished += 1
            failed += completion.error is not None
            tokens += len(completion.tokens)
            prompt = prompts[completion.request]
            if out is None:
                print(f"--- sample {completion.sample}\n{prompt}{codec.decode(completion.tokens)}", flush=True)
            else:
                print(_line(completion, prompt, codec, config.decode.logprobs), file=file, flush=True)
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)

        try:
            engine.generate(prompts, config.decode.n, config.sampling(), on_finish=finish)
        finally:
            bar.close()
            done = f"{finished} of {total} samples finished" + (f", written to {out}" if out else "")
            print(done, file=sys.stderr)
            print(_speed(tokens, time.perf_counter() - began, engine), file=sys.stderr, flush=True)
    if failed:
        _complain(f'{failed} samples ended with an error; see their "error"')
    return int(failed > 0)


def generate(config: GenerateConfig) -> int:
    """Runs one command; returns the exit status. Raises GraphmodError."""
    config.check()
    prompts = [config.prompt] if config.prompts_file is None else read_prompts(Path(config.prompts_file))
    folder = model_folder(config.model.path)
    codec = codec_for(folder, config.tokenizer)
    model = load_model(folder, config.model)
    print(f"model: {folder}", file=sys.stderr)
    engine = DecodeEngine(model, config.engine(len(prompts) * config.decode.n), codec=codec)
    if config.graph.ahead and engine.config.graphs:
        engine.warm_up(kinds=(_kind(config),))
    if config.prompts_file is None and config.decode.n == 1:
        return _stream(engine, config, codec)
    return _many(engine, config, codec, prompts)


def main(config_dir: Path) -> int:
    """Runs `generate.py` with the arguments in `sys.argv`; returns the exit status.

    Args:
        config_dir: the folder with `generate.yaml` and its groups.
    """
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        return 0
    try:
        if "--cfg" in arguments:
            at = arguments.index("--cfg")
            print(OmegaConf.to_yaml(OmegaConf.structured(parse(config_dir, arguments[:at] + arguments[at + 2 :]))))
            return 0
        return generate(parse(config_dir, arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ConfigError, RequestError) as error:
        _complain(error)
        return 2
    except (GraphmodError, OSError) as error:
        _complain(error)
        return 1
    except torch.OutOfMemoryError as error:
        _complain(f"out of GPU memory; lower decode.max_batch_size or decode.max_seq_len. {str(error).splitlines()[0]}")
        return 1
    except Exception:
        traceback.print_exc()
        _complain("this is a bug in graphmod or in a library it uses; the lines above say where")
        return 1
