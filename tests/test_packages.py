"""The arrows between the packages: jobs -> actors, learners -> rayrl (an actor may wrap a learner, never the other way
round); nothing under rayrl knows Ray."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rayrl", "actors", "learners", "jobs")
ALLOWED = {
    "rayrl": {"rayrl"},
    "actors": {"actors", "learners", "rayrl"},
    "learners": {"learners", "rayrl"},
    "jobs": {"jobs", "learners", "actors", "rayrl"},
}


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


def imported(path):
    """Top-level names a file imports, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imported(path)
        if name in PACKAGES and name not in ALLOWED[package]
    ]
    assert wrong == []


def test_nothing_under_rayrl_names_ray_or_the_tests():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules("rayrl")
        for name in imported(path)
        if name in ("ray", "tests")
    ]
    assert wrong == []


LOAD = """
import importlib, pkgutil, sys
import rayrl
failed = []
for module in pkgutil.walk_packages(rayrl.__path__, "rayrl."):
    if module.name.endswith("__main__") or ".migrations." in module.name:  # scripts, not modules
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if error.name and error.name.split(".")[0] in ("rayrl", "actors", "learners", "jobs"):
            raise
        failed.append(module.name)
print(len([name for name in sys.modules if name.startswith("rayrl.")]))
print(sorted(name for name in sys.modules if name == "ray" or name.startswith("ray.")))
print(failed)
"""


def test_importing_all_of_rayrl_loads_no_ray():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    count, ray, failed = done.stdout.splitlines()
    assert int(count) > 50 and ray == "[]" and failed == "[]"


def test_planning_loads_neither_ray_nor_torch():
    code = (
        "import sys, jobs.cli, jobs.plan; "
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'ray', 'torch', 'wandb'}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"
