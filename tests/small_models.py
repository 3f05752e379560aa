"""Every causal LM of transformers, small: `benchmarks/causal_models.py`, for the tests."""

from importlib import util
from pathlib import Path

_spec = util.spec_from_file_location("causal_models", Path(__file__).parent.parent / "benchmarks" / "causal_models.py")
causal_models = util.module_from_spec(_spec)
_spec.loader.exec_module(causal_models)
