"""Frozen Skills: a whole folder, byte for byte, with a hash that names it for good.

Sources: a deployed folder, a git commit or tag, or an uncommitted draft. Git is only read: ``ls-tree -rz`` and
``cat-file --batch`` give exact bytes, where ``git archive`` drops ``export-ignore`` files, rewrites line ends and
expands ``export-subst``. No branch is switched, and the deployed Skill is never touched.

Content hash: SHA-256 over the canonical JSON of the sorted list of ``[path, mode, size, sha256]``. Modes are git's
(``100644``, ``100755``, ``120000`` for a link, whose bytes are its target).
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import orjson

from rayrl.errors import DataError
from rayrl.schemas import Frozen, canonical_json, sha256_hex
from rayrl.skills.lint import Finding, front_matter, lint

LINK, RUN, PLAIN = "120000", "100755", "100644"
MAX_FILES, MAX_BYTES = 20_000, 256 * 1024 * 1024
MANIFEST = "snapshot.json"
TREE = "tree"


class FileEntry(Frozen):
    """One file of a snapshot."""

    path: str
    mode: str
    size: int
    sha256: str


class SkillManifest(Frozen):
    """What a snapshot is; stored beside its tree."""

    schema_version: str = "rayrl-skill-snapshot-v1"
    name: str
    content_sha256: str
    files: list[FileEntry]
    status: str
    """``committed``, ``draft`` (uncommitted) or ``deployed`` (a folder outside of git)."""
    source: str
    repository: str | None = None
    git_commit: str | None = None
    git_tag: str | None = None
    dirty: bool = False
    findings: list[Finding] = []


@dataclass(frozen=True)
class Taken:
    """A Skill in memory: its manifest and the bytes of every file."""

    manifest: SkillManifest
    files: dict[str, bytes]


def content_hash(entries: list[FileEntry]) -> str:
    """See the module docstring."""
    rows = [[e.path, e.mode, e.size, e.sha256] for e in sorted(entries, key=lambda e: e.path.encode())]
    return sha256_hex(canonical_json(rows))


def take_folder(folder: Path) -> Taken:
    """The files of a folder as they are. Inside a git checkout: a draft when it differs from HEAD, else the commit.

    Git-ignored files of a checkout are left out; everything else is frozen, untracked files included.

    Raises:
        DataError: no folder, no SKILL.md, a link that leaves it, too large.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what = "is no folder; name the folder that holds SKILL.md" if folder.exists() else "does not exist"
        raise DataError(f"Skill folder {folder} {what}")
    folder = folder.resolve()
    top = _git_or_none(folder, "rev-parse", "--show-toplevel")
    found: dict[str, tuple[str, bytes]] = {}
    size = 0
    for path in _tracked(folder) if top is not None else _walk(folder):
        item = _read(folder, path)
        if item is None:
            continue
        found[path] = item
        size += len(item[1])
        if len(found) > MAX_FILES or size > MAX_BYTES:
            raise DataError(f"Skill folder {folder} has more than {MAX_FILES} files or {MAX_BYTES / 1e6:.0f} MB")
    commit = _git_or_none(folder, "rev-parse", "HEAD") if top is not None else None
    if commit is None or top is None:
        return _taken(found, folder.name, status="draft" if top else "deployed", source=str(folder))
    repository = Path(top)
    inside = folder.relative_to(repository).as_posix()
    try:
        committed = _from_tree(repository, commit, inside)
    except DataError:
        committed = {}
    dirty = committed != found
    tag = None if dirty else _git_or_none(folder, "describe", "--tags", "--exact-match", "HEAD")
    return _taken(
        found,
        folder.name,
        status="draft" if dirty else "committed",
        source=str(folder),
        repository=repository.name,
        git_commit=commit,
        git_tag=tag,
        dirty=dirty,
    )


def from_files(files: dict[str, bytes], name: str) -> Taken:
    """A Skill made of bytes in memory.

    Raises:
        DataError: what was given is no Skill.
    """
    for path in files:
        _check_name(path.encode(), name)
    return _taken({path: (PLAIN, data) for path, data in files.items()}, name, status="draft", source=name)


def take_git(repository: Path, ref: str, path: str) -> Taken:
    """The Skill at ``path`` of a commit or tag. The checkout is not touched.

    Raises:
        DataError: no repository, commit or folder there; the message says which.
    """
    repository = Path(repository).expanduser()
    if not repository.is_dir():
        raise DataError(f"repository {repository} does not exist")
    if ref.startswith("-") or not ref.strip():
        raise DataError(f"{ref!r} is no git revision")
    commit = _git_or_none(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if commit is None:
        raise DataError(f"repository {repository} has no commit or tag {ref!r}")
    inside = posixpath.normpath(path).strip("/") if path else "."
    if inside.startswith(".."):
        raise DataError(f"the Skill path {path!r} leaves the repository")
    found = _from_tree(repository, commit, inside)
    tag = ref if _git_or_none(repository, "rev-parse", "--verify", "--quiet", f"refs/tags/{ref}") else None
    name = inside.rsplit("/", 1)[-1] if inside != "." else Path(repository).resolve().name
    top = _git_or_none(repository, "rev-parse", "--show-toplevel") or str(repository)
    return _taken(
        found,
        name,
        status="committed",
        source=f"{ref}:{inside}",
        repository=Path(top).name,
        git_commit=commit,
        git_tag=tag,
    )


def write_snapshot(taken: Taken, root: Path) -> Path:
    """Store under ``root/<name>/<content hash>``; a snapshot already there is verified and kept. Returns its folder."""
    manifest = taken.manifest
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in manifest.name).strip(".") or "skill"
    target = root / safe / manifest.content_sha256
    if target.exists():
        verify(target)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=".part-"))
    try:
        for entry in manifest.files:
            place = part / TREE / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            if entry.mode == LINK:
                place.symlink_to(os.fsdecode(taken.files[entry.path]))
            else:
                place.write_bytes(taken.files[entry.path])
                place.chmod(0o555 if entry.mode == RUN else 0o444)
        (part / MANIFEST).write_bytes(orjson.dumps(manifest.model_dump(), option=orjson.OPT_INDENT_2))
        try:
            part.rename(target)
        except OSError:
            if not target.exists():
                raise
            verify(target)  # another process was faster
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def load_manifest(folder: Path) -> SkillManifest:
    """The manifest of a stored snapshot.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        return SkillManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"snapshot {folder}: its manifest cannot be read: {error}") from None


def verify(folder: Path) -> SkillManifest:
    """Compare a stored snapshot with its manifest, byte for byte.

    Raises:
        DataError: names the first file that differs, is missing or should not be there.
    """
    manifest = load_manifest(folder)
    tree = folder / TREE
    known = {entry.path: entry for entry in manifest.files}
    there = set(_walk(tree))
    for path in sorted(there ^ set(known)):
        raise DataError(f"snapshot {folder}: {path} {'should not be there' if path in there else 'is missing'}")
    for path, entry in known.items():
        item = _read(tree, path)
        if item is None or _entry(path, *item) != entry:
            raise DataError(f"snapshot {folder}: {path} is not what was frozen")
    if content_hash(manifest.files) != manifest.content_sha256:
        raise DataError(f"snapshot {folder}: the content hash does not fit the files")
    return manifest


def load(folder: Path) -> Taken:
    """A stored snapshot with its bytes, verified."""
    manifest = verify(folder)
    files = {}
    for entry in manifest.files:
        item = _read(folder / TREE, entry.path)
        files[entry.path] = item[1] if item else b""
    return Taken(manifest, files)


def file_bytes(taken: Taken, path: str) -> bytes | None:
    """Content of a file of the Skill, links followed inside it; ``None`` when there is none of that exact path."""
    modes = {entry.path: entry.mode for entry in taken.manifest.files}
    for _ in range(20):
        if path not in modes:
            return None
        if modes[path] != LINK:
            return taken.files[path]
        path = _target(path, taken.files[path])
    return None


def _taken(found: dict[str, tuple[str, bytes]], folder: str, **facts: object) -> Taken:
    files = {path: data for path, (_, data) in found.items()}
    findings = lint({p: d for p, (m, d) in found.items() if m != LINK}, folder)
    fatal = [finding for finding in findings if finding.level == "error"]
    if fatal:
        raise DataError(f"{facts['source']}: {fatal[0].message}")
    links = {path for path, (mode, _) in found.items() if mode == LINK}
    for path, (mode, data) in found.items():
        if any(up in links for up in _parents(path)):
            raise DataError(f"{facts['source']}: {path} lies below a link")
        if mode == LINK:
            _check_link(path, data, found, str(facts["source"]))
    meta, _ = front_matter(files["SKILL.md"].decode("utf-8", "replace"))
    name = meta.get("name")
    entries = [_entry(path, mode, data) for path, (mode, data) in sorted(found.items())]
    manifest = SkillManifest.model_validate(
        {
            "name": name if isinstance(name, str) and name else folder,
            "content_sha256": content_hash(entries),
            "files": entries,
            "findings": findings,
            **facts,
        }
    )
    return Taken(manifest, files)


def _check_link(path: str, data: bytes, found: dict[str, tuple[str, bytes]], source: str) -> None:
    target = _target(path, data)
    if target.startswith("../") or target == ".." or posixpath.isabs(os.fsdecode(data)):
        raise DataError(
            f"{source}: the link {path} leads out of the Skill, to {os.fsdecode(data)!r}; replace it by the file"
        )
    if target not in found and not any(other.startswith(f"{target}/") for other in found) and target != ".":
        raise DataError(f"{source}: the link {path} leads nowhere ({os.fsdecode(data)!r})")


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _target(path: str, data: bytes) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), os.fsdecode(data)))


def _entry(path: str, mode: str, data: bytes) -> FileEntry:
    return FileEntry(path=path, mode=mode, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _walk(folder: Path) -> list[str]:
    out = []
    for base, names, files in os.walk(folder):
        names[:] = sorted(n for n in names if n != ".git")
        links = [n for n in names if Path(base, n).is_symlink()]
        names[:] = [n for n in names if n not in links]
        out += [Path(base, n).relative_to(folder).as_posix() for n in [*files, *links] if n != ".git"]
    return sorted(out)


def _tracked(folder: Path) -> list[str]:
    raw = _git(folder, "ls-files", "-coz", "--exclude-standard", "--", ".")
    return sorted({os.fsdecode(name) for name in raw.split(b"\0") if name})


def _read(folder: Path, path: str) -> tuple[str, bytes] | None:
    """Mode and bytes; ``None`` for a file that is gone (deleted but still in the index)."""
    _check_name(path.encode(errors="surrogateescape"), str(folder))
    place = folder / path
    try:
        facts = place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(facts.st_mode):
        return LINK, os.fsencode(place.readlink())
    if not stat.S_ISREG(facts.st_mode):
        kind = "a nested git repository" if stat.S_ISDIR(facts.st_mode) else "no ordinary file"
        raise DataError(f"{place} is {kind}; a Skill holds files, folders and links")
    if facts.st_size > MAX_BYTES:
        raise DataError(f"{place} has {facts.st_size / 1e6:.0f} MB; a Skill has at most {MAX_BYTES / 1e6:.0f} MB")
    return (RUN if facts.st_mode & 0o111 else PLAIN), place.read_bytes()


def _check_name(name: bytes, source: str) -> str:
    try:
        path = name.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{source}: the file name {name!r} is not UTF-8; rename it") from None
    if path.startswith("/") or {"", ".", "..", ".git"} & set(path.split("/")):
        raise DataError(f"{source}: {path!r} is no file name of a Skill")  # a forged tree can hold such names
    return path


def _from_tree(repository: Path, commit: str, inside: str) -> dict[str, tuple[str, bytes]]:
    where = f"{commit}:{'' if inside == '.' else inside}"
    raw = _git_or_none_bytes(repository, "ls-tree", "-rz", where)
    if raw is None:
        raise DataError(f"commit {commit[:12]} of {repository} has no folder {inside!r}")
    entries: list[tuple[str, str, str]] = []
    for line in raw.split(b"\0"):
        if not line:
            continue
        head, _, name = line.partition(b"\t")
        mode, kind, blob = head.decode().split()
        path = _check_name(name, str(repository))
        if kind != "blob":
            raise DataError(f"{inside}/{path} is a submodule; a Skill holds files, folders and links")
        entries.append((path, RUN if mode == RUN else LINK if mode == LINK else PLAIN, blob))
    if len(entries) > MAX_FILES:
        raise DataError(f"{inside} has more than {MAX_FILES} files")
    contents = _blobs(repository, [blob for _, _, blob in entries])
    return {path: (mode, contents[blob]) for path, mode, blob in entries}


def _blobs(repository: Path, names: list[str]) -> dict[str, bytes]:
    order = "".join(f"{name}\n" for name in dict.fromkeys(names)).encode()
    raw = _git(repository, "cat-file", "--batch", stdin=order)
    out: dict[str, bytes] = {}
    at = 0
    while at < len(raw):
        end = raw.index(b"\n", at)
        fields = raw[at:end].decode().split()
        if len(fields) != 3:
            raise DataError(f"repository {repository}: object {fields[0]} is missing (a partial clone?)")
        size = int(fields[2])
        out[fields[0]] = raw[end + 1 : end + 1 + size]
        at = end + 1 + size + 1
    return out


def _git(folder: Path, *words: str, stdin: bytes = b"") -> bytes:
    # our own variables only: hooks, pagers and prompts of the caller's environment have no place here
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "/"), "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-c", "core.quotepath=off", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=120, env=environment)
    except FileNotFoundError:
        raise DataError("git is not installed; snapshots of commits need it") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"git {words[0]} did not end within 120 s in {folder}") from None
    if done.returncode != 0:
        raise DataError(f"git {words[0]} failed in {folder}: {done.stderr.decode('utf-8', 'replace').strip()[:300]}")
    return done.stdout


def _git_or_none_bytes(folder: Path, *words: str) -> bytes | None:
    try:
        return _git(folder, *words)
    except DataError:
        return None


def _git_or_none(folder: Path, *words: str) -> str | None:
    raw = _git_or_none_bytes(folder, *words)
    return raw.decode("utf-8", "replace").strip() or None if raw is not None else None
