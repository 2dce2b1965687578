"""From the ``model`` section to a ChatModel, and to what it is without building it."""

from __future__ import annotations

from typing import Any

from rayrl.errors import ConfigError, ConformanceError
from rayrl.models.base import ChatModel
from rayrl.models.config import ModelConfig
from rayrl.models.openai_http import EventSink, OpenAIChatModel
from rayrl.registry import resolve_dotted


def build_model(config: ModelConfig, *, on_event: EventSink | None = None) -> ChatModel:
    """Build the policy a config names.

    Args:
        config: the ``model`` section.
        on_event: receives ``(kind, facts)`` of retries and throttling, for events.jsonl.

    Raises:
        ConfigError: a missing key variable, package, module or option.
        ConformanceError: a dotted path leads to something that is no ChatModel.
    """
    if config.kind == "openai":
        return OpenAIChatModel(config, identity=model_identity(config), on_event=on_event)
    if config.kind == "scripted":
        from rayrl.models.scripted import ScriptedModel

        return ScriptedModel(config.scripted, name=config.name, checkpoint_id=config.checkpoint_id)
    if config.kind == "local":
        from rayrl.models.local import LocalModel

        return LocalModel(config, identity=model_identity(config), on_event=on_event)
    return _build_dotted(config)


def model_identity(config: ModelConfig) -> dict[str, Any]:
    """What makes the configured model this model: equals ``build_model(config).identity()``, without key or network."""
    if config.kind == "scripted":
        from rayrl.models.scripted import scripted_identity

        return scripted_identity(config.scripted, name=config.name, checkpoint_id=config.checkpoint_id)
    if config.kind == "local":
        from rayrl.models.local import local_identity

        return local_identity(config)
    if config.kind == "openai":
        return config.semantic()
    return dict(_build_dotted(config).identity())


def _build_dotted(config: ModelConfig) -> ChatModel:
    factory = resolve_dotted(config.kind, "model")
    if not callable(factory):
        raise ConformanceError(f"model {config.kind!r} is a {type(factory).__name__}; a class or function is expected")
    try:
        model = factory(**config.options)
    except TypeError as error:
        raise ConfigError(f"model {config.kind!r} cannot be built from model.options: {error}") from error
    if not isinstance(model, ChatModel):
        missing = [name for name in ("identity", "generate", "aclose") if not hasattr(model, name)]
        raise ConformanceError(f"model {config.kind!r} is no ChatModel: it lacks {', '.join(missing)}")
    return model
