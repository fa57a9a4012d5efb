"""One thread per test process: quick with several processes, and sums come out the same everywhere."""

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",  # tests use no network
    MPLBACKEND="Agg",
    COLUMNS="120",  # the width that help texts and tables are wrapped to
)

# No result depends on how busy the machine is.
settings.register_profile("hone", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hone")

#: Tests marked `gpu` that take the fixture `accelerator` run on a CPU with this in the environment: a rehearsal.
ON_CPU = "HONE_GPU_TESTS_ON_CPU"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Without a GPU, tests marked `gpu` are skipped."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        if not (os.environ.get(ON_CPU) and "accelerator" in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
