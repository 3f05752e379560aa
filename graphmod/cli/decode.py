"""What `generate.py` and `serve.py` do once PyTorch is loaded: load the model, generate or serve, and say how fast."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PreTrainedModel

from graphmod.cli.prompts import OutputFile, Prompt, line_of, open_output
from graphmod.cli.settings import GenerateConfig, ModelSource, Precision, ServeConfig, model_folder
from graphmod.cli.start import OutputError, complain, end_at_once, say_plainly, show, tell
from graphmod.config import CompileMode
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.sampling import ADAPTED, FILTERED, GREEDY, PLAIN, kind_of_row
from graphmod.decode.types import Completion, RequestError, WeightsName
from graphmod.decode.weights import quantize_weights
from graphmod.errors import ConfigError
from graphmod.serve.engine_side import FrontLost, FrontProcess, Host
from graphmod.text import Codec, TextStream, TokenizerCodec, codec_for
from graphmod.trace.garbage import frozen_heap
from graphmod.train.device import pick_device
from graphmod.train.folders import DamagedCheckpoint, OtherFormat, checkpoint_of, read_manifest
from graphmod.train.model import is_adapter, load_weights, saved_config, set_special_tokens
from graphmod.words import counted

# -- the model, how it was trained and where its KV cache is -----------------------------------------------------------

_DTYPES = {Precision.saved: "auto", Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def load_model(
    folder: Path, source: ModelSource, codec: Codec | None = None, weights: WeightsName = WeightsName.saved
) -> PreTrainedModel:
    """The model in `folder`, in evaluation mode, on its device; says which it is. Adapters get the special tokens of
    `codec`, for the base they are loaded on has its own ends. Raises ConfigError where transformers cannot read it,
    weights are missing, or it can have none of 8 bits."""
    device = pick_device(source.device, "model.device")
    adapters = is_adapter(folder)
    if not adapters:
        saved_config(folder)  # where that is at fault, its weights are not to be named
    model: Any = load_weights(folder, None, _DTYPES[source.precision], setting="model.path=")
    if adapters and isinstance(codec, TokenizerCodec):
        set_special_tokens(model, codec.tokenizer)
    say_plainly(f"model: {folder}" + (f", {known}" if (known := trained(folder)) else ""))
    return _with_weights(model, weights, device).to(device).eval()


def _with_weights(model: Any, weights: WeightsName, device: torch.device | None = None) -> Any:
    if weights is not WeightsName.saved:
        try:
            quantize_weights(model, weights, device)
        except ConfigError as error:
            raise ConfigError(f"decode.{error}") from None
    return model


def cache_of(engine: DecodeEngine) -> str:
    """Of an engine whose cache is in memory of the host: how much of it."""
    stats, ring = engine.stats, engine.memory.ring
    far = 0 if ring is None else len(ring.far)
    there, here = (f"{nbytes / 2**20:,.1f} MiB" for nbytes in (stats.host_cache_bytes, stats.cache_bytes))
    return f"cache: {there} in host memory ({counted(far, 'layer')}), {here} on the {engine.device.type}"


def trained(folder: Path) -> str | None:
    """How many steps made the weights in `folder`, and with which loss; None for what is in no checkpoint of a run, or
    in none that can be read."""
    try:
        manifest = read_manifest(checkpoint_of(folder) or folder)
        done, steps = manifest["steps_done"], manifest["settings"]["train.steps"]
    except (DamagedCheckpoint, OtherFormat, OSError, KeyError, TypeError):
        return None
    loss = manifest.get("loss")
    return f"trained for {done:,} of {counted(steps, 'step')}" + ("" if loss is None else f", loss {loss:.3f}")


# -- one run of `generate.py` ------------------------------------------------------------------------------------------


def speed_of(tokens: int, seconds: float, engine: DecodeEngine) -> str:
    stats = engine.stats
    speed = f"{counted(tokens, 'token')} in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
    eager = counted(stats.total("eager_steps"), "eager step")
    if not engine.config.graphs:
        return f"{speed}; without graphs: {eager}"
    launches = counted(stats.total("launches"), "launch") + " of graphs"
    captures = f"{counted(stats.total('captures'), 'capture')} in {stats.capture_seconds:.2f} s"
    return f"{speed}; {launches}, {eager}, {captures}"


def _is_shortened(reason: str | None, prompt: int, tokens: int, asked: int, engine: DecodeEngine) -> bool:
    """Whether a sample has fewer tokens than were asked for because a sequence may have no more."""
    return reason == "length" and tokens < asked and prompt + tokens >= engine.max_seq_len


def _say_shortened(count: int, asked: int, engine: DecodeEngine) -> None:
    if count:
        said = f"a sequence has at most {engine.max_seq_len:,} tokens, its prompt included"
        who = "it" if count == 1 else f"{count:,} samples"
        say_plainly(f"note: {said}, so {who} ended before decode.max_new_tokens={asked}")


def _stream(engine: DecodeEngine, config: GenerateConfig, prompt: Prompt, codec: Codec) -> int:
    """Prints one prompt and what follows, as it comes; of a chat the answer alone."""
    (asked,) = engine.requests.read([prompt.asked], 1, config.sampling(), {})
    ids = asked.completion.prompt
    if engine.config.graphs:
        if engine.config.compile is not CompileMode.none and engine.device.type == "cuda":
            say_plainly("compiling decode steps; this takes a while")
        # First, so that the text does not stop for it, nor log lines come in between.
        engine.warm_up(
            max_context=len(ids) + config.decode.max_new_tokens, kinds=(asked.kind,), prefill=False, progress=False
        )
    text = TextStream(codec, ids)
    tokens, began, error, before, reason = 0, time.perf_counter(), None, prompt.shown, None
    try:
        for event in engine.stream([prompt.asked], sampling=config.sampling()):
            show(before, end="")  # not earlier: a request may still be refused
            before, error, reason = "", event.error, event.finish_reason
            if event.token is not None:
                tokens += 1
                shown = text.add(event.token)
                show(f"{shown}[{event.logprob:.3f}]" if config.decode.logprobs else shown, end="")
    finally:
        # Else there is nothing to write to, or of.
        if not isinstance(sys.exception(), (BrokenPipeError, OutputError, RequestError)):
            show(text.rest())
            asked_for = config.decode.max_new_tokens
            _say_shortened(_is_shortened(reason, len(ids), tokens, asked_for, engine), asked_for, engine)
            say_plainly(speed_of(tokens, time.perf_counter() - began, engine))
    if error is not None:
        complain(error)
    return int(error is not None)


def _with_logprobs(completion: Completion, codec: Codec) -> str:
    """Its text with the log-probability of each token behind it, as `_stream` shows them."""
    text = TextStream(codec, completion.prompt)
    pairs = zip(completion.tokens, completion.logprobs, strict=True)
    return "".join(f"{text.add(token)}[{logprob:.3f}]" for token, logprob in pairs) + text.rest()


def _many(
    engine: DecodeEngine, config: GenerateConfig, prompts: list[Prompt], codec: Codec, out: OutputFile | None
) -> int:
    """Writes the completions of all prompts, each as soon as it is there, so that an interruption keeps them."""
    total, finished, failed, shortened, tokens = len(prompts) * config.decode.n, 0, 0, 0, 0
    began = time.perf_counter()
    # None: a bar on a terminal only.
    with logging_redirect_tqdm(), tqdm(total=total, unit="sample", disable=True if out is None else None) as bar:

        def finish(completion: Completion) -> None:
            nonlocal finished, failed, shortened, tokens
            prompt = prompts[completion.request]
            if out is None:
                shown = _with_logprobs(completion, codec) if config.decode.logprobs else completion.text
                show(f"--- sample {completion.sample}\n{prompt.shown}{shown}")
            else:
                out.line(line_of(completion, prompt, config.decode))
            finished += 1  # after the line is written: what an interruption reports is there
            failed += completion.error is not None
            tokens += len(completion.tokens)
            given = len(completion.prompt), len(completion.tokens), config.decode.max_new_tokens
            shortened += _is_shortened(completion.finish_reason, *given, engine)
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)

        try:
            engine.generate([prompt.asked for prompt in prompts], config.decode.n, config.sampling(), on_finish=finish)
        except RequestError as error:
            raise RequestError(_in_words_of(prompts, config.prompts_file, str(error))) from error
        finally:
            bar.close()
            if not isinstance(sys.exception(), (BrokenPipeError, RequestError)):
                done = f"{finished:,} of {counted(total, 'sample')} finished"
                done += f", written to {out.path}" if out and finished else ""
                say_plainly(done)
                _say_shortened(shortened, config.decode.max_new_tokens, engine)
                say_plainly(speed_of(tokens, time.perf_counter() - began, engine))
    if failed:
        complain(f'{counted(failed, "sample")} ended with an error; see "error" in the output')
    return int(failed > 0)


def _in_words_of(prompts: list[Prompt], source: str | None, message: str) -> str:
    """A refusal of the engine, with the line of the file in place of the prompt's number."""
    found = re.match(r"prompt (\d+)\b", message)
    if found is None or source is None:
        return message
    return f"line {prompts[int(found[1])].line} of {source}{message[found.end() :]}"


def _run(config: GenerateConfig, folder: Path, prompts: list[Prompt], out: OutputFile | None) -> int:
    codec = codec_for(folder, config.tokenizer)
    for prompt in prompts:
        prompt.apply_template(codec, config.prompts_file)
        if not prompt.asked and not codec.encode(""):  # no token of the start, either
            which = f"line {prompt.line} of {config.prompts_file}" if config.prompts_file else "the prompt"
            raise RequestError(f"{which} is empty; write some text")
    model = load_model(folder, config.model, codec, config.decode.weights)
    engine = DecodeEngine(model, config.engine(len(prompts) * config.decode.n), codec=codec)
    sampling = engine.requests.defaults.fill(config.sampling())
    if config.decode.n > 1 and not sampling.temperature:
        say_plainly("note: with decode.temperature=0 all samples of a prompt are the same")
    if engine.stats.host_cache_bytes:
        say_plainly(cache_of(engine))
    if config.graph.ahead and engine.config.graphs:
        engine.warm_up(kinds=(kind_of_row(sampling),), prefill=False)
    if config.prompts_file is None and config.decode.n == 1:
        return _stream(engine, config, prompts[0], codec)
    return _many(engine, config, prompts, codec, out)


def generate(config: GenerateConfig, folder: Path, prompts: list[Prompt], out: Path | None) -> int:
    """Goes on from the prompts with the model in `folder`, into the file `out`, or prints the completions; returns the
    exit status. Raises GraphmodError."""
    if out is None or config.prompts_file is None:
        return _run(config, folder, prompts, None)
    with open_output(out, Path(config.prompts_file), config.overwrite) as file:  # the model may take minutes to load
        return _run(config, folder, prompts, file)


# -- one run of `serve.py`: listens, loads the model, serves until a signal says to stop -------------------------------

_TURN = 0.05  # seconds between two looks whether there is something to do
_TO_COUNT = 2  # seconds for the front to say how many requests run
_TO_ABORT = 10  # seconds for the engine to end what it runs


class _Signals:
    """SIGTERM and Ctrl-C: the number of the first is noted, the second calls `last` and ends the process at once."""

    def __init__(self, last: Callable[[], None]) -> None:
        self.number: int | None = None
        self._last = last
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._came)

    def _came(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            os.write(2, b"stopped; what still ran was cut off\n")  # printing may be what was interrupted
            self._last()
            end_at_once(128 + number)
        self.number = number


class _FrontEnded(BaseException):
    """Told by a signal. No `Exception`, which whoever loads a model would take for what is wrong with it."""


@contextlib.contextmanager
def _needs(front: FrontProcess) -> Iterator[None]:
    """Ends what this thread does where the front ends meanwhile, and raises FrontLost: to load a model may take
    minutes."""

    def child_ended(*_: object) -> None:
        if front.has_ended:
            raise _FrontEnded

    try:
        before = signal.signal(signal.SIGCHLD, child_ended)
        try:
            child_ended()
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)
    except _FrontEnded:
        raise FrontLost from None


def _engine(config: ServeConfig, folder: Path) -> DecodeEngine:
    codec = codec_for(folder, config.tokenizer)
    model = load_model(folder, config.model, codec, config.decode.weights)
    engine = DecodeEngine(model, config.engine(), codec=codec)
    engine.requests.grammars.prepare()  # later, requests that run would wait for it
    held = engine.stats.blocks_total * engine.memory.block_size
    if held < engine.max_seq_len:
        say_plainly(f"note: the cache holds {held} tokens; a request for as many runs alone (decode.cache_tokens)")
    if engine.stats.host_cache_bytes:
        say_plainly(cache_of(engine))
    if config.graph.ahead and engine.config.graphs:
        # An emulated graph of prefill is no faster than what it would stand for.
        kinds = [GREEDY, PLAIN, FILTERED]
        kinds += [kind | ADAPTED for kind in kinds if config.decode.max_adapters]
        engine.warm_up(kinds=tuple(kinds), prefill=engine.device.type == "cuda")
    return engine


def _other_weights(source: ModelSource, weights: WeightsName, folder: Path) -> PreTrainedModel:
    try:
        found = model_folder(str(folder))
    except ConfigError as error:  # which names the setting, and says what else the server could start with
        raise ConfigError(re.split("[.;,] (?:[Oo]r )?train ", str(error).replace("model.path=", "path "))[0]) from None
    return _with_weights(load_weights(found, None, _DTYPES[source.precision], setting="path "), weights)


def serve(config: ServeConfig, folder: Path, address: str, front: FrontProcess) -> int:
    """Serves the model in `folder` at an address, where `front` answers; returns the exit status. Raises GraphmodError
    where the model cannot be used, or the front has ended."""
    host = Host(front.work, front.control)
    try:
        say_plainly(f"loading; {address}/health shows when it is ready")
        if config.serve.api_key is None and not ip_address(str(urlsplit(address).hostname)).is_loopback:
            say_plainly("note: anyone who reaches this address can use it; set serve.api_key=KEY to require a key")
        with _needs(front):
            engine = _engine(config, folder)
        signals = _Signals(front.kill)
        with frozen_heap():
            host.begin(engine, partial(_other_weights, config.model, config.decode.weights))
            while not host.ready and signals.number is None:
                host.tend(_TURN)
            if host.ready:
                tell(f"serving {config.name} at {address}")
            while signals.number is None:
                host.tend(_TURN)
            return _drained(host, config.serve.drain_seconds, signals.number)
    except FrontLost as error:
        raise FrontLost(f"{error} {front.status}, and so does this one; start the server again") from None
    finally:
        host.end(0 if isinstance(sys.exception(), KeyboardInterrupt) else _TO_ABORT)


def _drained(host: Host, seconds: float, number: int) -> int:
    """Lets running requests finish, for so many seconds; returns the exit status."""
    host.drain()
    until = time.monotonic() + _TO_COUNT
    while host.left is None and time.monotonic() < until:
        host.tend(_TURN)
    if host.left is None:  # it was stopped, or has no time
        say_plainly("stopped; the process that answers HTTP does not say what was cut off")
        return 128 + number
    if host.left:
        say_plainly(
            f"shutting down; waiting up to {seconds:g} s for {counted(host.left, 'request')}; Ctrl-C ends at once"
        )
    until = time.monotonic() + seconds
    while host.left and time.monotonic() < until:
        host.tend(_TURN)
    if not (left := host.left):
        say_plainly("stopped")
        return 0
    say_plainly(f"stopped; {counted(left, 'request')} cut off")
    return 128 + number
