"""Folders of Skills in the shapes that real ones have. ``SHAPES`` maps a name to the files of a folder.

A value is text, bytes, ``("run", text)`` for a run bit, or ``("link", target)``.
"""

PLAIN = "---\nname: {name}\ndescription: Does a thing.\n---\n\n# Title\n\nText.\n"


def md(name="skill", body="# Title\n\nText.\n", head=""):
    return f"---\nname: {name}\ndescription: Does a thing.\n{head}---\n\n{body}"


SHAPES = {
    "plain": {"SKILL.md": md("plain")},
    "other-name": {"SKILL.md": md("something-else")},
    "no-front-matter": {"SKILL.md": "# Title\n\nText\n"},
    "empty-front-matter": {"SKILL.md": "---\n---\n# T\n"},
    "unclosed-front-matter": {"SKILL.md": "---\nname: x\n# T\n"},
    "rule-in-body": {"SKILL.md": md("rule-in-body", "# A\n\ntext\n\n---\n\n## B\n\nmore\n\n---\n")},
    "yes-name": {"SKILL.md": "---\nname: yes\ndescription: no\n---\n# T\n"},
    "number-name": {"SKILL.md": "---\nname: 007\ndescription: 1.0\n---\n# T\n"},
    "colon": {"SKILL.md": "---\nname: colon\ndescription: Use when: the user says so: always\n---\n# T\n"},
    "folded": {"SKILL.md": "---\nname: folded\ndescription: >-\n  Two\n  lines\n---\n# T\n"},
    "bom": {"SKILL.md": ("\ufeff" + md("bom")).encode()},
    "crlf": {"SKILL.md": md("crlf").replace("\n", "\r\n").encode()},
    "mixed-ends": {"SKILL.md": md("mixed-ends", "# A\r\ntext\n\r\n## B\n").encode()},
    "no-final-newline": {"SKILL.md": md("no-final-newline").rstrip()},
    "long": {"SKILL.md": md("long", "# T\n" + "line\n" * 700)},
    "long-description": {"SKILL.md": f"---\nname: long-description\ndescription: {'x' * 2000}\n---\n# T\n"},
    "中文技能": {
        "SKILL.md": md("中文技能", "# 标题\n\n## 判断 流程\n\n文\n"),
        "知识/地图 能力.md": "# 地图\n\n## 到达电量预估\n\n文\n",
    },
    "upper": {"SKILL.md": md("Upper_Case Name")},
    "unknown-keys": {"SKILL.md": md("unknown-keys", head="version: 1\nauthor: me\n")},
    "tools-list": {"SKILL.md": md("tools-list", head="allowed-tools:\n  - Bash\n  - Read\nmetadata:\n  a: b\n")},
    "files-anywhere": {
        "SKILL.md": md("files-anywhere"),
        "lib/x.py": "print(1)\n",
        "a/b/c/d.txt": "deep\n",
        "notes": "n\n",
    },
    "run-bits": {"SKILL.md": md("run-bits"), "scripts/go.sh": ("run", "#!/bin/sh\n"), "scripts/data.sh": "no\n"},
    "links": {"SKILL.md": md("links"), "references/a.md": "# A\n", "latest.md": ("link", "references/a.md")},
    "folder-link": {"SKILL.md": md("folder-link"), "v1/a.md": "# A\n", "current": ("link", "v1")},
    "link-chain": {"SKILL.md": md("link-chain"), "a.md": "# A\n", "b": ("link", "a.md"), "c": ("link", "b")},
    "binary": {"SKILL.md": md("binary"), "assets/logo.png": bytes(range(256)) * 40, "font.woff2": b"\0\xff" * 500},
    "latin1": {"SKILL.md": md("latin1"), "notes.txt": "caf\xe9".encode("latin-1")},
    "not-utf8": {"SKILL.md": md("not-utf8", "# Caf\xe9\n").encode("latin-1")},
    "dead-links": {
        "SKILL.md": md("dead-links", "# T\n\n[a](gone.md) [b](a.md#nowhere) [c](https://x.y) [d](#t)\n"),
        "a.md": "# A\n",
    },
    "code-headings": {
        "SKILL.md": md("code-headings", "# Real\n\n```sh\n# not a heading\n```\n\n    # nor this\n\n## Real\n")
    },
    "same-headings": {"SKILL.md": md("same-headings", "# A\n\n## Use\n\n## Use\n\n### `Use`!\n")},
    "setext": {"SKILL.md": md("setext", "Title\n=====\n\nSub\n---\n\ntext\n")},
    "empty-files": {"SKILL.md": md("empty-files"), "empty.md": "", "sub/.keep": ""},
    "dotfiles": {"SKILL.md": md("dotfiles"), ".hidden": "x\n", ".github/x.yml": "a: 1\n"},
    "litter": {"SKILL.md": md("litter"), ".DS_Store": b"\0\0", "__pycache__/x.pyc": b"\1"},
    "lfs": {"SKILL.md": md("lfs"), "model.bin": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
    "odd-names": {"SKILL.md": md("odd-names"), "a b/c#d?.md": "# X\n", "%2e%2e/é.md": "# Y\n", "-dash.md": "# Z\n"},
    "nul-inside": {"SKILL.md": md("nul-inside"), "x.txt": b"a\0b\n"},
    "export-ignore": {
        "SKILL.md": md("export-ignore"),
        ".gitattributes": "notes.md export-ignore\n*.txt text eol=crlf\nv.md export-subst\n",
        "notes.md": "# N\n",
        "a.txt": "a\nb\n",
        "v.md": "$Format:%H$\n",
    },
    "nested-skill": {"SKILL.md": md("nested-skill"), "sub/SKILL.md": md("sub")},
}


def write(folder, files):
    for path, value in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, tuple) and value[0] == "link":
            place.symlink_to(value[1])
            continue
        data = value[1] if isinstance(value, tuple) else value
        place.write_bytes(data if isinstance(data, bytes) else data.encode())
        if isinstance(value, tuple):
            place.chmod(0o755)
    return folder
