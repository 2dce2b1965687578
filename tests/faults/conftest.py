from __future__ import annotations

from tests.faults.fixtures import cluster, shop_url

__all__ = ["cluster", "shop_url"]
