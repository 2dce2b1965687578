"""Fixtures shared by the test folders that use a real Ray: one cluster and one shop for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rayrl.shop.config import ShopServerConfig
from rayrl.shop.process import ShopProcess
from tests.faults.support import CATALOGUE_SEED, PRODUCTS, TTL_S


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray with 4 logical CPUs, shared; tests about Ray's own death start drivers of their own."""
    import ray

    from actors.cluster import connect

    ours = not ray.is_initialized()
    connect(num_cpus=4)
    yield
    if ours:
        ray.shutdown()


@pytest.fixture(scope="session")
def shop_url() -> Iterator[str]:
    """One real shop server whose slots can be counted after a run is over."""
    config = ShopServerConfig(generate=PRODUCTS, seed=CATALOGUE_SEED, slots=64, lease_ttl_s=TTL_S)
    process = ShopProcess(config, admin_token="token-of-the-tests")
    yield process.base_url
    process.stop()
