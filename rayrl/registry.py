"""Short names and dotted paths: how a config names code that is not built in.

A dotted path is ``package.module:attribute`` (nested attributes allowed: ``pkg.mod:Outer.inner``). Every failure is a
:class:`~rayrl.errors.ConfigError` that says which half of the path is wrong.
"""

from __future__ import annotations

import importlib
from typing import Any

from rayrl.errors import ConfigError, did_you_mean


def is_dotted(path: str) -> bool:
    """Whether a name is a dotted path rather than a short name."""
    return ":" in path


def resolve_dotted(path: str, what: str) -> Any:
    """Import ``pkg.mod:attr`` and return the attribute.

    Args:
        path: the dotted path as it stands in the config.
        what: what is being named ("model", "environment", ...), for the message.

    Raises:
        ConfigError: malformed path, module missing or failing on import, attribute missing.
    """
    module_name, separator, attribute = path.partition(":")
    parts = attribute.split(".")
    if not separator or not module_name or not all(part.isidentifier() for part in [*module_name.split("."), *parts]):
        raise ConfigError(f"{what} {path!r} is no dotted path; write it as package.module:Name")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(
                f"{what} {path!r}: module {missing!r} was not found; "
                "install it, or put its folder on PYTHONPATH (for Ray jobs: into the working directory)"
            ) from None
        raise ConfigError(f"{what} {path!r}: importing {module_name!r} failed: it needs module {missing!r}") from error
    except Exception as error:
        raise ConfigError(
            f"{what} {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error
    for part in parts:
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(
                f"{what} {path!r}: {module_name!r} has no attribute {part!r}{did_you_mean(part, known)}"
            ) from None
    return found


def unknown_kind(what: str, kind: str, known: list[str]) -> ConfigError:
    """The error for a short name nobody knows."""
    return ConfigError(
        f"{what} kind {kind!r} is not known{did_you_mean(kind, known)}; "
        f"use one of {', '.join(known)}, or a dotted path package.module:Name"
    )
