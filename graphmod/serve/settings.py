"""The settings of a server: names, types, defaults and meaning. No PyTorch, no web library."""

import re
from dataclasses import dataclass, field

from graphmod.decode.types import GenerationConfigName
from graphmod.errors import ConfigError


@dataclass
class ServeSettings:
    """How a server is reached, and how much it takes on.

    Attributes:
        host: the address it listens on; 127.0.0.1 is reached from this machine alone, 0.0.0.0 from others too.
        port: 0 takes any free one, and says which.
        api_key: what clients have to send as `Authorization: Bearer KEY`; null asks for none.
        model_name: what requests call the model; null takes the name of the folder in `model.path`.
        manage: let clients put the engine to sleep, empty its cache, change its weights and load adapters.
        cors_origins: whose pages browsers let read answers, such as http://localhost:3000; "*" is all pages, and none
            those of this server alone.
        max_waiting: completions that may wait for a row of the batch; what comes on top gets 429.
        max_body_bytes: of a request.
        default_max_tokens: tokens of a chat's answer where the request does not say how many.
        drain_seconds: how long running requests may take to finish after SIGTERM or Ctrl-C.
        enforce_eager: decode without graphs, as with graph=none.
        generation_config: `auto` takes temperature, top_k and top_p of requests that do not say them from the model's
            generation_config.json; `none` takes 1, 0 (all) and 1.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_name: str | None = None
    manage: bool = False
    cors_origins: list[str] = field(default_factory=list)
    max_waiting: int = 256
    max_body_bytes: int = 4_000_000
    default_max_tokens: int = 1024
    drain_seconds: float = 30.0
    enforce_eager: bool = False
    generation_config: GenerationConfigName = GenerationConfigName.auto

    def check(self) -> None:
        """Raises ConfigError for what is out of range."""
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"serve.port must be 0 (any free one) to 65535, got {self.port}")
        for name, least in (("max_waiting", 0), ("max_body_bytes", 1), ("default_max_tokens", 1), ("drain_seconds", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"serve.{name} must be at least {least}, got {getattr(self, name)}")
        if self.api_key == "" or not (self.api_key or "").isascii():
            raise ConfigError("serve.api_key must be a word of ASCII characters; leave it out to ask for none")
        for one in self.cors_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", one):
                raise ConfigError(
                    f"serve.cors_origins must hold origins such as http://localhost:3000, without a path, or '*', got "
                    f"{one!r}"
                )
