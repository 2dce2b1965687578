"""Snapshots are byte-exact, whatever the folder looks like, from a folder and from git alike."""

import io
import os
import subprocess
import tarfile

import pytest

from rayrl.errors import DataError
from rayrl.skills.diff import diff_skills
from rayrl.skills.lint import front_matter
from rayrl.skills.markdown import find_section, headings, lines_of, render, resolve, slug
from rayrl.skills.snapshot import LINK, RUN, file_bytes, load, take_folder, take_git, verify, write_snapshot
from tests.workbench.skills import SHAPES, md, write


def git(folder, *words):
    environment = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    environment |= {"GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, env=environment)
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """All shapes committed in one repository, tagged v1."""
    root = tmp_path_factory.mktemp("repository")
    git(root, "init", "-q", "-b", "main")
    for name, files in SHAPES.items():
        write(root / "skills" / name, files)
    git(root, "add", "-A", "-f")
    git(root, "commit", "-qm", "one")
    git(root, "tag", "v1")
    return root


def test_there_are_three_dozen_shapes():
    assert len(SHAPES) >= 36


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_freezes_verifies_and_diffs(name, repository, tmp_path):
    folder = write(tmp_path / "plain" / name, SHAPES[name])
    taken = take_folder(folder)
    modes = {entry.path: entry.mode for entry in taken.manifest.files}
    for path, value in SHAPES[name].items():
        if isinstance(value, tuple) and value[0] == "link":
            assert modes[path] == LINK and taken.files[path] == value[1].encode()
            continue
        data = value[1] if isinstance(value, tuple) else value
        assert taken.files[path] == (data if isinstance(data, bytes) else data.encode())
        assert (modes[path] == RUN) == isinstance(value, tuple)
    stored = write_snapshot(taken, tmp_path / "snapshots")
    assert verify(stored) == taken.manifest and load(stored).files == taken.files
    assert write_snapshot(taken, tmp_path / "snapshots") == stored
    assert diff_skills(taken, load(stored)) == []
    assert all(f.level in ("warning", "info") and f.message for f in taken.manifest.findings)

    main = folder / "SKILL.md"
    main.write_bytes(main.read_bytes() + b"\n\n## Added later\n\nmore\n")
    (folder / "new.bin").write_bytes(b"\0\xff")
    changes = {c.path: (c.change, c.sections) for c in diff_skills(taken, take_folder(folder))}
    assert changes.keys() == {"SKILL.md", "new.bin"} and changes["new.bin"][0] == "added"
    sections = [] if name == "not-utf8" else ["SKILL.md#added-later"]  # no text, no sections
    assert changes["SKILL.md"][0] == "modified" and set(sections) <= set(changes["SKILL.md"][1])
    if name in ("export-ignore",):
        return  # a checkout would rewrite line ends there; the next test looks at that
    committed = take_git(repository, "v1", f"skills/{name}")
    assert committed.manifest.content_sha256 == taken.manifest.content_sha256
    assert (committed.manifest.status, committed.manifest.git_tag) == ("committed", "v1")


def test_git_archive_has_three_faults_and_the_snapshot_none(repository):
    raw = subprocess.run(
        ["git", "-C", str(repository), "archive", "v1", "skills/export-ignore"], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        there = {
            m.name.removeprefix("skills/export-ignore/"): archive.extractfile(m).read() for m in archive if m.isfile()
        }
    assert "notes.md" not in there and there["a.txt"] == b"a\r\nb\r\n" and b"Format" not in there["v.md"]
    taken = take_git(repository, "v1", "skills/export-ignore")
    assert taken.files["notes.md"] == b"# N\n" and taken.files["a.txt"] == b"a\nb\n"
    assert taken.files["v.md"] == b"$Format:%H$\n"


def test_commit_tag_draft_and_clean_checkout(tmp_path):
    root = tmp_path / "r"
    skill = write(root / "s", {"SKILL.md": md("s"), "k.md": "# K\n", "old.md": "# O\n"})
    (root / ".gitignore").write_text("*.log\n")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    first = git(root, "rev-parse", "HEAD")
    git(root, "tag", "v1")
    clean = take_folder(skill)
    assert (clean.manifest.status, clean.manifest.dirty, clean.manifest.git_tag) == ("committed", False, "v1")
    assert clean.manifest.content_sha256 == take_git(root, first[:10], "s").manifest.content_sha256

    (skill / "k.md").write_text("# K\n\nmore\n")
    (skill / "new.md").write_text("# N\n")
    (skill / "x.log").write_text("noise")
    (skill / "old.md").unlink()
    draft = take_folder(skill)
    assert (draft.manifest.status, draft.manifest.dirty, draft.manifest.git_tag) == ("draft", True, None)
    assert sorted(draft.files) == ["SKILL.md", "k.md", "new.md"]
    changes = {c.path: (c.change, c.sections) for c in diff_skills(clean, draft)}
    assert changes == {
        "k.md": ("modified", ["k.md#k"]),
        "new.md": ("added", ["new.md#n"]),
        "old.md": ("removed", ["old.md#o"]),
    }

    before = git(root, "status", "--porcelain", "--branch")
    take_git(root, "v1", "s")
    assert git(root, "status", "--porcelain", "--branch") == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"readme.md": "x"}, "no SKILL.md"),
        ({"skill.md": "x"}, "there is skill.md"),
        ({"SKILL.md": md(), "out": ("link", "../../etc/passwd")}, "leads out of the Skill"),
        ({"SKILL.md": md(), "out": ("link", "/etc/passwd")}, "leads out of the Skill"),
        ({"SKILL.md": md(), "gone": ("link", "nowhere.md")}, "leads nowhere"),
    ],
)
def test_what_is_no_skill_is_refused(files, message, tmp_path):
    with pytest.raises(DataError, match=message):
        take_folder(write(tmp_path / "s", files))


def test_refusals_of_git_sources(repository, tmp_path):
    for ref, path, message in [
        ("nope", "skills/plain", "no commit or tag 'nope'"),
        ("v1", "skills/nope", "no folder 'skills/nope'"),
        ("v1", "../other", "leaves the repository"),
        ("--upload-pack=x", "skills/plain", "no git revision"),
    ]:
        with pytest.raises(DataError, match=message):
            take_git(repository, ref, path)
    fifo = write(tmp_path / "s", {"SKILL.md": md()})
    os.mkfifo(fifo / "pipe")
    with pytest.raises(DataError, match="no ordinary file"):
        take_folder(fifo)


def test_forged_tree_with_dot_dot_names_is_refused(tmp_path):
    root = tmp_path / "r"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")

    def obj(kind, data):
        done = subprocess.run(
            ["git", "-C", str(root), "hash-object", "-t", kind, "-w", "--stdin", "--literally"],
            input=data,
            capture_output=True,
            check=True,
        )
        return done.stdout.strip()

    blob = obj("blob", md().encode())
    inner = obj("tree", b"100644 SKILL.md\0" + bytes.fromhex(blob.decode()))
    outer = obj(
        "tree", b"40000 ..\0" + bytes.fromhex(inner.decode()) + b"100644 SKILL.md\0" + bytes.fromhex(blob.decode())
    )
    top = obj("tree", b"40000 s\0" + bytes.fromhex(outer.decode()))
    commit = obj("commit", b"tree " + top + b"\nauthor a <a@b> 0 +0000\ncommitter a <a@b> 0 +0000\n\nx\n").decode()
    with pytest.raises(DataError, match="no file name of a Skill"):
        take_git(root, commit, "s")


@pytest.mark.parametrize("damage", ["change", "add", "remove", "mode"])
def test_verify_names_what_was_damaged(damage, tmp_path):
    stored = write_snapshot(take_folder(write(tmp_path / "s", {"SKILL.md": md(), "k.md": "# K\n"})), tmp_path / "out")
    place = stored / "tree" / "k.md"
    place.chmod(0o644)
    if damage == "change":
        place.write_text("# k\n")
    elif damage == "add":
        (stored / "tree" / "k2.md").write_text("x")
    elif damage == "remove":
        place.unlink()
    else:
        place.chmod(0o755)
    with pytest.raises(DataError, match=r"k2?\.md"):
        verify(stored)


def codes(name):
    return {f.code for f in _take(name).manifest.findings}


def _take(name, cache={}):  # noqa: B006
    import tempfile
    from pathlib import Path

    if name not in cache:
        cache[name] = take_folder(write(Path(tempfile.mkdtemp()) / name, SHAPES[name]))
    return cache[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", set()),
        ("other-name", {"name_folder"}),
        ("no-front-matter", {"no_front_matter", "no_name", "no_description"}),
        ("bom", {"bom"}),
        ("crlf", {"crlf"}),
        ("colon", {"front_matter_yaml"}),
        ("long", {"long"}),
        ("long-description", {"long_description"}),
        ("yes-name", {"name_folder"}),
        ("upper", {"name_folder", "name_form"}),
        ("unknown-keys", {"unknown_key"}),
        ("dead-links", {"dead_link", "dead_anchor"}),
        ("lfs", {"lfs_pointer"}),
        ("litter", {"litter"}),
        ("not-utf8", {"not_utf8"}),
        ("rule-in-body", set()),
        ("tools-list", set()),
    ],
)
def test_lint_warns_and_loads(name, expected):
    assert codes(name) == expected


def test_front_matter_keeps_text():
    assert front_matter("---\nname: yes\ndescription: 1.0\n---\n")[0] == {"name": "yes", "description": "1.0"}
    meta, _ = front_matter("---\nname: a\ndescription: Use when: so\n---\n")
    assert meta == {"name": "a", "description": "Use when: so"}
    assert _take("yes-name").manifest.name == "yes" and _take("bom").manifest.name == "bom"


def test_headings_are_those_of_commonmark():
    assert [h.slug for h in headings(SHAPES["code-headings"]["SKILL.md"])] == ["real", "real-1"]
    assert [h.slug for h in headings(SHAPES["same-headings"]["SKILL.md"])] == ["a", "use", "use-1", "use-2"]
    assert [h.slug for h in headings(SHAPES["setext"]["SKILL.md"])] == ["title", "sub"]
    assert slug("判断 流程（二）") == "判断-流程二" and slug("Hello, World! `x`") == "hello-world-x"


def test_sections_and_lines_resolve():
    text = "---\na: b\n---\n# A\n\none\n\n## B\n\ntwo\n\n### C\n\nthree\n\n## D\n\nfour\n"
    found = find_section(text, "B")
    assert lines_of(text, found.start, found.end) == "## B\n\ntwo\n\n### C\n\nthree\n\n"
    assert resolve("f", text, "L6-L6").start == 6 and lines_of(text, 6, 6) == "one\n"
    assert (
        resolve("f", text, "L99") is None and resolve("f", text, "nope") is None and resolve("f", text, "L3-L2") is None
    )


def test_links_are_followed_inside_the_skill():
    assert file_bytes(_take("links"), "latest.md") == b"# A\n"
    assert file_bytes(_take("link-chain"), "c") == b"# A\n"
    assert file_bytes(_take("links"), "../SKILL.md") is None


@pytest.mark.parametrize(
    "attack",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        '![x](x" onerror="alert(1))',
        "<a href='vbscript:x'>y</a>",
        "<svg/onload=alert(1)>",
    ],
)
def test_rendered_markdown_runs_nothing(attack):
    import html
    from html.parser import HTMLParser

    found = []

    class Look(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append((tag, dict(attrs)))

    Look().feed(render(f"# T\n\n{attack}\n"))
    assert not {tag for tag, _ in found} & {"script", "svg", "iframe", "style"}
    for _, attributes in found:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src"):
            assert html.unescape(attributes.get(name) or "").split(":")[0] not in ("javascript", "data", "vbscript")
