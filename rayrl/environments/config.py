"""The ``environment`` section: the shop, or a user's own factory by dotted path; and how to build either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, SecretStr, Tag, field_validator

from rayrl.config import Section, no_secrets, resolve_resource
from rayrl.environments.base import EnvironmentFactory
from rayrl.environments.shop_config import ShopEnvironmentConfig
from rayrl.errors import ConfigError, ConformanceError
from rayrl.registry import is_dotted, resolve_dotted, unknown_kind
from rayrl.schemas import JsonDict

BUILT_IN_KINDS = ["shop"]


class CustomEnvironmentConfig(Section):
    """An environment of your own."""

    kind: str
    """Dotted path ``package.module:Factory`` of an EnvironmentFactory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the factory. In the fingerprint through its ``identity()``."""

    _no_secrets = field_validator("options")(no_secrets)

    @field_validator("kind")
    @classmethod
    def _dotted(cls, value: str) -> str:
        if not is_dotted(value):
            raise ValueError(str(unknown_kind("environment", value, BUILT_IN_KINDS)))
        return value


def _tag(value: Any) -> str:
    kind = value.get("kind", "shop") if isinstance(value, dict) else getattr(value, "kind", "shop")
    return "shop" if kind == "shop" else "custom"


EnvironmentConfig = Annotated[
    Annotated[ShopEnvironmentConfig, Tag("shop")] | Annotated[CustomEnvironmentConfig, Tag("custom")],
    Discriminator(_tag),
]
"""Type of the ``environment`` section."""

AnyEnvironment = ShopEnvironmentConfig | CustomEnvironmentConfig


def resolve_paths(config: AnyEnvironment, base: Path | None) -> AnyEnvironment:
    """The config with the products file as an absolute path."""
    if isinstance(config, CustomEnvironmentConfig) or config.embedded is None or config.embedded.products is None:
        return config
    products = resolve_resource(str(config.embedded.products), base)
    return config.model_copy(update={"embedded": config.embedded.model_copy(update={"products": products})})


def environment_identity(config: AnyEnvironment) -> JsonDict:
    """What enters the fingerprint. No network."""
    if isinstance(config, ShopEnvironmentConfig):
        return config.identity()
    return {**_custom(config).identity(), "factory": config.kind}


def build_environments(
    config: AnyEnvironment,
    *,
    admin_token: SecretStr | None = None,
    on_event: Callable[[JsonDict], None] | None = None,
) -> EnvironmentFactory:
    """The factory a config names.

    Args:
        config: the section, with the addresses really used.
        admin_token: opens the private side of embedded servers.
        on_event: gets noteworthy happenings (failed releases, servers down).

    Raises:
        ConfigError, ConformanceError: a dotted path that leads nowhere, or to something that is no factory.
    """
    if isinstance(config, ShopEnvironmentConfig):
        from rayrl.environments.shop import ShopEnvironmentFactory

        token = admin_token.get_secret_value() if admin_token is not None else None
        return ShopEnvironmentFactory(config, admin_token=token, on_event=on_event)
    return _custom(config)


def _custom(config: CustomEnvironmentConfig) -> EnvironmentFactory:
    make = resolve_dotted(config.kind, "environment")
    try:
        factory = make(**config.options)
    except TypeError as error:
        raise ConfigError(f"environment {config.kind!r} cannot be built from environment.options: {error}") from error
    if not isinstance(factory, EnvironmentFactory):
        missing = [name for name in ("identity", "start", "open", "aclose") if not hasattr(factory, name)]
        raise ConformanceError(f"environment {config.kind!r} is no EnvironmentFactory: it lacks {', '.join(missing)}")
    return factory
