"""A Ray cluster of two machines, which are processes of this one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    root = Path(__file__).resolve().parents[2]
    os.environ.update(PYTHONPATH=str(root), RAY_worker_niceness="0")  # its default would make a busy machine slower
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()
