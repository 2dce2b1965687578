"""Settings of ``rayrl studio``."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from rayrl.config import Section, operational
from rayrl.errors import ConfigError


class StudioConfig(Section):
    """How the application is served and what it may reach."""

    root: str = operational("~/.rayrl/studio")
    """Folder of the store: database, uploads, snapshots, traces."""
    runs: str = operational("runs")
    """Folder below which runs, trainings, evaluations and banks are looked for. It is only read."""
    host: str = operational("127.0.0.1")
    """Address to bind to. Anything but loopback needs a token."""
    port: int = operational(8765, ge=0, le=65535)
    """Port; 0 takes a free one."""
    token_env: str = operational("RAYRL_STUDIO_TOKEN")
    """Name of the environment variable with the token. Set, everybody needs it; beyond loopback it must be set."""
    allowed_hosts: list[str] = operational(default_factory=list)
    """Further host names (without port) under which the application may be addressed."""
    skills: dict[str, str] = operational(default_factory=dict)
    """Deployed Skills: name to folder. Interactive sessions use them; snapshots may be taken of them by name."""
    skill_roots: list[str] = operational(default_factory=list)
    """Folders below which snapshots of folders and repositories may be taken over HTTP."""
    checkpoints: str | None = operational(None)
    """Folder of a trained retrieval gate for ``/api/gate``."""
    max_upload_mb: int = operational(64, ge=1, le=2048)
    """Largest upload."""
    batch_concurrency: int = operational(8, ge=1, le=256)
    """Concurrent cases of an experiment that names no number."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def skill_folder(self, name: str) -> Path:
        """The folder of a deployed Skill.

        Raises:
            ConfigError: no Skill of this name is deployed.
        """
        if name not in self.skills:
            raise ConfigError(f"no Skill {name!r} is deployed; deployed: {', '.join(sorted(self.skills)) or 'none'}")
        return Path(self.skills[name]).expanduser()

    def permitted(self, folder: str) -> Path:
        """A folder a request names, if it lies below one of ``skill_roots`` or is a deployed Skill.

        Raises:
            ConfigError: it does not; links are followed first.
        """
        try:
            path = Path(folder).expanduser().resolve()
        except (OSError, ValueError, RuntimeError):
            raise ConfigError("this is no folder name") from None
        roots = self.permitted_roots()
        if not any(path == root or root in path.parents for root in roots):
            raise ConfigError(
                "the folder is not below one of the permitted ones; start the studio with --skill-root FOLDER, or add "
                f"it to skill_roots in its config. Permitted: {', '.join(map(str, roots)) or 'none'}"
            )
        return path

    def permitted_roots(self) -> list[Path]:
        """Folders below which a request may name one: ``skill_roots`` and the deployed Skills."""
        return [Path(r).expanduser().resolve() for r in dict.fromkeys([*self.skill_roots, *self.skills.values()])]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
