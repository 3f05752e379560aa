"""The command line of `generate.py`: composes the config with Hydra, runs it, and words every error.

Exit status: 0 all went well, 1 something failed while generating, 2 the command line, config, model or prompts cannot
be used, 130 interrupted, 141 nobody reads the standard output any more.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from graphmod.cli.environment import require_one_process
from graphmod.cli.explain import explain, refuse_nameless
from graphmod.cli.generation.schema import GenerateConfig
from graphmod.cli.start import loading, shown, version
from graphmod.cli.stdout import OutputError, complain, show
from graphmod.decode.errors import RequestError
from graphmod.errors import ConfigError, GraphmodError

CONFIGS = Path(__file__).parent.resolve() / "configs"
_TEXTS = ("prompt", "prompts_file", "out", "tokenizer", "model.path")
_HELP = """Samples from a causal language model, decode steps in CUDA graphs (emulated where there is no GPU).

  COMMAND model.path=FOLDER prompt="..." [GROUP=CHOICE ...] [KEY=VALUE ...]
  COMMAND model.path=FOLDER prompts_file=FILE [out=FILE]

model.path is a saved transformers model, a checkpoint of a training run, or runs/train for the latest one. A prompt is
streamed; the prompts of a file (one a line, or JSONL with "prompt" or the "messages" of a chat) share batches and are
written as JSONL, to FILE with .out.jsonl in place of its suffix unless out says where. A file that holds something
needs overwrite=true.

Groups and their choices:

  graph: decode (default), none       a decode step is one graph, or plain PyTorch
  decode: greedy (default), sample    the most likely token each time, or temperature 0.8 and top_p 0.95

The most common keys, with an example value:

  decode.max_new_tokens=128     tokens to generate at most
  decode.temperature=0.8        0 takes the most likely token
  decode.top_k=50               draw from the 50 most likely tokens only
  decode.top_p=0.9              draw from the most likely tokens that make up 0.9 only
  decode.n=4 decode.seed=1      samples of each prompt; another seed gives others
  decode.stop=['END','\\n']      texts or token ids that end a sequence; \\n, \\t and \\\\ as in Python
  decode.logprobs=true          print or write the log-probability of each token
  decode.max_batch_size=16      sequences decoded at the same time
  decode.attention=auto         auto | fastest (measures them) | sdpa | flex | flashinfer
  graph.compile=max             on a GPU: none | default | max (minutes to compile, the fastest steps)
  graph.ahead=true              capture all batch sizes before the first prompt
  model.precision=saved         saved | fp32 | bf16
  tokenizer=FOLDER              or bytes; otherwise what the model was saved with
  chat=true                     each prompt is a user's message, put through the tokenizer's chat template

All keys with their values: COMMAND --cfg job"""


def _texts(arguments: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """Texts among the arguments, by key, and the other arguments. Hydra's grammar would want most of them quoted."""
    texts: dict[str, str | None] = {}
    others = []
    for argument in arguments:
        refuse_nameless(argument)
        key, equals, value = argument.partition("=")
        if key in _TEXTS and equals:
            at_home = value.startswith("~/") and key != "prompt"
            texts[key] = None if value == "null" else str(Path(value).expanduser()) if at_home else value
        else:
            others.append(argument)
    return texts, others


def parse(arguments: list[str]) -> GenerateConfig:
    """The typed and checked settings for these arguments.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind, an impossible combination.
    """
    ConfigStore.instance().store(name="generate_schema", node=GenerateConfig)
    texts, others = _texts(arguments)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("generate", overrides=others)
        plain = OmegaConf.to_container(composed, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GenerateConfig), plain))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error, GenerateConfig)) from error
    for key, value in texts.items():
        group, _, name = key.rpartition(".")
        setattr(getattr(config, group) if group else config, name, value)
    return config


def main(arguments: list[str]) -> int:
    """Runs `generate.py` with these arguments; returns the exit status."""
    try:
        if "--version" in arguments:
            show(version())
            return 0
        if {"--help", "-h"} & set(arguments):
            show(_HELP.replace("COMMAND", shown("generate")))
            return 0
        require_one_process("graphmod generate works in one; give it one GPU")
        if "--cfg" in arguments:
            at = arguments.index("--cfg")
            show(OmegaConf.to_yaml(OmegaConf.structured(parse(arguments[:at] + arguments[at + 2 :]))))
            return 0
        config = parse(arguments)
        config.check()  # before PyTorch is loaded
        with loading():
            from graphmod.cli.generation.run import generate
        return generate(config)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ConfigError, RequestError) as error:
        complain(error)
        return 2
    except BrokenPipeError:  # as with `| head`, where nothing is wrong
        return 128 + 13  # what a shell says of a program that SIGPIPE ended
    except OutputError as error:
        complain(error)
        return 1
    except (GraphmodError, OSError) as error:
        complain(error)
        return 1
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which may not be loaded
            line = str(error).splitlines()[0]
            complain(f"out of GPU memory; lower decode.max_batch_size or decode.max_seq_len. {line}")
            return 1
        traceback.print_exc()
        complain("this is a bug in graphmod or in a library it uses; the lines above show where")
        return 1
