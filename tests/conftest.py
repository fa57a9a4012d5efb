"""One thread per test process: quick with several processes, and sums come out the same everywhere."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",  # tests use no network
    MPLBACKEND="Agg",
    COLUMNS="120",  # the width that help texts and tables are wrapped to
)
