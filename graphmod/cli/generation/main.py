"""What `generate.py` does: checks its settings and files, and loads PyTorch for what is left to do."""

from pathlib import Path

from graphmod.cli.environment import require_one_process
from graphmod.cli.generation.plan import planned
from graphmod.cli.generation.schema import GenerateConfig
from graphmod.cli.settings import Asked, Program
from graphmod.cli.start import loading

GENERATE = Program(
    name="generate",
    kind=GenerateConfig,
    configs=Path(__file__).parent.resolve() / "configs",
    texts=("prompt",),
    paths=("prompts_file", "out", "tokenizer", "model.path"),
    smaller="decode.max_batch_size, decode.max_seq_len or decode.cache_tokens",
)


def parse(arguments: list[str]) -> GenerateConfig:
    """The typed settings for these arguments. Raises ConfigError."""
    return _settings(GENERATE.read(arguments))


def _settings(asked: Asked) -> GenerateConfig:
    return GENERATE.typed(GENERATE.compose(*asked.jobs())[0])


def _generate(asked: Asked) -> int:
    require_one_process("graphmod generate runs in one; give it one GPU")
    plan = planned(_settings(asked))  # before PyTorch is loaded
    with loading():
        from graphmod.cli.generation.run import generate
    return generate(plan)


def main(arguments: list[str]) -> int:
    """Runs `generate.py` with these arguments; returns the exit status."""
    return GENERATE.run(arguments, _generate)
