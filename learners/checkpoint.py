"""Checkpoints: safetensors for tensors, one JSON for everything else; written atomically, verified on reading.

A checkpoint is a folder ``step-000100`` that is complete or absent: it is written beside its final name, flushed, and
renamed. It holds the policy, the reference, Adam's moments, the weights of the last ``staleness + 1`` versions, and
the position. There is no generator state to save: every random number is a function of (seed, position).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learners.collect import Weights
from learners.learner import Learner, LearnerState
from rayrl.errors import DataError, RunConflictError
from rayrl.retrieval.policy import checksum

SCHEMA = "rayrl-retrieval-checkpoint-v1"
STATE = "state.json"


def save_checkpoint(folder: Path, learner: Learner, history: list[Weights], identity: dict[str, Any]) -> Path:
    """Write ``folder/step-NNNNNN``; ``identity`` (encoder, task hash, fingerprint) must match on restore."""
    name = f"step-{learner.state.updates:06d}"
    final, temporary = folder / name, folder / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _save(temporary / "policy.safetensors", learner.weights())
    if learner.reference is not None:
        _save(temporary / "reference.safetensors", dict(learner.reference.state_dict()))
    moments, steps = _optimizer_tensors(learner)
    _save(temporary / "optimizer.safetensors", moments)
    _save(
        temporary / "history.safetensors",
        {f"{i}/{k}": v for i, weights in enumerate(history) for k, v in weights.items()},
    )
    state = {
        "schema": SCHEMA,
        "state": asdict(learner.state),
        "policy": learner.policy.spec.model_dump(),
        "policy_checksum": checksum(learner.policy),
        "reference_checksum": learner.reference_checksum,
        "optimizer_steps": steps,
        "history": len(history),
        "identity": identity,
    }
    _write(temporary / STATE, orjson.dumps(state, option=orjson.OPT_INDENT_2))
    if final.exists():
        shutil.rmtree(final)
    temporary.replace(final)
    _sync(folder)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    complete = [p for p in folder.glob("step-*") if (p / STATE).is_file()] if folder.is_dir() else []
    return max(complete, default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part.

    Raises:
        DataError: not a checkpoint of this schema.
    """
    try:
        state: dict[str, Any] = orjson.loads((checkpoint / STATE).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"{checkpoint} is no readable checkpoint ({type(error).__name__})") from None
    if state.get("schema") != SCHEMA:
        raise DataError(f"{checkpoint}: schema {state.get('schema')!r}, expected {SCHEMA!r}")
    return state


def restore_checkpoint(checkpoint: Path, learner: Learner, identity: dict[str, Any]) -> list[Weights]:
    """Load everything into ``learner``; returns the weight history, oldest first.

    Raises:
        RunConflictError: the checkpoint belongs to another experiment, encoder or memory; names the difference.
        DataError: the stored weights do not match their checksum.
    """
    state = read_state(checkpoint)
    check_identity(state["identity"], identity, checkpoint)
    learner.policy.load_state_dict(load_file(checkpoint / "policy.safetensors"))
    if checksum(learner.policy) != state["policy_checksum"]:
        raise DataError(f"{checkpoint}: the policy's weights do not match their checksum")
    if state["reference_checksum"]:
        learner.freeze_reference()
        if learner.reference is None:
            raise DataError(f"{checkpoint}: the reference is missing")
        learner.reference.load_state_dict(load_file(checkpoint / "reference.safetensors"))
        learner.reference_checksum = state["reference_checksum"]
        learner.verified_reference()
    moments = load_file(checkpoint / "optimizer.safetensors")
    for name, parameter in learner.policy.named_parameters():
        if f"exp_avg/{name}" in moments:
            learner.optimizer.state[parameter] = {
                "step": torch.tensor(float(state["optimizer_steps"])),
                "exp_avg": moments[f"exp_avg/{name}"],
                "exp_avg_sq": moments[f"exp_avg_sq/{name}"],
            }
    learner.state = LearnerState(**state["state"])
    flat = load_file(checkpoint / "history.safetensors")
    history: list[Weights] = [{} for _ in range(state["history"])]
    for key, value in flat.items():
        index, _, name = key.partition("/")
        history[int(index)][name] = value
    return history


def check_identity(stored: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Refuse another encoder, memory or experiment, naming what differs."""
    for key in sorted(set(stored) | set(wanted)):
        if stored.get(key) != wanted.get(key):
            raise RunConflictError(
                f"{where} was made with {key} {stored.get(key)!r}, now it is {wanted.get(key)!r}; "
                "use the same config, or start a new run"
            )


def _optimizer_tensors(learner: Learner) -> tuple[dict[str, Tensor], int]:
    out: dict[str, Tensor] = {}
    steps = 0
    for name, parameter in learner.policy.named_parameters():
        state = learner.optimizer.state.get(parameter)
        if state:
            steps = int(state["step"])
            out[f"exp_avg/{name}"] = state["exp_avg"]
            out[f"exp_avg_sq/{name}"] = state["exp_avg_sq"]
    return out, steps


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    # clones: safetensors refuses tensors that share storage, and history may hold one version twice
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
