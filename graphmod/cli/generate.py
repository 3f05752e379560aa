"""What `generate.py` does: checks its settings and files, and loads PyTorch for what is left to do."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from graphmod.cli.app import App
from graphmod.cli.prompts import Prompt, read_prompts, require_free
from graphmod.cli.settings import GenerateConfig, model_folder, require_positions
from graphmod.cli.start import loading, require_one_process, require_stdout
from graphmod.text import tokenizer_folder


def _task(settings: DictConfig) -> None:
    os.chdir(HydraConfig.get().runtime.cwd)  # paths are those of where the command was typed
    require_one_process("graphmod generate runs in one; give it one GPU")
    config = GENERATE.typed(settings)
    config.check()
    if config.prompts_file is None:
        require_stdout("the text")
        prompts, out = [Prompt(config.prompt or "")], None
    else:
        source = Path(config.prompts_file)
        prompts = read_prompts(source)
        out = Path(config.out) if config.out else source.with_suffix(".out.jsonl")
        require_free(out, source, config.overwrite)
    if config.chat:
        prompts = [prompt.as_chat() for prompt in prompts]
    folder = model_folder(config.model.path)
    tokenizer_folder(folder, config.tokenizer)
    require_positions(folder, config.decode.max_seq_len)
    with loading():
        from graphmod.cli.decode import generate
    if status := generate(config, folder, prompts, out):
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
