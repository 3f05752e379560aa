"""What a command of `generate.py` is to do, after its files have been looked at: what is wrong with them is told within
a second. No torch."""

from dataclasses import dataclass
from pathlib import Path

from graphmod.cli.generation.folder import model_folder, require_positions
from graphmod.cli.generation.output import require_free
from graphmod.cli.generation.prompts import Prompt, read_prompts
from graphmod.cli.generation.schema import GenerateConfig
from graphmod.decode.text.codec import tokenizer_folder


@dataclass
class Plan:
    """What is to be done.

    Attributes:
        config: the settings.
        folder: of the model.
        prompts: to go on from.
        out: where completions go; None prints them.
    """

    config: GenerateConfig
    folder: Path
    prompts: list[Prompt]
    out: Path | None = None


def planned(config: GenerateConfig) -> Plan:
    """The plan for these settings. Raises ConfigError for settings or files that cannot be used."""
    config.check()
    if config.prompts_file is None:
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
    return Plan(config, folder, prompts, out)
