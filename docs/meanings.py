"""What a class of settings says about its fields: in its docstring, or in comments at these."""

import inspect
import re

# Names may stand together before a description, and go on in a second line.
_ATTRIBUTE = re.compile(r"^    (\w+(?:,\s+\w+)*): (.+(?:\n(?: {6,}.*|(?=\n)))*)", re.MULTILINE)
# A field of a class, after comments above it or with one beside it.
_FIELD = re.compile(r"^((?:    # .+\n)*)    (\w+): [^#\n]+(?:  # (.+))?$", re.MULTILINE)


def meanings(kind: type) -> dict[str, str]:
    """What a schema, and those that it extends, say about each field."""
    found = {}
    for one in reversed(kind.__mro__[:-1]):
        _, _, attributes = inspect.cleandoc(one.__doc__ or "").partition("\nAttributes:\n")
        for names, description in _ATTRIBUTE.findall(attributes):
            found |= dict.fromkeys(re.split(r",\s+", names), description)
        for above, name, beside in _FIELD.findall(inspect.getsource(one)):
            above = " ".join(line.strip("# ") for line in above.splitlines())
            described = f"{above[:1].lower()}{above[1:]}" or beside
            if described and not described.startswith("pyrefly:"):
                found[name] = described
    return found
