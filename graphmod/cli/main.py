"""The console command `graphmod`, and the commands behind `train.py`, `generate.py` and `serve.py`.

Each command is imported when it is asked for; PyTorch later still, when there is something to compute.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial

from graphmod.cli.start import answer, complain, loading, prepare, shown, version
from graphmod.words import nearest

_HELP = """CUDA graphs for PyTorch: training and text generation (inference, decoding).

  graphmod train [GROUP=CHOICE ...] [KEY=VALUE ...]     train a causal language model
  graphmod compare [GROUP=CHOICE ...] [KEY=VALUE ...]   the same run without graphs, per layer and as one graph
  graphmod generate model.path=FOLDER prompt="..."      generate text with a trained model
  graphmod serve model.path=FOLDER                      serve it over HTTP, as OpenAI's API does
  graphmod check package.module:function                what would keep a training step out of CUDA graphs
  graphmod --version

graphmod COMMAND --help says more about each."""
_COMPARE_HELP = """Trains the same model several times and compares the runs: step times, memory, losses.

  {command} [GROUP=CHOICE ...] [KEY=VALUE ...]

By default there are three short runs with the same seed: graph=none (plain PyTorch), graph=per_layer (each layer is a
graph) and graph=full_iteration (the whole step is one graph). At the end a table shows how much faster the graphs are,
and whether their losses are those of plain PyTorch, bit for bit. The table, a picture and the runs go to
runs/compare/DATE_TIME.

The arguments are the settings of {train}, for all runs. A setting with several values, separated by commas,
makes a run of each. {train} --help lists the settings.

This is short for:

  {train} --multirun {defaults}

Examples:

  {command}
  {command} model=llama_124m data.seq_len=1024       with another model
  {command} graph=none,full_iteration                without per_layer
  {command} data.batch_size=1,8,32                   each scope with each batch size
  {command} train.steps=300                          longer runs (the default is 100 steps)

A GPU is needed to see a difference: on a CPU, graphs are emulated and nothing gets faster."""
_COMPARED = {"graph": "none,per_layer,full_iteration", "train": "measure", "train.deterministic": "true"}


def _run(home: str, arguments: list[str]) -> int:
    """Runs the command that a module has; returns the exit status."""
    prepare()
    with loading():
        main = importlib.import_module(home).main
    return main(arguments)


train = partial(_run, "graphmod.cli.train")
generate = partial(_run, "graphmod.cli.generate")
serve = partial(_run, "graphmod.cli.serve")
check = partial(_run, "graphmod.check.cli")


def compare(arguments: list[str]) -> int:
    """`graphmod compare`: a multirun over the scopes, unless the arguments choose otherwise."""
    if {"--help", "-h"} & {*arguments}:
        said = " ".join(f"{key}={value}" for key, value in _COMPARED.items())
        return answer(_COMPARE_HELP.format(command=shown("compare"), train=shown("train"), defaults=said))
    if {"--cfg", "-c", "--info", "-i"} & {*arguments}:  # a question about one run
        return train([f"{key}={value}" for key, value in _COMPARED.items() if key != "graph"] + arguments)
    given = {argument.partition("=")[0] for argument in arguments}
    defaults = [f"{key}={value}" for key, value in _COMPARED.items() if key not in given]
    return train(["--multirun", *defaults, *arguments])


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "compare": compare,
    "generate": generate,
    "serve": serve,
    "check": check,
}


def _complete(arguments: list[str]) -> int:
    """What a shell asks for completion: `graphmod -sc query=bash`, with the line so far in the environment. Hydra's
    completion takes the first word of a line for the whole name of a command, which here has two."""
    program, _, rest = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    name, space, rest = rest.lstrip().partition(" ")
    if not space and not any(one.startswith(("install", "uninstall")) for one in arguments):
        return answer(" ".join(command for command in COMMANDS if command.startswith(name)))
    if name == "check":  # whose arguments are not Hydra's
        return 0
    os.environ["COMP_LINE"] = f"{program} {rest}"
    return (train if name == "compare" else COMMANDS.get(name, train))(arguments)


def main() -> int:
    """Runs the console command with the arguments in `sys.argv`; returns the exit status.

    0 means that all went well, 2 that there is no such command; the commands say what theirs mean.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        return answer(_HELP)
    if name == "--version":
        return answer(version())
    if name in ("-sc", "--shell-completion"):
        return _complete([name, *arguments])
    if name not in COMMANDS and "=" in name:
        complain(f"a command comes first: {shown('train')} {name}")
        return 2
    if name not in COMMANDS:
        best = nearest(name, [*COMMANDS])
        hint = f"; did you mean {best!r}?" if best else ""
        complain(f"there is no command {name!r}{hint}\n  commands: {', '.join(COMMANDS)}")
        return 2
    return COMMANDS[name](arguments)
