"""What `generate.py` does: compose the config with Hydra, generate, print or write, and word every error.

The only part of decode that imports `graphmod.train` (for the wording of config errors and of checkpoints), hydra and
omegaconf. Exit status: 0 all went well, 1 something failed while generating, 2 the command line, config, model or
prompts cannot be used, 130 interrupted, 141 nobody reads the standard output any more.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from graphmod.decode.config import CompileMode
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.errors import OutputError, RequestError
from graphmod.decode.loading import load_model, model_folder
from graphmod.decode.output import OutputFile, open_output, show
from graphmod.decode.requests import Codec
from graphmod.decode.results import Completion
from graphmod.decode.sampling import FILTERED, GREEDY, PLAIN
from graphmod.decode.schema import GenerateConfig
from graphmod.decode.text import TextStream, codec_for
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.explain import explain
from graphmod.train.provenance import trained

_TEXTS = ("prompt", "prompts_file", "out", "tokenizer", "model.path")
HELP = """Samples from a causal language model, decode steps in CUDA graphs (emulated where there is no GPU).

  python generate.py model.path=FOLDER prompt="..." [GROUP=CHOICE ...] [KEY=VALUE ...]
  python generate.py model.path=FOLDER prompts_file=FILE [out=FILE]

model.path is a saved transformers model, a checkpoint of train.py, or runs/train for the latest one. A prompt is
streamed; the prompts of a file (one a line, or JSONL with "prompt") share batches and are written as JSONL, to FILE
with .out.jsonl in place of its suffix unless out says where. A file that holds something needs overwrite=true.

Groups and their choices (files under configs_generate/):

  graph: decode (default), none       a decode step is one graph, or plain PyTorch
  decode: greedy (default), sample    the most likely token each time, or temperature 0.8 and top_p 0.95

Keys one changes most, with a value for example:

  decode.max_new_tokens=128     tokens to generate at most
  decode.temperature=0.8        0 takes the most likely token
  decode.top_k=50               draw from the 50 most likely tokens only
  decode.top_p=0.9              draw from the most likely tokens that make up 0.9 only
  decode.n=4 decode.seed=1      samples of each prompt; another seed gives others
  decode.stop=['END']           texts or token ids that end a sequence
  decode.logprobs=true          print or write the log-probability of each token
  decode.max_batch_size=16      sequences decoded at the same time
  decode.attention=auto         auto | fastest (measures them) | sdpa | flex | varlen | flashinfer
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


@dataclass
class Prompt:
    """A prompt, and what else its line of JSON says of it."""

    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file. Raises ConfigError."""
    try:
        # Not splitlines(), which also splits at characters that may stand in a text or a string of JSON.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"prompts_file={path} cannot be read: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts_file={path} holds no prompt")
    if path.suffix != ".jsonl":
        return [Prompt(line) for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            read = json.loads(line)
        except ValueError as error:
            raise ConfigError(f'line {number} of {path} is not JSON like {{"prompt": "..."}}: {error}') from None
        if not isinstance(read, dict) or not isinstance(read.get("prompt"), str):
            got = read.get("prompt", "no prompt") if isinstance(read, dict) else read
            raise ConfigError(f'line {number} of {path} must be like {{"prompt": "a text"}}, got {got!r:.80}')
        prompts.append(Prompt(read.pop("prompt"), read))
    return prompts


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _speed(tokens: int, seconds: float, engine: DecodeEngine) -> str:
    stats = engine.stats
    speed = f"{_count(tokens, 'token')} in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
    if stats.attention_us:
        measured = ", ".join(f"{name} {us:.1f} us" for name, us in stats.attention_us.items())
        speed += f"; attention, a layer: {measured}"
    eager = _count(stats.total("eager_steps"), "eager step")
    if not engine.config.graphs:
        return f"{speed}; without graphs: {eager}"
    launches = _count(stats.total("launches"), "launch", "launches")
    captures = f"{_count(stats.total('captures'), 'capture')} in {stats.capture_seconds:.2f} s"
    return f"{speed}; graphs {stats.state}: {launches}, {eager}, {captures}"


def _kind(config: GenerateConfig) -> int:
    decode = config.decode
    return GREEDY if decode.temperature <= 0 else FILTERED if decode.top_k or decode.top_p < 1 else PLAIN


def _stream(engine: DecodeEngine, config: GenerateConfig, codec: Codec) -> int:
    """Prints one prompt and what follows, as it comes."""
    length = len(engine.requests.tokens(config.prompt, 0))
    if engine.config.graphs:
        if engine.config.compile is not CompileMode.none and engine.device.type == "cuda":
            print("compiling decode steps; this takes a while", file=sys.stderr, flush=True)
        # First, so that the text does not stop for it, nor log lines come in between.
        engine.warm_up(max_context=length + config.decode.max_new_tokens, kinds=(_kind(config),), progress=False)
    text = TextStream(codec)
    tokens, began, error = 0, time.perf_counter(), None
    try:
        show(config.prompt, end="")
        for event in engine.stream([config.prompt], sampling=config.sampling()):
            error = event.error
            if event.token is not None:
                tokens += 1
                shown = text.add(event.token)
                show(f"{shown}[{event.logprob:.3f}]" if config.decode.logprobs else shown, end="")
    finally:
        if not isinstance(sys.exception(), (BrokenPipeError, OutputError)):  # else there is nothing to write to
            show(text.rest())
            print(_speed(tokens, time.perf_counter() - began, engine), file=sys.stderr, flush=True)
    if error is not None:
        _complain(error)
    return int(error is not None)


def _line(completion: Completion, prompt: Prompt, logprobs: bool) -> str:
    line: dict[str, Any] = prompt.fields | {  # the fields of a completion win
        "index": completion.request,
        "sample": completion.sample,
        "prompt": prompt.text,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    if logprobs:
        line["logprobs"] = completion.logprobs
    if completion.error is not None:
        line["error"] = completion.error
    return json.dumps(line, ensure_ascii=False)


def _many(engine: DecodeEngine, config: GenerateConfig, prompts: list[Prompt], out: OutputFile | None) -> int:
    """Writes the completions of all prompts, each as soon as it is there, so that an interruption keeps them."""
    total, finished, failed, tokens = len(prompts) * config.decode.n, 0, 0, 0
    began = time.perf_counter()
    if out is not None:
        out.begin()
    with logging_redirect_tqdm(), tqdm(total=total, unit="sample", disable=out is None) as bar:

        def finish(completion: Completion) -> None:
            nonlocal finished, failed, tokens
            prompt = prompts[completion.request]
            if out is None:
                show(f"--- sample {completion.sample}\n{prompt.text}{completion.text}")
            else:
                out.line(_line(completion, prompt, config.decode.logprobs))
            finished += 1  # after the line is written: what an interruption reports is there
            failed += completion.error is not None
            tokens += len(completion.tokens)
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)

        try:
            engine.generate([prompt.text for prompt in prompts], config.decode.n, config.sampling(), on_finish=finish)
        finally:
            bar.close()
            if not isinstance(sys.exception(), BrokenPipeError):
                done = f"{finished} of {_count(total, 'sample')} finished" + (f", written to {out.path}" if out else "")
                print(done, file=sys.stderr)
                print(_speed(tokens, time.perf_counter() - began, engine), file=sys.stderr, flush=True)
    if failed:
        _complain(f'{_count(failed, "sample")} ended with an error; see "error" in the output')
    return int(failed > 0)


def generate(config: GenerateConfig) -> int:
    """Runs one command; returns the exit status. Raises GraphmodError."""
    config.check()
    if config.prompts_file is None:
        return _run(config, [Prompt(config.prompt or "")], None)
    source = Path(config.prompts_file)
    prompts = read_prompts(source)
    path = Path(config.out) if config.out else source.with_suffix(".out.jsonl")
    with open_output(path, source, config.overwrite) as out:  # before the model is loaded, which may take minutes
        return _run(config, prompts, out)


def _run(config: GenerateConfig, prompts: list[Prompt], out: OutputFile | None) -> int:
    folder = model_folder(config.model.path)
    codec = codec_for(folder, config.tokenizer)
    model = load_model(folder, config.model)
    print(f"model: {folder}" + (f", {known}" if (known := trained(folder)) else ""), file=sys.stderr)
    if config.graph.compile is not CompileMode.none and model.device.type != "cuda":
        said = f"graph.compile={config.graph.compile.value} is for a GPU and is ignored on this {model.device.type}"
        print(f"note: {said}", file=sys.stderr, flush=True)
    engine = DecodeEngine(model, config.engine(len(prompts) * config.decode.n), codec=codec)
    if config.graph.ahead and engine.config.graphs:
        engine.warm_up(kinds=(_kind(config),))
    if config.prompts_file is None and config.decode.n == 1:
        return _stream(engine, config, codec)
    return _many(engine, config, prompts, out)


def main(config_dir: Path) -> int:
    """Runs `generate.py` with the arguments in `sys.argv`; returns the exit status.

    Args:
        config_dir: the folder with `generate.yaml` and its groups.
    """
    arguments = sys.argv[1:]
    try:
        if {"--help", "-h"} & set(arguments):
            show(HELP)
            return 0
        if "--cfg" in arguments:
            at = arguments.index("--cfg")
            show(OmegaConf.to_yaml(OmegaConf.structured(parse(config_dir, arguments[:at] + arguments[at + 2 :]))))
            return 0
        return generate(parse(config_dir, arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ConfigError, RequestError) as error:
        _complain(error)
        return 2
    except BrokenPipeError:  # as with `| head`, where nothing is wrong
        return 128 + 13  # what a shell says of a program that SIGPIPE ended
    except OutputError as error:
        _complain(error)
        return 1
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
