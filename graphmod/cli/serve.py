"""What `serve.py` does: checks its settings and files, and loads PyTorch for what is left to do."""

import os
from contextlib import closing
from importlib.util import find_spec
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from graphmod.cli.app import App, CommandCallback
from graphmod.cli.settings import ServeConfig, model_folder, require_positions
from graphmod.cli.start import loading, require_one_process
from graphmod.errors import ConfigError, install
from graphmod.serve.engine_side import FrontProcess, bound, url
from graphmod.text import tokenizer_folder

_EXTRA = ("starlette", "pydantic", "uvicorn", "httptools", "prometheus_client")


class ServeCallback(CommandCallback):
    """A server is one job."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Raises ConfigError."""
        raise ConfigError("graphmod serve runs one server; drop --multirun, and give each setting one value")


def _task(settings: DictConfig) -> None:
    os.chdir(HydraConfig.get().runtime.cwd)  # paths are those of where the command was typed
    require_one_process("graphmod serve runs in one; give it one GPU")
    config = SERVE.typed(settings)
    config.check()
    folder = model_folder(config.model.path)
    tokenizer_folder(folder, config.tokenizer)
    require_positions(folder, config.decode.max_seq_len)
    if missing := next((name for name in _EXTRA if find_spec(name) is None), None):
        raise ConfigError(f"serving needs {missing}, which is not installed: {install('serve')}")
    with closing(bound(config.serve.host, config.serve.port)) as listening:  # before PyTorch is loaded
        address = url(listening)
        front = FrontProcess(config.serve, config.name, folder, config.tokenizer, listening)
    with front:
        with loading():
            from graphmod.cli.decode import serve
        status = serve(config, folder, address, front)
    if status:
        raise SystemExit(status)


SERVE = App(
    name="serve",
    kind=ServeConfig,
    texts=("serve.host", "serve.api_key", "serve.model_name"),
    smaller="decode.max_batch_size, decode.max_seq_len or decode.cache_tokens",
)


def main(arguments: list[str]) -> int:
    """Runs `serve.py` with these arguments; returns the exit status."""
    return SERVE.run(arguments, _task)
