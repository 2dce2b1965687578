"""Config of the shop environment. What changes results is its identity; addresses and time-outs are not in it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rayrl.config import Section, operational
from rayrl.errors import ConfigError
from rayrl.shop.catalogue import catalogue_hash, load_products
from rayrl.shop.config import CatalogueConfig, ShopServerConfig
from rayrl.shop.generator import generate_catalogue
from rayrl.shop.versions import ENVIRONMENT_VERSION, OBSERVATION_VERSION, PAGE_SIZE


class EmbeddedShopConfig(CatalogueConfig):
    """The embedded server, where rayrl starts it itself."""

    page_size: int = Field(PAGE_SIZE, ge=1, le=100)
    """Products on a page of results. Small pages help models with a short context."""

    slots: int = operational(64, ge=1, le=100_000)
    """Episodes that may run at once, per server."""

    servers: int = operational(1, ge=1, le=256)
    """Server processes. One fills one core."""

    lease_ttl_s: float = operational(60.0, gt=0)
    """Seconds a lease lives without a call or heartbeat."""

    queue_timeout_s: float = operational(30.0, ge=0)
    """Seconds a reset waits on the server for a slot before the client is told to come back."""

    max_queue: int = operational(4096, ge=0)
    """Resets that may wait at once on one server."""


class ShopEnvironmentConfig(Section):
    """Which shop, played how. Give ``base_urls`` (servers that run already), ``embedded`` (started for you), or both:
    then the servers at ``base_urls`` must sell the embedded catalogue."""

    kind: Literal["shop"] = "shop"
    """Names this environment among others."""

    interaction_mode: Literal["single_turn", "multi_turn"] = "single_turn"
    """``single_turn`` allows 30 actions an episode, ``multi_turn`` 40."""

    persona: bool = False
    """Play the short instruction with the persona, where a task has one."""

    base_urls: list[str] = operational([])
    """Addresses of running servers, ``http://host:port``. Episodes go to the least busy one."""

    environment_version: str = ENVIRONMENT_VERSION
    """Protocol version the server must have."""

    catalogue_sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Hash of the catalogue the server must sell. Computed where ``embedded`` is given."""

    embedded: EmbeddedShopConfig | None = None
    """The shop to start, or to expect at ``base_urls``."""

    max_query_length: int | None = Field(None, ge=1)
    """Longest search query in characters; stands in the tool schema, and the embedded server refuses longer ones."""

    connect_timeout_s: float = operational(5.0, gt=0)
    """Seconds to wait for a connection."""

    step_timeout_s: float = operational(30.0, gt=0)
    """Seconds to wait for the answer to one call."""

    reset_timeout_s: float = operational(600.0, gt=0)
    """Seconds to wait for a slot, over all attempts."""

    unreachable_timeout_s: float = operational(30.0, ge=0)
    """Seconds a reset goes on trying while no server can be reached (one may be restarting)."""

    release_timeout_s: float = operational(10.0, gt=0)
    """Seconds to spend on giving a lease back."""

    max_attempts: int = operational(4, ge=1)
    """Attempts at one call where repeating it is safe."""

    backoff_s: float = operational(0.2, gt=0)
    """Wait after the first failed attempt; doubles each time, with jitter."""

    max_backoff_s: float = operational(5.0, gt=0)
    """Longest wait between attempts."""

    admin_token_env: str | None = operational(None)
    """Environment variable with the server's admin token, to read private goals for private.jsonl."""

    trust_env: bool | None = operational(None)
    """Obey proxy settings of the environment. Default: yes, except for loopback addresses."""

    @field_validator("base_urls")
    @classmethod
    def _urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError("an address must start with http:// or https://")
            parts = urlsplit(url)
            if parts.username or parts.password or parts.query:
                # the address is written to manifests and is not repeated here either
                raise ValueError("an address must hold no user, password or query")
        if len(set(urls)) != len(urls):
            raise ValueError("an address occurs twice")
        return [url.rstrip("/") for url in urls]

    @model_validator(mode="after")
    def _some_shop(self) -> ShopEnvironmentConfig:
        if not self.base_urls and self.embedded is None:
            raise ValueError("give base_urls (running servers) or embedded (a shop to start)")
        return self

    def server_config(self) -> ShopServerConfig:
        """Config of one embedded server.

        Raises:
            ConfigError: ``embedded`` is not set.
        """
        if self.embedded is None:
            raise ConfigError("environment.embedded is not set: there is no shop to start")
        shop = self.embedded.model_dump(exclude={"servers"})
        return ShopServerConfig(**shop, max_query_length=self.max_query_length)

    def catalogue_hash(self) -> str | None:
        """Hash of the catalogue: computed from the embedded one, else as configured. Reads a file at most.

        Raises:
            DataError: the products file is wrong.
            ConfigError: ``catalogue_sha256`` contradicts ``embedded``.
        """
        if self.embedded is None:
            return self.catalogue_sha256
        found = _embedded_hash(self.embedded)
        if self.catalogue_sha256 not in (None, found):
            raise ConfigError(
                f"environment.catalogue_sha256 is {self.catalogue_sha256}, but the embedded catalogue"
                f" ({self.embedded.source}) has {found}; remove the key or correct it"
            )
        return found

    def identity(self) -> dict[str, Any]:
        """What makes this environment this environment. Pure: no network."""
        return {
            "kind": self.kind,
            "interaction_mode": self.interaction_mode,
            "persona": self.persona,
            "environment_version": self.environment_version,
            "observation_version": OBSERVATION_VERSION,
            "catalogue_sha256": self.catalogue_hash(),
            "page_size": self.embedded.page_size if self.embedded is not None else None,
            "max_query_length": self.max_query_length,
        }

    def semantic(self) -> dict[str, Any]:
        """The identity: a products file and a generator that give the same catalogue are the same experiment."""
        return self.identity()


def _embedded_hash(shop: EmbeddedShopConfig) -> str:
    if shop.products is not None:
        return catalogue_hash(load_products(Path(shop.products)))
    if shop.generate is None:
        raise ConfigError("environment.embedded names neither products nor generate")
    return _generated_hash(shop.generate, shop.seed)


@lru_cache(maxsize=32)
def _generated_hash(n: int, seed: int) -> str:
    return catalogue_hash(generate_catalogue(n, seed))
