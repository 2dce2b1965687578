"""The script inside a bundle. It is text, because it runs where rayrl is not installed."""

from __future__ import annotations

CHECKER = '''"""Checks this bundle: python verify.py (in the unpacked folder). Needs nothing but Python."""
import hashlib
import json
import pathlib
import sys

root = pathlib.Path(__file__).resolve().parent
bad = []


def read(path):
    return (root / path).read_bytes()


manifest = json.loads(read("MANIFEST.json"))
for path, digest in manifest["files"].items():
    try:
        if hashlib.sha256(read(path)).hexdigest() != digest:
            bad.append(path + " is not what was exported")
    except OSError:
        bad.append(path + " is missing")
there = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
bad += [path + " should not be there" for path in sorted(there - set(manifest["files"]) - {"MANIFEST.json"})]
if not bad:
    skill = json.loads(read("skill/snapshot.json"))
    rows = []
    for entry in sorted(skill["files"], key=lambda e: e["path"].encode()):
        data = read("skill/tree/" + entry["path"])
        rows.append([entry["path"], entry["mode"], len(data), hashlib.sha256(data).hexdigest()])
    text = json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if hashlib.sha256(text.encode()).hexdigest() != skill["content_sha256"]:
        bad.append("the Skill's content hash does not fit its files")
    results = [json.loads(line) for line in read("results.jsonl").splitlines()]
    scored = [
        r for r in results
        if r["repeat"] == 0 and r["gold_route"] is not None and r["status"] in ("completed", "failed")
        and r["failure"] != "infrastructure"
    ]
    right = sum(r["prediction"] == r["gold_route"] for r in scored)
    said = json.loads(read("metrics.json"))["original"]["overall"]["accuracy"]
    if (said["successes"], said["n"]) != (right, len(scored)):
        stated = "%s of %s" % (said["successes"], said["n"])
        bad.append("metrics.json says %s, the results give %s of %s" % (stated, right, len(scored)))
    else:
        print("%d of %d labelled cases agree; Skill %s" % (right, len(scored), skill["content_sha256"][:12]))
for line in bad:
    print("FAIL " + line, file=sys.stderr)
print("bundle is %s" % ("damaged" if bad else "intact"))
sys.exit(1 if bad else 0)
'''
