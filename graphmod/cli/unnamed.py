"""Words for arguments that are no `key=value`: an argument without a name, a key without a value, a key to remove."""

from pathlib import Path

from graphmod.cli.meant import meant, setting_names


def without_name(argument: str, before: str, kind: type, configs: Path, texts: tuple[str, ...]) -> str:
    """The error for an argument without an equals sign.

    Args:
        argument: as it was typed.
        before: the argument before it; "" where it is the first.
        kind: the settings of the command.
        configs: the folder with the files of its groups.
        texts: the settings that are texts.
    """
    names = setting_names(kind)
    if argument.startswith("~"):
        return (
            f"{argument!r} would remove a setting, which is not possible; leave it out for its default, or write "
            f"{argument[1:].partition('=')[0] or 'key'}=VALUE"
        )
    if name := (meant(argument, names) or "").partition("=")[0]:
        return f"{argument!r} has no value; write {name}=VALUE, without spaces around '='"
    said = f"{argument!r} has no name; settings are written key=value"
    key, equals, value = before.partition("=")
    whole = f"{value} {argument}"
    if equals and value and (key in texts or Path(whole).exists()):
        return f"{said}. If it belongs to {key}, put both in quotes: {key}={_in_quotes(whole)}"
    there = bool(argument) and Path(argument).exists()
    groups = [file.parent.name for file in sorted(configs.glob(f"*/{argument}.yaml"))]
    if groups:
        return f"{said}, such as {' or '.join(f'{group}={argument}' for group in groups)}"
    if "data.path" in names:
        return f"{said}, such as " + (f"data=text data.path={_in_quotes(argument)}" if there else "train.steps=100")
    name = "prompt" if "prompt" in names and "/" not in argument and not there else "model.path"
    return f"{said}, such as {name}={_in_quotes(argument)}"


def without_value(key: str) -> str:
    """The error for `key=` with nothing behind it."""
    return f"'{key}=' has no value; write {key}=VALUE, without spaces around '=', or leave it out for its default"


def _in_quotes(text: str) -> str:
    return f'"{text}"' if set(text) - set(_PLAIN) else text


_PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/"
