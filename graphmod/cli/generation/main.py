"""What `generate.py` does: checks its settings and files, and loads PyTorch for what is left to do."""

import os

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from graphmod.cli.app import App
from graphmod.cli.generation.plan import planned
from graphmod.cli.generation.schema import GenerateConfig
from graphmod.cli.start import loading, require_one_process


def _task(settings: DictConfig) -> None:
    os.chdir(HydraConfig.get().runtime.cwd)  # paths are those of where the command was typed
    require_one_process("graphmod generate runs in one; give it one GPU")
    plan = planned(GENERATE.typed(settings))  # before PyTorch is loaded
    with loading():
        from graphmod.cli.generation.run import generate
    if status := generate(plan):
        raise SystemExit(status)


GENERATE = App(
    name="generate",
    kind=GenerateConfig,
    texts=("prompt",),
    smaller="decode.max_batch_size, decode.max_seq_len or decode.cache_tokens",
)


def main(arguments: list[str]) -> int:
    """Runs `generate.py` with these arguments; returns the exit status."""
    return GENERATE.run(arguments, _task)
