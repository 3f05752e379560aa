"""The small models of `benchmarks/`, and how they are trained there, for the tests."""

import sys
from importlib import util
from pathlib import Path


def _module(name):
    spec = util.spec_from_file_location(name, Path(__file__).parent.parent / "benchmarks" / f"{name}.py")
    sys.modules[name] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


causal_models = _module("causal_models")
other_models = _module("other_models")
