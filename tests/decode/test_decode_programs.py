"""Programs at random: each request that runs with one set of weights has the tokens that it has alone with them."""

import random
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch

from graphmod.decode import DecodeEngine, EngineLoop
from graphmod.text import ByteCodec
from tests.support.decode_models import prompts_of, tiny_model

CPU = torch.device("cpu")
(SHARED,) = prompts_of(20)
PROMPTS = [[*SHARED[:8], 5], [*SHARED[:8], 6], SHARED, SHARED[:17], *prompts_of(3, 11)]
FORMS = [None, None, {"regex": "([0-9A-F]+G)*"}, {"choice": ["YES", "NO"]}] if find_spec("llguidance") else [None]
MOVES = {
    **{"submit": 8, "step": 12, "abort": 2, "pause": 1, "exchange": 2, "train": 1, "suspend": 1},
    **{"stream": 3, "read": 4, "close": 2, "generate": 2, "threads": 1},
}


@lru_cache
def alone():
    model = tiny_model("qwen3", CPU, scale=1.5)
    return DecodeEngine(model, max_batch_size=1, max_seq_len=64, graphs=False, codec=ByteCodec())


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Program:
    """One engine and what happens to it.

    Args:
        seed: of what happens.
    """

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        self.model = tiny_model("qwen3", CPU, scale=1.5)
        self.model.train(chance.random() < 0.5)
        self.mode = self.model.training
        self.engine = DecodeEngine(
            self.model,
            max_batch_size=chance.randint(1, 5),
            max_seq_len=64,
            block_size=4,
            cache_tokens=(10 + chance.randint(0, 30)) * 4,
            steps_per_sync=chance.randint(1, 4),
            prefill_tokens=chance.choice([3, 16, 64]),
            keep_prefixes=chance.random() < 0.6,
            graphs=chance.random() < 0.5,
            codec=ByteCodec(),
        )
        self.state = copied(self.model)
        self.asked, self.streams = [], []

    def run(self):
        for move in self.chance.choices([*MOVES], [*MOVES.values()], k=self.chance.randint(5, 30)):
            getattr(self, move)()
            assert self.model.training == self.mode and not torch.is_inference_mode_enabled(), move
        self.streams.clear()
        self.finish()
        self.check()
        stats = self.engine.stats
        assert stats.blocks_used == stats.waiting == stats.running == stats.total("failures") == 0

    def request(self):
        settings = {"max_new_tokens": self.chance.randint(1, 20), "temperature": self.chance.choice([0.0, 0.8])}
        settings |= {"seed": self.chance.randrange(9), "top_k": self.chance.choice([0, 0, 7])}
        settings |= {"structured_outputs": self.chance.choice(FORMS)}
        return self.chance.choice(PROMPTS), self.chance.randint(1, 3), settings

    def finish(self):
        while self.engine.unfinished:
            self.step()

    def check(self):
        """Compares what has ended with what the requests get alone; what has not is forgotten."""
        alone().model.load_state_dict(self.state)
        for handle, (prompt, n, settings) in self.asked:
            if not handle.done:
                continue
            assert handle.error is None
            for done, want in zip(handle.completions, alone().generate([prompt], n, **settings), strict=True):
                ended = done.finish_reason != "abort"
                assert done.tokens == (want.tokens if ended else want.tokens[: len(done.tokens)])
                assert not ended or done.finish_reason == want.finish_reason
        self.asked.clear()

    def submit(self):
        prompt, n, settings = self.request()
        self.asked.append((self.engine.submit(prompt, n, **settings), (prompt, n, settings)))

    def step(self):
        self.engine.step()

    def abort(self):
        if self.asked:
            self.engine.abort(self.chance.choice(self.asked)[0])

    def pause(self):
        with self.engine.pause():
            pass

    def suspend(self):
        self.finish()
        self.engine.suspend(self.chance.choice(["none", "graphs"] if sys.platform == "linux" else ["none"]))
        self.engine.resume()

    def stream(self):
        prompt, n, settings = self.request()
        self.streams.append(self.engine.stream([prompt], n, **settings))
        self.asked.append((self.streams[-1].handle, (prompt, n, settings)))

    def read(self):
        if self.streams:
            next(self.chance.choice(self.streams), None)

    def close(self):
        if self.streams:
            stream = self.streams.pop(self.chance.randrange(len(self.streams)))
            if self.chance.random() < 0.5:
                stream.close()  # else it is closed because nobody holds it

    def generate(self):
        prompt, n, settings = self.request()
        handle = self.engine.submit(prompt, n, **settings)
        while not handle.done:
            self.engine.step()
        self.asked.append((handle, (prompt, n, settings)))

    def threads(self):
        loop, requests = EngineLoop(self.engine), [(self.request(), self.chance.random() < 0.2) for _ in range(4)]

        def client(prompt, n, settings, leaves):
            handle = loop.submit(prompt, n, **settings)
            self.asked.append((handle, (prompt, n, settings)))
            if leaves:
                loop.abort(handle)
            handle.wait(60)

        threads = [threading.Thread(target=client, args=(*request, leaves)) for request, leaves in requests]
        for thread in threads:
            thread.start()
        self.pause()
        for thread in threads:
            thread.join()
        loop.close()

    def changed(self):
        """What has ended until now had the weights until now."""
        if self.chance.random() < 0.5:
            self.finish()
        self.check()

    def train(self):
        self.changed()
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, self.chance.choice([-0.01, 0.01]))
        torch.optim.SGD(self.model.parameters(), lr=1.0).step()
        self.model.zero_grad()
        self.state = copied(self.model)

    def exchange(self):
        self.changed()
        self.state = copied(tiny_model("qwen3", CPU, seed=self.chance.randrange(4), scale=1.5))
        how = self.chance.choice(["copied", "exchanged", "data exchanged", "data copied"])
        if how in ("copied", "exchanged"):
            given = {name: value.clone() for name, value in self.state.items()}
            self.model.load_state_dict(given, assign=how == "exchanged")
        elif how == "data exchanged":
            for name, parameter in self.model.named_parameters():
                parameter.data = self.state[name].clone()
        else:
            with self.engine.pause():  # which nothing else would tell
                for name, parameter in self.model.named_parameters():
                    parameter.data.copy_(self.state[name])


@pytest.mark.parametrize("seed", range(2, 5))
def test_a_program_at_random(seed):
    Program(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_more_programs_at_random(seed):
    Program(seed).run()
