"""Pools and distractors by name, each with its licence and where it comes from.

``zaragoza``: 503 question-answer pairs about building in Sweden (English, 39 categories), package
``zaragoza-construction-faq``. ``trivia``: general-knowledge questions, ``chatterbot-corpus``. Distractors are memories
that answer none of the questions: ``chatterbot`` (coding, computers, science, ... from the same corpus), or, where the
Debian packages are installed, ``perl-faq`` (perl-doc) and ``python-faq`` (python3.11-doc). ``chinese`` is written for
this project. Anything else is the folder of a pool made with ``rayrl memory build``.
"""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from rayrl.errors import DataError, did_you_mean
from rayrl.retrieval.pools import Memory, MemoryPool, Question, load_pool, read_records

DISTRACTOR_TOPICS = (
    *("ai", "coding", "computers", "food", "health", "history", "literature", "money", "movies"),
    *("politics", "psychology", "science", "sports", "tech_support"),
)


def zaragoza(language: str = "en") -> MemoryPool:
    """The construction FAQ; the memory of a question is its answer."""
    module = _module("zaragoza_construction_faq", "zaragoza-construction-faq")
    rows = module.load(lang=language)
    memories = tuple(Memory(id=r["id"], text=r["a"], category=r["category"], domain="construction") for r in rows)
    questions = tuple(
        Question(id=f"q:{r['id']}", text=r["q"], answer_ids=(r["id"],), category=r["category"], domain="construction")
        for r in rows
    )
    return MemoryPool(
        name=f"zaragoza-{language}",
        source="https://pypi.org/project/zaragoza-construction-faq/ (Zaragoza AB, doi:10.5281/zenodo.19630803)",
        license="CC-BY-4.0",
        version=metadata.version("zaragoza-construction-faq"),
        memories=memories,
        questions=questions,
    ).check()


def trivia() -> MemoryPool:
    """Trivia questions of the chatterbot corpus: class B for every memory here."""
    pairs = _chatterbot("trivia")
    return MemoryPool(
        name="trivia",
        source="https://pypi.org/project/chatterbot-corpus/",
        license="BSD-3-Clause",
        version=metadata.version("chatterbot-corpus"),
        memories=(),
        questions=tuple(
            Question(id=f"trivia:{i}", text=q, category="trivia", domain="trivia") for i, (q, _) in enumerate(pairs)
        ),
    ).check()


def chatterbot_distractors() -> MemoryPool:
    """Answers of other topics of the chatterbot corpus, long enough to be a memory; each text once."""
    memories: list[Memory] = []
    seen: set[str] = set()
    for topic in DISTRACTOR_TOPICS:
        for i, (_, answer) in enumerate(_chatterbot(topic)):
            if len(answer) >= 40 and answer not in seen:
                seen.add(answer)
                memories.append(Memory(id=f"chatterbot:{topic}:{i}", text=answer, category=topic, domain="distractor"))
    return MemoryPool(
        name="chatterbot",
        source="https://pypi.org/project/chatterbot-corpus/",
        license="BSD-3-Clause",
        version=metadata.version("chatterbot-corpus"),
        memories=tuple(memories),
    ).check()


def perl_faq() -> MemoryPool:
    """Answers of perlfaq1-9 as distractors (Debian package perl-doc)."""
    files = sorted(Path("/usr/share/perl").glob("*/pod/perlfaq[1-9].pod")) or sorted(
        Path("/usr/share/perl").glob("*/perlfaq[1-9].pod")
    )
    if not files:
        raise DataError(
            "the perl FAQ is not installed; `apt-get install perl-doc`, or use the distractors `chatterbot`"
        )
    memories = []
    for file in files:
        for i, block in enumerate(re.split(r"^=head2 ", file.read_text(errors="replace"), flags=re.M)[1:]):
            _, _, body = block.partition("\n")
            text = _plain_pod(body)
            if len(text) >= 40:
                memories.append(Memory(id=f"perl:{file.stem}:{i}", text=text, category=file.stem, domain="distractor"))
    return MemoryPool(
        name="perl-faq", source="Debian package perl-doc", license="Artistic or GPL-1+", memories=tuple(memories)
    ).check()


def python_faq() -> MemoryPool:
    """Answers of the Python FAQ as distractors (Debian package python3.11-doc)."""
    folder = Path("/usr/share/doc/python3.11/html/faq")
    files = sorted(folder.glob("*.html"))
    if not files:
        raise DataError(
            "the Python FAQ is not installed; `apt-get install python3.11-doc`, or use the distractors `chatterbot`"
        )
    memories = []
    for file in files:
        sections = re.split(r"<section id=", file.read_text(errors="replace"))[2:]
        for i, section in enumerate(sections):
            body = re.split(r"</h[23]>", section, maxsplit=1)[-1]
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())[:600]
            if len(text) >= 40:
                memories.append(
                    Memory(id=f"python:{file.stem}:{i}", text=text, category=file.stem, domain="distractor")
                )
    return MemoryPool(
        name="python-faq", source="Debian package python3.11-doc", license="PSF-2.0", memories=tuple(memories)
    ).check()


def chinese() -> MemoryPool:
    """Department memories in Chinese, finance and medical distractors, questions of class A and B."""
    root = resources.files("rayrl.retrieval") / "data"
    with resources.as_file(root / "chinese_memories.jsonl") as path:
        memories = tuple(read_records(path, Memory))
    with resources.as_file(root / "chinese_questions.jsonl") as path:
        questions = tuple(read_records(path, Question))
    return MemoryPool(
        name="chinese",
        source="written for rayrl; all figures are invented",
        license="Apache-2.0",
        version="1",
        memories=memories,
        questions=questions,
    ).check()


POOLS: dict[str, Callable[[], MemoryPool]] = {
    "zaragoza": zaragoza,
    "zaragoza-sv": lambda: zaragoza("sv"),
    "trivia": trivia,
    "chatterbot": chatterbot_distractors,
    "perl-faq": perl_faq,
    "python-faq": python_faq,
    "chinese": chinese,
}


def pool_by_name(name: str, base: Path | None = None) -> MemoryPool:
    """A shipped pool by name, else a pool folder.

    Raises:
        DataError: neither; says what there is.
    """
    if name in POOLS:
        return POOLS[name]()
    for folder in (Path(name).expanduser(), (base or Path.cwd()) / name):
        if (folder / "pool.json").is_file():
            return load_pool(folder)
    raise DataError(
        f"no memory pool {name!r}{did_you_mean(name, list(POOLS))}: give one of {', '.join(POOLS)}, "
        "or the folder of a pool made with `rayrl memory build`"
    )


def _module(name: str, package: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise DataError(f"the package {package} is not installed; `pip install {package}` (extra `data`)")
    return importlib.import_module(name)


def _chatterbot(topic: str) -> list[tuple[str, str]]:
    import yaml

    module = _module("chatterbot_corpus", "chatterbot-corpus")
    file = Path(module.__file__).parent / "data" / "english" / f"{topic}.yml"
    conversations = yaml.safe_load(file.read_text())["conversations"]
    return [(str(c[0]), " ".join(str(c[1]).split())) for c in conversations if len(c) > 1]


def _plain_pod(body: str) -> str:
    text = re.sub(r"^=.*$", " ", body, flags=re.M)
    text = re.sub(r"[A-Z]<+\s*([^<>]*)\s*>+", r"\1", text)
    return " ".join(text.split())[:600]
