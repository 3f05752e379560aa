"""A server in the process of the test, front and engine, and what asks it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from functools import lru_cache

import openai
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod.decode import DecodeEngine
from graphmod.serve.app import Front
from graphmod.serve.engine_side import FrontProcess, Host, bound, url
from graphmod.serve.settings import ServeSettings
from graphmod.text import TokenizerCodec
from tests.support.made_tokenizers import CHAT_TEMPLATE, llama_like

POSITIONS = 512


def tokenizer():
    made = llama_like()
    made.chat_template = CHAT_TEMPLATE
    return made


def chat_model(vocabulary=None):
    """A tiny Llama with random weights, always the same; its texts are nonsense, and rarely end by themselves."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer()),
        max_position_embeddings=POSITIONS,
        num_key_value_heads=2,
        **sizes,
        **ends,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


@lru_cache
def alone():
    """An engine for the same model without graphs and without a server: what it makes of a request is expected of a
    server with `max_batch_size=4`."""
    return Served.engine_of(chat_model(), tokenizer(), max_batch_size=4, graphs=False)


class Served:
    """A server of a model. Use as a context.

    Args:
        model: to serve.
        words: its tokenizer.
        settings: of the server, a dict; port 0 and a queue of 400 are the defaults.
        engine: settings of the engine.
    """

    load = None  # reads a model from a folder, for other weights

    def __init__(self, model, words, settings=None, **engine):
        self.engine = self.engine_of(model, words, keep_prefixes=True, **engine)
        listening = bound("127.0.0.1", 0)
        self.url, self.port = url(listening), listening.getsockname()[1]
        self._tending, self._ended = threading.Thread(target=self._tend), False
        self._make_front(ServeSettings(**{"port": 0, "max_waiting": 400} | (settings or {})), listening)

    def _make_front(self, settings, listening):
        (work, to_work), (control, to_control) = socket.socketpair(), socket.socketpair()
        self.host = Host(work, control)
        self.front = Front(settings, "tiny", lambda: self.engine.requests.codec, listening, to_work, to_control)
        self.service, self.app = self.front.service, self.front.app

    @staticmethod
    def engine_of(model, words, **engine):
        codec = words if hasattr(words, "encode_as_is") or not hasattr(words, "added_tokens_decoder") else None
        return DecodeEngine(model, codec=codec or TokenizerCodec(words), **engine)

    def start(self):
        """From now on it answers, that the model is being loaded."""
        self.front.start()

    def __enter__(self):
        self.start()
        self.begin()
        return self

    def begin(self):
        self.host.begin(self.engine, self.load)
        while not self.host.ready:
            self.host.tend(1)
        self._tending.start()

    def _tend(self):
        while not self._ended:
            self.host.tend(0.02)

    def __exit__(self, *_):
        self.end()

    def end(self):
        """Ends what runs, and the server."""
        self._ended = True
        if self._tending.ident is not None:
            self._tending.join()
        self.host.end(10)
        self._end_front()

    def _end_front(self):
        self.front.join(10)

    def client(self, key="none", **settings):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60} | settings)

    def post(self, path, body, **headers):
        """The status, the body as JSON, and the headers of the answer to a body of JSON, or of bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            given = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, given, {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers

    def get(self, path, **headers):
        return self.ask("GET", path, **headers)[:2]

    def ask(self, method, path, **headers):
        """The status, the body as text, and the headers of the answer to a request without a body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def metric(self, name):
        """The sum of a metric over its labels."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if line.partition("{")[0].split()[0] == name]
        return sum(float(line.split()[-1]) for line in lines)

    def raw(self, body, path="/v1/completions"):
        """A socket that has sent a request and read nothing."""
        given = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(given)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(head.encode() + given)
        return connection

    def wait_until(self, condition, seconds=20):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not happen"
            time.sleep(0.02)

    def wait_until_idle(self):
        """Returns once nothing runs, nothing waits, and all blocks are free."""
        self.wait_until(lambda: not self.service.admission.requests and not self.metric("graphmod_blocks_used"))


class Apart(Served):
    """Likewise with the front in a process of its own, as `graphmod serve` has it.

    Args:
        folder: with the tokenizer.
    """

    def __init__(self, folder, *given, **engine):
        self._folder = folder
        super().__init__(*given, **engine)

    def _make_front(self, settings, listening):
        self.process = FrontProcess(settings, "tiny", self._folder, None, listening)
        self.host = Host(self.process.work, self.process.control)

    def start(self):
        def answers():
            with contextlib.suppress(ConnectionError):
                return self.get("/health")

        self.wait_until(answers)

    def _end_front(self):
        self.process.end()

    def wait_until_idle(self):
        self.wait_until(lambda: not sum(self.metric(f"graphmod_{n}") for n in ("waiting", "running", "blocks_used")))
