"""A training run of a second or two: the Chinese pool, the hashing encoder, no model, no download."""

from pathlib import Path

from learners.training import TrainConfig


def small_config(output: Path, **changes):
    values = {
        "name": "small",
        "output": str(output),
        "task": {
            "pool": "chinese",
            "far": "",
            "distractors": [],
            "encoder": "hash",
            "check_encoder": "",
            "groups": "SLCM",
            "random_memories": 1,
            "cache": str(output.parent / "cache"),
        },
        "fold": {"inside": "all"},
        "policy": {"width": 8, "members": 2},
        "sft": {"epochs": 3, "batch": 32},
        "rl": {"updates": 6, "questions": 8, "group_size": 4},
        "collect": {"shards": 2},
        "evaluate_every": 2,
        "checkpoint_every": 1,
        "tracking": {"wandb": "disabled"},
    }
    for key, change in changes.items():
        values[key] = {**values[key], **change} if isinstance(change, dict) and key in values else change
    return TrainConfig.model_validate(values)
