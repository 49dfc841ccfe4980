"""Fixtures that tests of studies on clusters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["dask", "ray"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields the address of a cluster of processes on this machine."""
    if request.param == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'odb-ref[ray]'")
        yield "ray://local"
        return
    distributed = pytest.importorskip("distributed", reason="Dask is not installed: pip install 'odb-ref[dask]'")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address.replace("tcp://", "dask://")
