"""Configuration of one embedded shop server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from rayrl.config import Section, operational
from rayrl.errors import ConfigError
from rayrl.shop.catalogue import RawProduct, load_products
from rayrl.shop.versions import PAGE_SIZE


class CatalogueConfig(Section):
    """Where the products come from: a file, or the generator."""

    products: Path | None = operational(None)
    """JSON file in the public product format. Give this or ``generate``. (Its content, not its path, is in the
    fingerprint.)"""

    generate: int | None = Field(None, ge=12)
    """Number of products to generate."""

    seed: int = Field(0, ge=0)
    """Seed of the generator."""

    @model_validator(mode="after")
    def _one_source(self) -> CatalogueConfig:
        if (self.products is None) == (self.generate is None):
            raise ValueError("give either products (a file) or generate (a number of products)")
        return self

    def load(self) -> list[RawProduct]:
        """The raw products.

        Raises:
            DataError: the file is missing or wrong.
        """
        if self.products is not None:
            return load_products(self.products)
        if self.generate is None:
            raise ConfigError("neither products nor generate is set")
        from rayrl.shop.generator import generate_catalogue

        return generate_catalogue(self.generate, self.seed)

    @property
    def source(self) -> str:
        """Name for messages."""
        return str(self.products) if self.products is not None else f"generated({self.generate}, seed {self.seed})"


class ShopServerConfig(CatalogueConfig):
    """One server: catalogue, capacity, lease rules, address."""

    page_size: int = Field(PAGE_SIZE, ge=1, le=100)
    """Products on a page of results."""

    max_query_length: int | None = Field(None, ge=1)
    """Longest query in characters; longer ones are answered as invalid. Default: any length."""

    slots: int = operational(64, ge=1, le=100_000)
    """Episodes that may run at once."""

    host: str = operational("127.0.0.1")
    """Address to listen on."""

    port: int = operational(0, ge=0, le=65_535)
    """Port to listen on; 0 takes any free one and reports it."""

    lease_ttl_s: float = operational(60.0, gt=0)
    """Seconds a lease lives after its last call or heartbeat."""

    queue_timeout_s: float = operational(30.0, ge=0)
    """Seconds a reset waits for a slot before 503."""

    max_queue: int = operational(4096, ge=0)
    """Resets that may wait at once; more are turned away with 503."""

    admin_token_env: str | None = operational(None)
    """Environment variable that holds the admin token. Without a token ``release_all`` is for loopback callers only
    and the private goal is not served."""
