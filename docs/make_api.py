"""Writes docs/api.md from the docstrings of what graphmod offers. Reads the sources and imports none of them.

python docs/make_api.py            # writes the page
python docs/make_api.py --check    # exit status 1 if the page is not up to date
"""

import argparse
import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

Generated from the docstrings by `python docs/make_api.py`. [The library](library.md) explains how calls, results and
gradients behave; [decode.md](decode.md) and [train.md](train.md) describe decoding and training runs.
"""
# Section -> module -> names, as users import them: `graphmod.NAME` where the package itself has the name.
SECTIONS = {
    "Graphs": {
        "graphmod.wrap.module": ["CUDAGraphModule"],
        "graphmod.wrap.layers": ["graph_layers", "ungraph"],
        "graphmod.config": ["CUDAGraphConfig"],
        "graphmod.step.entry": ["GraphStats"],
        "graphmod.step.buffers": ["mark_static"],
    },
    "Check": {
        "graphmod.check.run": ["check_call"],
        "graphmod.check.report": ["Report", "Finding", "Guarded"],
        "graphmod.check.order": ["Divergence", "Stand"],
    },
    "Training": {
        "graphmod.train.step": ["TrainStep"],
        "graphmod.train.settings": ["TrainGraphConfig", "Scope"],
        "graphmod.train.attention": ["use_static_causal_attention"],
    },
    "Decoding": {
        "graphmod.decode.engine": ["DecodeEngine"],
        "graphmod.decode.streams": ["EngineLoop", "Handle", "TokenStream"],
        "graphmod.decode.types": ["EngineConfig", "Sampling", "Completion", "Run", "TokenEvent", "DecodeStats"],
        "graphmod.text": ["TokenizerCodec", "ByteCodec"],
    },
    "Exceptions": {
        "graphmod.errors": ["GraphmodError", "ConfigError", "CaptureRefused", "BackwardUnavailable"],
        "graphmod.decode.types": ["DecodeError", "RequestError"],
    },
}
# Under other names than those of their definitions.
SHOWN = {"check_call": "graphmod.check"}
_HEADINGS = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_ITEM = re.compile(r"^    (\S[^:]*): (.*)$")
_SKIPPED = ("__post_init__", "__repr__", "__getattr__", "__setattr__", "__delattr__", "__dir__")


def home(module: str, name: str) -> str:
    """Where users import `name` from: the outermost package that offers it, or its module."""
    parts = module.split(".")
    packages = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((package for package in packages if name in exports(package)), module)


def exports(package: str) -> set[str]:
    """The names in `__all__` of a package."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def prose(doc: str) -> list[str]:
    """A docstring as Markdown: its sections in bold, their items as lists."""
    lines, in_section, has_items = [], False, False
    for line in inspect.cleandoc(doc).splitlines():
        if heading := _HEADINGS.match(line):
            in_section, has_items = True, heading[1] not in ("Returns", "Yields")
            lines += [f"**{heading[1]}**", ""]
            continue
        in_section = in_section and (line.startswith(" ") or not line)
        item = _ITEM.match(line) if in_section and has_items else None
        if item:
            names = ", ".join(f"`{name.strip()}`" for name in item[1].split(","))
            lines.append(f"- {names}: {item[2]}")
        elif in_section and line:
            # Behind an item, or text such as that of Returns.
            lines.append(f"  {line.strip()}" if lines[-1].startswith(("- ", "  ")) else line.strip())
        else:
            lines.append(line)
    return [*lines, ""]


def call(node: ast.FunctionDef, name: str, method: bool) -> str:
    """The signature, without `self`, on one line or an argument a line."""
    arguments = node.args
    if method and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    line = f"{name}({ast.unparse(arguments)}){returns}"
    if len(line) <= 110:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in _parts(arguments)) + f"){returns}"


def _parts(arguments: ast.arguments) -> list[str]:
    """Each argument with its annotation and default."""

    def one(argument: ast.arg, default: ast.expr | None) -> str:
        text = ast.unparse(argument)
        if default is None:
            return text
        return f"{text} = {ast.unparse(default)}" if argument.annotation else f"{text}={ast.unparse(default)}"

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [one(argument, default) for argument, default in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        parts.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        one(argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parts.append(f"**{ast.unparse(arguments.kwarg)}")
    return parts


def _decorators(node: ast.AST) -> set[str]:
    return {ast.unparse(one).partition("(")[0] for one in node.decorator_list}


def _fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, with their defaults; the members of an enumeration."""
    kinds = {ast.unparse(base) for base in node.bases}
    if "Enum" in kinds:
        return [ast.unparse(line) for line in node.body if isinstance(line, ast.Assign)]
    if not {"dataclass", "dataclasses.dataclass"} & _decorators(node) and "NamedTuple" not in kinds:
        return []
    fields = [line for line in node.body if isinstance(line, ast.AnnAssign) and not line.target.id.startswith("_")]
    return [ast.unparse(line) for line in fields]


def shown_class(node: ast.ClassDef, name: str) -> list[str]:
    """A class: how it is made, what it holds, its public methods and properties."""
    methods = [line for line in node.body if isinstance(line, ast.FunctionDef)]
    made = next((one for one in methods if one.name == "__init__"), None)
    bases = [ast.unparse(base) for base in node.bases]
    first = call(made, name, method=True) if made else name + (f"({', '.join(bases)})" if bases else "")
    fields = _fields(node)
    code = "\n".join([f"class {first}" + (":" if fields else ""), *(f"    {field}" for field in fields)])
    lines = [f"### `{name}`", "", f"```python\n{code}\n```", "", *prose(ast.get_docstring(node) or "")]
    if made is not None and ast.get_docstring(made):
        lines += prose(ast.get_docstring(made))
    for method in methods:
        doc = ast.get_docstring(method)
        public = not method.name.startswith("_") or method.name == "__call__"
        if method.name in _SKIPPED or not public or not doc or any("setter" in one for one in _decorators(method)):
            continue
        is_property = any("property" in one for one in _decorators(method))
        signature = method.name if is_property else call(method, method.name, method=True)
        if is_property and method.returns is not None:
            signature += f": {ast.unparse(method.returns)}"
        lines += [f"```python\n{signature}\n```", "", *prose(doc)]
    return lines


def render() -> str:
    """The page. Raises KeyError for a name that its module does not define."""
    lines = [HEAD]
    for section, modules in SECTIONS.items():
        lines.append(f"## {section}\n")
        for module, names in modules.items():
            source = (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
            defined = {one.name: one for one in ast.parse(source).body if hasattr(one, "name")}
            for name in names:
                full, node = SHOWN.get(name, f"{home(module, name)}.{name}"), defined[name]
                if isinstance(node, ast.ClassDef):
                    lines += shown_class(node, full)
                else:
                    lines += [f"### `{full}`", "", f"```python\n{call(node, full, method=False)}\n```", ""]
                    lines += prose(ast.get_docstring(node) or "")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Writes the page, or checks it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if the page is not up to date"
    )
    options = parser.parse_args(arguments)
    text = render()
    if options.check:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            print(f"{PAGE} is not up to date: run python docs/make_api.py", file=sys.stderr)
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
