"""What `serve.py` does: checks its settings and files, and loads PyTorch for what is left to do."""

from pathlib import Path

from graphmod.cli.environment import require_one_process
from graphmod.cli.generation.folder import model_folder
from graphmod.cli.serving.schema import ServeConfig
from graphmod.cli.settings import Asked, Program
from graphmod.cli.start import loading
from graphmod.decode.text.codec import tokenizer_folder
from graphmod.errors import ConfigError

SERVE = Program(
    name="serve",
    kind=ServeConfig,
    configs=Path(__file__).parent.resolve() / "configs",
    texts=("serve.api_key", "serve.model_name"),
    paths=("tokenizer", "model.path"),
    smaller="decode.max_batch_size, decode.max_seq_len or decode.cache_tokens",
)
_EXTRA = ("fastapi", "uvicorn", "starlette", "pydantic", "prometheus_client")


def parse(arguments: list[str]) -> ServeConfig:
    """The typed settings for these arguments. Raises ConfigError."""
    return _settings(SERVE.read(arguments))


def _settings(asked: Asked) -> ServeConfig:
    return SERVE.typed(SERVE.compose(*asked.jobs())[0])


def _serve(asked: Asked) -> int:
    require_one_process("graphmod serve works in one; give it one GPU")
    config = _settings(asked)
    config.check()
    folder = model_folder(config.model.path)
    tokenizer_folder(folder, config.tokenizer)
    try:
        with loading():
            from graphmod.cli.serving.run import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ConfigError(
            f"serving needs {error.name}, which is not installed: pip install 'graphmod[serve]'"
        ) from None
    return serve(config, folder)


def main(arguments: list[str]) -> int:
    """Runs `serve.py` with these arguments; returns the exit status."""
    return SERVE.run(arguments, _serve)
