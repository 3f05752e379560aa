"""One run of `generate.py`: loads the model, streams one prompt or writes many completions, and says how fast."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from graphmod.cli.generation.loading import cache_of, load_model
from graphmod.cli.generation.output import OutputFile, open_output
from graphmod.cli.generation.prompts import Prompt, line_of
from graphmod.cli.generation.schema import GenerateConfig
from graphmod.cli.stdout import OutputError, complain, show
from graphmod.config import CompileMode
from graphmod.decode.batching.scheduler import kind_of_row
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.errors import RequestError
from graphmod.decode.results import Completion
from graphmod.decode.text.codec import Codec, codec_for
from graphmod.decode.text.stream import TextStream
from graphmod.words import counted


def speed_of(tokens: int, seconds: float, engine: DecodeEngine) -> str:
    stats = engine.stats
    speed = f"{counted(tokens, 'token')} in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
    if stats.attention_us:
        measured = ", ".join(f"{name} {us:.1f} us" for name, us in stats.attention_us.items())
        speed += f"; attention, per layer: {measured}"
    eager = counted(stats.total("eager_steps"), "eager step")
    if not engine.config.graphs:
        return f"{speed}; without graphs: {eager}"
    launches = counted(stats.total("launches"), "launch")
    captures = f"{counted(stats.total('captures'), 'capture')} in {stats.capture_seconds:.2f} s"
    return f"{speed}; graphs {stats.state}: {launches}, {eager}, {captures}"


def _is_shortened(reason: str | None, prompt: int, tokens: int, asked: int, engine: DecodeEngine) -> bool:
    """Whether a sample has fewer tokens than were asked for because a sequence may have no more."""
    return reason == "length" and tokens < asked and prompt + tokens >= engine.max_seq_len


def _say_shortened(count: int, asked: int, engine: DecodeEngine) -> None:
    if count:
        said = f"a sequence has at most {engine.max_seq_len:,} tokens, its prompt included"
        who = "it" if count == 1 else f"{count:,} samples"
        print(f"note: {said}, so {who} ended before decode.max_new_tokens={asked}", file=sys.stderr, flush=True)


def _stream(engine: DecodeEngine, config: GenerateConfig, prompt: Prompt, codec: Codec) -> int:
    """Prints one prompt and what follows, as it comes; of a chat the answer alone."""
    (asked,) = engine.requests.sequences(0, prompt.asked, 1, config.sampling())
    ids = asked.completion.prompt
    if engine.config.graphs:
        if engine.config.compile is not CompileMode.none and engine.device.type == "cuda":
            print("compiling decode steps; this takes a while", file=sys.stderr, flush=True)
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
            print(speed_of(tokens, time.perf_counter() - began, engine), file=sys.stderr, flush=True)
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
                if not finished:
                    out.begin()
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
                print(done, file=sys.stderr)
                _say_shortened(shortened, config.decode.max_new_tokens, engine)
                print(speed_of(tokens, time.perf_counter() - began, engine), file=sys.stderr, flush=True)
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
    model = load_model(folder, config.model, codec)
    engine = DecodeEngine(model, config.engine(len(prompts) * config.decode.n), codec=codec)
    sampling = engine.requests.defaults.fill(config.sampling())
    if config.decode.n > 1 and not sampling.temperature:
        print("note: with decode.temperature=0 all samples of a prompt are the same", file=sys.stderr, flush=True)
    if engine.stats.host_cache_bytes:
        print(cache_of(engine), file=sys.stderr, flush=True)
    if config.graph.ahead and engine.config.graphs:
        engine.warm_up(kinds=(kind_of_row(sampling),), prefill=False)
    if config.prompts_file is None and config.decode.n == 1:
        return _stream(engine, config, prompts[0], codec)
    return _many(engine, config, prompts, codec, out)


def generate(config: GenerateConfig, folder: Path, prompts: list[Prompt], out: Path | None) -> int:
    """Goes on from the prompts; returns the exit status. Raises GraphmodError.

    Args:
        folder: of the model.
        out: where completions go; None prints them.
    """
    if out is None or config.prompts_file is None:
        return _run(config, folder, prompts, None)
    with open_output(out, Path(config.prompts_file), config.overwrite) as file:  # the model may take minutes to load
        return _run(config, folder, prompts, file)
