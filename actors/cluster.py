"""Joining a Ray cluster, or starting a small local one that ends with this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from actors.reaper import end, ray_children, watched_by_reaper
from rayrl.errors import ConfigError

LOCAL_OBJECT_STORE_BYTES = 512 * 1024**2
"""Episodes are small and leave the store as soon as they are written; a laptop need not give more."""

LOCAL_START_ATTEMPTS = 2


def connect(address: str | None = None, *, num_cpus: int | None = None) -> dict[str, Any]:
    """Initialise Ray once per process; returns ``{"address", "local", "cpus", "nodes"}``.

    Args:
        address: cluster to join; ``None`` = ``RAY_ADDRESS`` if set, else a local Ray of our own.
        num_cpus: CPUs the local Ray offers; ``None`` = all of them. Ignored when joining.

    Raises:
        ConfigError: the cluster cannot be joined.
    """
    # usage statistics would be the only request that leaves the machine
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # a hint about its own token file on every start; what it does (authenticate) is right
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    wanted = address or os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized():
        common: dict[str, Any] = {"namespace": "rayrl", "log_to_driver": False, "configure_logging": False}
        try:
            if wanted:
                ray.init(address=wanted, **common)
            else:
                _start_local(num_cpus, common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"Ray at {wanted or 'this machine'} cannot be reached: {error}. Start one with `ray start --head`, "
                "or leave execution.ray_address and RAY_ADDRESS out for a local Ray. A cluster with token "
                "authentication is joined with RAY_AUTH_MODE=token in the environment"
            ) from None
    return {
        "address": wanted,
        "local": not wanted,
        "cpus": float(ray.cluster_resources().get("CPU", 0)),
        "nodes": sum(1 for node in ray.nodes() if node["Alive"]),
    }


def _start_local(num_cpus: int | None, common: dict[str, Any]) -> None:
    """Start Ray here; once more if it did not come up in the 30 s that Ray gives itself.

    Raises:
        ConfigError: it did not come up the second time either.
    """
    import ray

    package = Path(ray.__file__).parent
    before = ray_children(os.getpid(), package)
    for attempt in range(1, LOCAL_START_ATTEMPTS + 1):
        try:
            with watched_by_reaper(package):
                ray.init(
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                    **common,
                )
            return
        except Exception as error:
            ray.shutdown()
            end([child for child in ray_children(os.getpid(), package) if child not in before])
            if type(error) is not Exception:  # a slow start is the one fault that Ray reports without a type
                raise
            if attempt == LOCAL_START_ATTEMPTS:
                raise ConfigError(
                    f"Ray did not start on this machine in {attempt} attempts: {error} The machine is probably busy or "
                    "short of memory: wait, or run without Ray (execution.mode=inprocess)"
                ) from None


def node_address() -> str:
    """The address other nodes reach this one at; loopback on a single-node cluster."""
    import ray

    if sum(1 for node in ray.nodes() if node["Alive"]) <= 1:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())
