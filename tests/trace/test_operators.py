"""A part of `operators.py`: functions of torch in graphs, forward and backward, with bits that are eager's."""

import pytest

from tests.trace.operators import database, outcome

# Those that were wrong once, or whose kernels write, draw, return several results or none, or resize theirs.
NOTABLE = [
    "nn.functional.binary_cross_entropy", "nn.functional.huber_loss", "nn.functional.rrelu", "sgn", "prod", "cumprod",
    "masked_fill", "nn.functional.dropout", "bernoulli", "normal", "sort", "max.reduction_with_dim", "linalg.inv",
    "unique", "nn.functional.embedding", "nn.functional.embedding_bag", "split", "unbind", "linalg.lu_factor_ex",
    "nn.functional.batch_norm", "nn.functional.scaled_dot_product_attention", "index_put", "scatter_reduce.amax",
    "nn.functional.ctc_loss", "expand", "conj", "polar", "fft.rfft", "to_sparse", "nn.functional.max_unpool2d",
    "histogram", "cdist", "masked.logsumexp", "nn.functional.one_hot",
]  # fmt: skip
SPREAD = 20  # of the others every so many


@pytest.fixture(scope="module")
def known():
    try:
        return database()
    except ImportError as error:  # of a module that only torch's own tests have
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOTABLE)
def test_a_function_is_equal_to_eager_or_refused(name, known, device):
    found = outcome(known[name], device, 0)
    assert found is None or found.kind == "equal" or (found.kind == "refused" and found.told), found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_functions_from_a_to_z(known, device):
    wrong = {}
    for name in sorted(known)[::SPREAD]:
        found = outcome(known[name], device, 0)
        if found is not None and found.kind not in ("equal", "refused"):
            wrong[name] = found
    assert not wrong
