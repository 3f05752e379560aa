"""What HTTP costs: the same requests through the engine alone and through the server, and how soon a first token comes.

    python benchmarks/serve.py --out benchmarks/results/serve.json
    python benchmarks/serve.py --compile default --out benchmarks/results/serve_compiled.json
    python benchmarks/serve.py --smoke             # a tiny model on the CPU, to see that everything runs

Qwen3-0.6B's shape with random bf16 weights; the 256 requests of `benchmarks/decode.py --shapes ragged`, all sent at
once by a client in a process of its own.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.decode_shapes import SHAPES, SMOKE, build, progress, prompts, synchronize  # noqa: E402

_ROUNDS = 7
_LIGHT = 20  # requests that come one after the other


def codec_of(vocabulary: int) -> Any:
    """A byte-level tokenizer of as many tokens as the model has, each a short word."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from graphmod.text import TokenizerCodec

    made = Tokenizer(models.BPE({f"Ġ{number:x}": number for number in range(vocabulary)}, []))
    made.decoder = decoders.ByteLevel()
    return TokenizerCodec(PreTrainedTokenizerFast(tokenizer_object=made))


# -- the client, in a process of its own --------------------------------------------------------------------------


async def ask(port: int, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds until the first of its events, or all of its answer, was there; and how many events there were."""
    began, first, events = time.perf_counter(), None, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    given = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-length: {len(given)}\r\n\r\n"
    writer.write(head.encode() + given)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read()!r}")
    while line := await reader.readline():
        if line.startswith((b"data:", b"{")):
            first = first or time.perf_counter() - began
            events += 1
    writer.close()
    return first or 0.0, events


async def ask_all(port: int, bodies: list[dict[str, Any]], one_by_one: bool) -> dict[str, Any]:
    began = time.perf_counter()
    if one_by_one:
        found = [await ask(port, body) for body in bodies]
    else:
        found = await asyncio.gather(*(ask(port, body) for body in bodies))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "first_ms": statistics.median(first for first, _ in found) * 1e3,
            "events": sum(events for _, events in found)}  # fmt: skip


def client() -> None:
    """Answers each line of jobs with a line of results."""
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(asyncio.run(ask_all(**job))), flush=True)


# -- the server ---------------------------------------------------------------------------------------------------


async def through_http(client: Any, **job: Any) -> dict[str, Any]:
    client.stdin.write(json.dumps(job).encode() + b"\n")
    await client.stdin.drain()
    return json.loads(await client.stdout.readline())


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of all but the first."""
    return sorted(rounds[1:], key=lambda one: one["seconds"])[(len(rounds) - 1) // 2]


async def measure(shape: dict[str, Any], compile_mode: str, device: str) -> dict[str, Any]:
    from benchmarks.decode_ragged import ragged_requests
    from graphmod.decode import DecodeEngine
    from graphmod.trace.garbage import frozen_heap

    model = build(shape, device)
    vocabulary = model.config.vocab_size
    given, new = ragged_requests(shape, vocabulary)
    batch = shape["batch"]
    engine = DecodeEngine(
        model,
        codec=codec_of(vocabulary),
        max_batch_size=batch,
        max_seq_len=shape["max_seq_len"],
        buckets=[1, *(size for size in (32, 64, 96) if size < batch)],
        compile=compile_mode,
        frozen=True,  # as `graphmod serve` has it
    )
    engine.warm_up(max_context=shape["prompt"] + shape["new"], progress=False)
    progress("captured")
    with frozen_heap():  # as `graphmod serve` does
        found = await beside_http(engine, shape, given, new)
    return {"tokens": sum(new), "rows": batch, "compile": compile_mode, "attention": engine.attention.name, **found}


@contextlib.contextmanager
def serving(engine: Any, max_waiting: int) -> Iterator[int]:
    """The port at which an engine is served meanwhile, as `graphmod serve` does it."""
    from graphmod.serve.engine_side import FrontProcess, Host, bound
    from graphmod.serve.settings import ServeSettings

    with tempfile.TemporaryDirectory() as folder:
        engine.requests.codec.tokenizer.save_pretrained(folder)
        listening = bound("127.0.0.1", 0)
        port = listening.getsockname()[1]
        with FrontProcess(ServeSettings(max_waiting=max_waiting), "model", Path(folder), None, listening) as front:
            host, over = Host(front.work, front.control), threading.Event()
            host.begin(engine)
            while not host.ready:
                host.tend(1)

            def tend() -> None:
                while not over.is_set():
                    host.tend(0.05)

            tending = threading.Thread(target=tend)
            tending.start()
            try:
                yield port
            finally:
                over.set()
                tending.join()
                host.end(10)


async def beside_http(engine: Any, shape: dict[str, Any], given: list[list[int]], new: list[int]) -> dict[str, Any]:
    """What an engine takes for requests alone, and through HTTP."""
    from graphmod.decode import Sampling

    useful = sum(new)
    sampling = [Sampling(max_new_tokens=count) for count in new]
    alone = []
    for _ in range(_ROUNDS + 1):
        synchronize()
        began = time.perf_counter()
        engine.generate(given, sampling=sampling)
        alone.append({"seconds": time.perf_counter() - began})
        progress(f"engine alone: {useful / alone[-1]['seconds']:.0f} tokens/s")
    light = prompts(_LIGHT, min(128, shape["prompt"]), engine.model.config.vocab_size)
    first = []
    for prompt in light:
        began = time.perf_counter()
        handle = engine.submit(prompt, max_new_tokens=9)
        while not handle.completions[0].tokens:
            engine.step()
        first.append((time.perf_counter() - began) * 1e3)
        while not handle.done:
            engine.step()

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--client"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    result: dict[str, Any] = {}
    with serving(engine, max_waiting=2 * len(given)) as port:
        seconds = best(alone)["seconds"]
        result["engine"] = {"seconds": seconds, "tokens_per_s": useful / seconds}
        for stream in (True, False):
            bodies = [
                {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": stream}
                for prompt, count in zip(given, new, strict=True)
            ]
            rounds = []
            for _ in range(_ROUNDS + 1):
                rounds.append(await through_http(process, port=port, bodies=bodies, one_by_one=False))
                progress(f"HTTP, {'streamed' if stream else 'whole'}: {useful / rounds[-1]['seconds']:.0f} tokens/s")
            found = best(rounds)
            share = seconds / found["seconds"]
            name = "streamed" if stream else "whole"
            result[name] = {**found, "tokens_per_s": useful / found["seconds"], "of_engine": share}
        bodies = [{"prompt": prompt, "max_tokens": 9, "temperature": 0, "stream": True} for prompt in light]
        await through_http(process, port=port, bodies=bodies, one_by_one=True)
        served = await through_http(process, port=port, bodies=bodies, one_by_one=True)
        result["light_load"] = {
            "engine_first_token_ms": statistics.median(first),
            "http_first_token_ms": served["first_ms"],
        }
    process.stdin.close()
    await process.wait()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--compile", default="none", choices=("none", "default", "max"), help="of the engine's steps")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client()
        return 0
    from benchmarks.measure import save
    from benchmarks.options import gpu_is_there

    if not options.smoke and not gpu_is_there():
        return 2
    shape = (
        {**SMOKE["ragged"], "requests": 128, "batch": 64, "new": 64, "max_seq_len": 128}
        if options.smoke
        else SHAPES["ragged"]
    )
    result = asyncio.run(measure(shape, options.compile, "cpu" if options.smoke else "cuda"))
    print(json.dumps(result, indent=1))
    save(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
