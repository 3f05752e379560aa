"""A part of `operators.py`: functions of torch in graphs, forward and backward, with bits that are eager's."""

import pytest
import torch
from operators import database, outcome

# Those that were wrong once, or whose kernels write, draw, return several results or none, or resize theirs.
NOTABLE = [
    "nn.functional.binary_cross_entropy", "nn.functional.huber_loss", "nn.functional.rrelu", "sgn", "prod", "cumprod",
    "masked_fill", "nn.functional.dropout", "bernoulli", "normal", "sort", "max.reduction_with_dim", "linalg.inv",
    "unique", "nn.functional.embedding", "nn.functional.embedding_bag", "split", "unbind", "linalg.lu_factor_ex",
    "nn.functional.batch_norm", "nn.functional.scaled_dot_product_attention", "index_put", "scatter_reduce.amax",
    "nn.functional.ctc_loss", "expand", "conj", "polar", "fft.rfft", "to_sparse", "nn.functional.max_unpool2d",
    "histogram", "cdist", "masked.logsumexp", "_foreach_add", "nn.functional.one_hot",
]  # fmt: skip
SPREAD = 14  # of the others every so many


def names():
    try:
        known = sorted(database())
    except ImportError as error:  # of a module that only torch's own tests have
        return [pytest.param("", marks=pytest.mark.skip(reason=str(error)))]
    return [name for name in NOTABLE if name in known] + [n for n in known[::SPREAD] if n not in NOTABLE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", names())
def test_a_function_is_equal_to_eager_or_refused(name, device):
    found = outcome(database()[name], device, 0)
    assert found is None or found.kind in ("equal", "refused"), found
    assert found is None or found.kind == "equal" or found.told or name.endswith("with_distance_loss"), found
