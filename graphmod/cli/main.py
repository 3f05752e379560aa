"""The console command `graphmod`, and the commands behind `train.py` and `generate.py`.

Each command is imported when it is asked for; PyTorch later still, when there is something to compute.
"""

import sys
from collections.abc import Callable

from graphmod.cli.start import loading, prepare, version
from graphmod.words import nearest

_HELP = """CUDA graphs for PyTorch training and decode.

  graphmod train [GROUP=CHOICE ...] [KEY=VALUE ...]     train a causal language model
  graphmod compare [GROUP=CHOICE ...] [KEY=VALUE ...]   the same run without graphs, per layer and as one graph
  graphmod generate model.path=FOLDER prompt="..."      sample from a trained model
  graphmod check package.module:function                what would keep a training step out of CUDA graphs
  graphmod --version

graphmod COMMAND --help says more about each."""
_COMPARED = {"graph": "none,per_layer,full_iteration", "train": "measure", "train.deterministic": "true"}


def train(arguments: list[str]) -> int:
    """`graphmod train` and `python train.py`; returns the exit status."""
    prepare()
    with loading():
        from graphmod.cli.training.main import main
    return main(arguments)


def compare(arguments: list[str]) -> int:
    """`graphmod compare`: a multirun over the scopes, unless the arguments choose otherwise."""
    given = {argument.partition("=")[0] for argument in arguments}
    defaults = [f"{key}={value}" for key, value in _COMPARED.items() if key not in given]
    return train(["--multirun", *defaults, *arguments])


def generate(arguments: list[str]) -> int:
    """`graphmod generate` and `python generate.py`; returns the exit status."""
    prepare()
    with loading():
        from graphmod.cli.generation.main import main
    return main(arguments)


def check(arguments: list[str]) -> int:
    """`graphmod check`, which is `python -m graphmod.check`; returns the exit status."""
    prepare()
    with loading():
        from graphmod.check.cli import main
    return main(arguments, "graphmod check")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "compare": compare,
    "generate": generate,
    "check": check,
}


def main() -> int:
    """Runs the console command with the arguments in `sys.argv`; returns the exit status.

    0 means that all went well, 2 that there is no such command; the commands say what theirs mean.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(_HELP)
        return 0
    if name == "--version":
        print(version())
        return 0
    if name not in COMMANDS:
        best = nearest(name, [*COMMANDS])
        hint = f"; did you mean {best!r}?" if best else ""
        print(f"error: there is no command {name!r}{hint}\n  commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[name](arguments)
