"""YAML to a validated, frozen pydantic config.

Road: file -> OmegaConf (interpolation, ``key=value`` overrides) -> plain dict -> pydantic (unknown keys are errors
with a did-you-mean). Every error is a :class:`~rayrl.errors.ConfigError` that names the file and the key.

A field declared with :func:`operational` does not change results (addresses, concurrency, time-outs, paths) and stays
outside the semantic fingerprint; everything else is inside. Attribute docstrings are the documentation of every key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from rayrl.errors import ConfigError, did_you_mean

ConfigT = TypeVar("ConfigT", bound=BaseModel)


class Section(BaseModel):
    """Base of all config sections: frozen, strict about unknown keys, documented by attribute docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """This section as a plain dict without its operational fields (recursively)."""
        out: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            if is_operational(info):
                continue
            value = getattr(self, name)
            out[name] = value.semantic() if isinstance(value, Section) else _plain(value)
        return out


def operational(default: Any = ..., **kwargs: Any) -> Any:
    """A pydantic field that does not change results and so stays out of the fingerprint."""
    return Field(default, json_schema_extra={"operational": True}, **kwargs)


def is_operational(info: FieldInfo) -> bool:
    """Whether the field was declared with :func:`operational`."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("operational"))


_SECRET_WORDS = ("api_key", "apikey", "api-key", "authorization", "access_token", "secret", "password")


def no_secrets(value: dict[str, Any]) -> dict[str, Any]:
    """Validator of free-form sections, at every depth: what stands in a config is written to manifests.

    Raises:
        ValueError: a key looks like a secret; its value is not repeated.
    """
    for key, item in value.items():
        if any(word in str(key).lower() for word in _SECRET_WORDS):
            raise ValueError(
                f"key {key!r} looks like a secret; this section is written to manifests. Read the secret from an "
                "environment variable in your own code"
            )
        if isinstance(item, dict):
            no_secrets(item)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Path):
        return str(value)
    return value


NO_CONFIGS = ("prompts", "skills")
"""Folders under the shipped configs whose YAML files are parts of configs."""


def configs_root() -> Path:
    """Folder of the shipped configs: the checkout's ``configs/``, or the copy inside an installed package."""
    package = Path(__file__).resolve().parent
    for candidate in (package.parent / "configs", package / "_configs"):
        if (candidate / "prompts").is_dir():
            return candidate
    raise ConfigError(
        f"the shipped configs were not found beside {package}; reinstall rayrl, or give the path of your own config"
    )


def find_config(name: str | Path) -> Path:
    """Resolve a config: an existing path, else the same name among the shipped configs (``.yaml`` may be left out).

    Raises:
        ConfigError: nothing there; the message lists near names.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    root = configs_root()
    relative = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (root / relative, root / f"{relative}.yaml"):
        if candidate.is_file():
            return candidate
    known = sorted(
        str(p.relative_to(root).with_suffix(""))
        for p in root.rglob("*.yaml")
        if p.parent.name not in ("prompts", "skills")
    )
    hint = did_you_mean(str(relative.with_suffix("")), known)
    raise ConfigError(f"config {str(name)!r} does not exist{hint}; shipped configs: {', '.join(known)}")


def resolve_resource(name: str, base: Path | None) -> Path:
    """Find a file a config refers to: beside the config, in the working directory, or among the shipped configs.

    Raises:
        ConfigError: nowhere; the message lists the places looked at.
    """
    path = Path(name).expanduser()
    places = [path] if path.is_absolute() else []
    if not path.is_absolute():
        if base is not None:
            places.append(base / path)
        places += [Path.cwd() / path, configs_root() / path]
        if path.parts[:1] == ("configs",):
            places.append(configs_root().joinpath(*path.parts[1:]))
    for place in places:
        if place.exists():
            return place.resolve()
    looked = ", ".join(dict.fromkeys(str(p) for p in places))
    raise ConfigError(f"file {name!r} named in the config does not exist; looked at: {looked}")


def load_raw(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read YAML, apply ``a.b=c`` overrides (values parsed as YAML), resolve interpolations.

    Raises:
        ConfigError: unreadable file, bad YAML, bad override, unresolved interpolation.
    """
    file = Path(path)
    try:
        config = OmegaConf.load(file)
    except FileNotFoundError:
        raise ConfigError(f"config {file} does not exist") from None
    except Exception as error:  # OmegaConf lets PyYAML's and OS errors through
        raise ConfigError(f"{file}: cannot be read as YAML: {_first_line(error)}") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file}: the top level must be a mapping of sections, not a list")
    return apply_overrides(config, overrides or [], source=str(file))


def apply_overrides(raw: dict[str, Any] | DictConfig, overrides: list[str], *, source: str) -> dict[str, Any]:
    """Apply ``a.b=c`` overrides (values parsed as YAML) and resolve interpolations; the input is left as it is.

    Raises:
        ConfigError: bad override, unresolved interpolation; names ``source``.
    """
    for item in overrides:
        key, sep, _ = item.partition("=")
        if not sep or not key or any(not part for part in key.split(".")):
            raise ConfigError(f"override {item!r} is not of the form section.key=value")
    try:
        merged = OmegaConf.merge(raw, OmegaConf.from_dotlist(overrides))
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from None
    except Exception as error:
        raise ConfigError(f"{source}: override cannot be parsed: {_first_line(error)}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{source}: the top level must be a mapping of sections, not {type(plain).__name__}")
    return {str(k): v for k, v in plain.items()}


def load_config(path: str | Path, model: type[ConfigT], overrides: list[str] | None = None) -> ConfigT:
    """Load and validate a config file; see the module docstring."""
    file = find_config(path)
    return parse_config(load_raw(file, overrides), model, source=str(file))


def parse_config(raw: dict[str, Any], model: type[ConfigT], *, source: str) -> ConfigT:
    """Validate a plain dict.

    Raises:
        ConfigError: all problems at once, each with its dotted key.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = [f"  {_explain(item, model)}" for item in error.errors(include_url=False, include_input=False)]
        raise ConfigError(f"{source}: the config is not valid:\n" + "\n".join(lines)) from None


def _explain(item: Any, model: type[BaseModel]) -> str:
    location, known = _walk(model, [str(part) for part in item["loc"]])
    key = ".".join(location) or "(top level)"
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{did_you_mean(location[-1], known)}" + (
            f"; known keys: {', '.join(known)}" if known else ""
        )
    return f"{key}: {item['msg']}"


def _walk(model: type[BaseModel], parts: list[str]) -> tuple[list[str], list[str]]:
    """The key path a user sees (without pydantic's union tags), and the field names known at its last level."""
    candidates, path, known = [model], [], sorted(model.model_fields)
    for part in parts:
        owners = [c for c in candidates if part in c.model_fields]
        tagged = not owners and len(candidates) > 1 and part in _UNION_TAGS
        if tagged:
            candidates = [c for c in candidates if _UNION_TAGS[part] in c.__name__]
            known = sorted({name for c in candidates for name in c.model_fields})
            continue
        path.append(part)
        known = sorted({name for c in candidates for name in c.model_fields})
        candidates = [t for c in owners for t in _section_types(c.model_fields[part].annotation)]
    return path, known


_UNION_TAGS = {"shop": "Shop", "custom": "Custom"}
"""Tags of discriminated sections and what their class names hold; pydantic puts the tag into the error's location."""


def _section_types(annotation: Any) -> list[type[BaseModel]]:
    """Every section class inside an annotation (unions and Annotated included)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in getattr(annotation, "__args__", ()) for found in _section_types(inner)]


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__
