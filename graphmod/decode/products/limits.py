"""What the kernels of products take."""

MOST_ROWS = 128
MOST_WEIGHTS = 3  # of one launch
FEWEST_IN_BULK = 65  # rows; with 64 both kernels take as long, with 32 that of `bulk_kernel` takes longer
OUT, DEPTH = 64, 128  # out features and features of weights are multiples of these
