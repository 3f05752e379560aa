"""The exceptions users of graphmod see, and how those of libraries are worded."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.absolute()
# The folder of a clone, also where it is installed as editable; None of a wheel.
CLONE = _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None


class GraphmodError(Exception):
    """Base class of every error graphmod raises on purpose."""


class ConfigError(GraphmodError, ValueError):
    """A setting is wrong; the message names the setting, what was given and what is allowed."""


class UnknownSetting(ConfigError, TypeError):
    """There is no setting of that name; the message names the one most like it, and all there are."""


class CaptureRefused(GraphmodError, RuntimeError):
    """The captured code did something a CUDA graph cannot repeat (a host read, a value that changes, ...).

    Users meet this type only as the reason in a log line or in `CUDAGraphModule.last_failure`: a refused capture
    falls back to an ordinary eager call.
    """


class Diverged(CaptureRefused):
    """The captured code did other operations than the recorded call before it."""


class BackwardUnavailable(GraphmodError, RuntimeError):
    """A backward pass was asked for whose saved values are gone or that a replayed graph cannot provide."""


class EagerPartFailed(GraphmodError, RuntimeError):
    """A call with eager parts could not be ended from its graphs after one of these; the message says how far it is."""


class SuccessorFailed(GraphmodError):
    """Code that was to take the place of a graph failed where it may have changed something already."""


class VerificationFailed(GraphmodError, RuntimeError):
    """With `verify=always`, a call did other operations than the graph that would have been replayed for it."""


def reason(error: BaseException) -> str:
    """What an exception of a library says, in one line: its first, and those after it that a colon announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1] or [type(error).__name__]
    for line in lines[1:]:
        if not said[-1].endswith(":"):
            break
        said.append(line)
    return " ".join(said)


def install(extra: str) -> str:
    """The command that installs what an extra of graphmod brings."""
    return f"pip install -e '.[{extra}]' in graphmod's clone" if CLONE else f"pip install 'graphmod[{extra}]'"
