"""``rayrl skills build RUN... --out DIR``: from frozen traces to a bank of candidates, in durable stages.

cards (analyst and gold firewall) -> clusters -> candidates -> snapshot. Cards are made by Ray Data tasks over byte
ranges of the traces (``--engine ray``), or one range after the other in this process; both call the same function and
give the same cards. A crash resumes at the stage it hit.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from jobs.output import console, facts_table, print_json
from rayrl.errors import ConfigError, UserError
from rayrl.evaluation.rows import is_complete_row
from rayrl.evaluation.sources import Chunk, Source, find_sources, iter_records, load_goals, plan_chunks, read_records
from rayrl.evaluation.view import EpisodeView, view_of
from rayrl.export.select import find_results, read_places
from rayrl.models.config import ModelConfig
from rayrl.models.registry import build_model, model_identity
from rayrl.schemas import JsonDict, sha256_hex
from rayrl.skills.bank import SkillBank, load_snapshot, save_bank
from rayrl.skills.cards import Card, episode_values, screen
from rayrl.skills.compile import (
    MAX_CHUNKS,
    Candidate,
    Cluster,
    candidate_bank,
    cluster_cards,
    compile_chunks,
)
from rayrl.skills.llm_analyst import analyse, prompt_sha256
from rayrl.skills.probe import probe_failure
from rayrl.skills.rules_analyst import RULES_BUILDER, rules_cards
from rayrl.skills.stages import Stages, file_sha256, read_lines, write_lines_atomic
from rayrl.traces.manifest import write_json_atomic

CARDS, REJECTED, CLUSTERS = "cards.jsonl", "rejected.json", "clusters.json"
CANDIDATES, SNAPSHOT = "skill_candidates.jsonl", "skillbank.snapshot.json"
RAY_CHUNK_BYTES = 4 * 1024**2


@dataclass(frozen=True)
class BuildSettings:
    """How to build."""

    analyst: Literal["rules", "llm"] = "rules"
    engine: Literal["local", "ray"] = "local"
    model: ModelConfig | None = None
    """Analyst model, for ``llm``."""
    max_episodes: int | None = None
    """Episodes shown to the analyst, first results first; null = all."""
    limit: int = MAX_CHUNKS
    replay: str | None = None
    """Config of the run whose environment failures are replayed in, for ``llm``."""
    concurrency: int = 4
    address: str | None = None
    parent: Path | None = None
    extra: JsonDict = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories or trace files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="build directory")
    parser.add_argument("--analyst", choices=("rules", "llm"), default="rules")
    parser.add_argument("--model-config", metavar="FILE", help="llm: config whose model section is the analyst")
    parser.add_argument("--replay", metavar="FILE", help="llm: config whose environment failures are replayed in")
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--address", default=None, help="Ray cluster to join")
    parser.add_argument("--max-episodes", type=int, default=None, help="episodes shown to the analyst")
    parser.add_argument("--max-chunks", type=int, default=MAX_CHUNKS, help=f"candidates at most ({MAX_CHUNKS})")
    parser.add_argument("--bank", type=Path, default=None, help="bank to add to or rewrite in")


def build(locations: list[str], out: Path, settings: BuildSettings) -> JsonDict:
    """Build a candidate bank; returns counts and the snapshot's hash. Resumes where an earlier build stopped.

    Raises:
        UserError: nothing to read, an analyst without a model, or episodes that teach nothing.
    """
    if settings.analyst == "llm" and settings.model is None:
        raise ConfigError("--analyst llm needs --model-config: who should read the episodes?")
    if not 1 <= settings.limit <= MAX_CHUNKS:
        raise ConfigError(f"--max-chunks: {settings.limit} is not within 1..{MAX_CHUNKS}")
    sources = find_sources(locations)
    parent = load_snapshot(settings.parent) if settings.parent is not None else None
    analyst = (
        {"kind": "llm", "model": model_identity(settings.model), "prompt": prompt_sha256()}
        if settings.model is not None and settings.analyst == "llm"
        else {"kind": "rules", **RULES_BUILDER.model}
    )
    inputs: JsonDict = {
        "sources": [[s.run, s.size, file_sha256(Path(s.url)) if Path(s.url).is_file() else s.url] for s in sources],
        "analyst": analyst,
        "max_episodes": settings.max_episodes,
        "replay": settings.replay is not None,
    }
    stages = Stages(out)
    facts = stages.run("cards", inputs, [CARDS, REJECTED], lambda: _cards(sources, out, settings))
    clusters = stages.run("clusters", {"after": "cards"}, [CLUSTERS], lambda: _clusters(out))
    found = stages.run(
        "candidates",
        {"limit": settings.limit, "parent": parent.sha256 if parent else None},
        [CANDIDATES],
        lambda: _candidates(out, parent, settings.limit),
    )
    bank = stages.run("snapshot", {"after": "candidates"}, [SNAPSHOT], lambda: _snapshot(out, parent))
    return {**facts, **clusters, **found, **bank, "ran": stages.ran, "snapshot": str(out / SNAPSHOT)}


def _cards(sources: list[Source], out: Path, settings: BuildSettings) -> JsonDict:
    rejected: Counter[str] = Counter()
    cards: list[JsonDict] = []
    # the first complete record of an episode counts; episodes in an order that does not depend on when they finished
    found: dict[tuple[str, str], JsonDict] = {}
    for item in _analysed(sources, settings):
        found.setdefault((item["run"], item["episode_id"]), item)
    chosen = sorted(found)[: settings.max_episodes]
    for key in chosen:
        rejected.update(found[key]["rejected"])
        cards += found[key]["cards"]
    episodes = len(chosen)
    cards.sort(key=lambda c: c["card_id"])
    written = write_lines_atomic(out / CARDS, cards)
    kinds = Counter(card["kind"] for card in cards)
    facts = {
        "episodes": episodes,
        "cards": written,
        "success_cards": kinds["success"],
        "failure_cards": kinds["failure"],
        "rejected": dict(sorted(rejected.items())),
    }
    write_json_atomic(out / REJECTED, facts)
    return facts


def _analysed(sources: list[Source], settings: BuildSettings) -> Iterator[JsonDict]:
    if settings.analyst == "llm":
        yield from asyncio.run(_ask(sources, settings))
        return
    goals = {s.run: load_goals(s) for s in sources}
    yield from _ray_items(sources, goals, settings) if settings.engine == "ray" else _local_items(sources, goals)


def _local_items(sources: list[Source], goals: dict[str, dict[int, JsonDict]]) -> Iterator[JsonDict]:
    for source in sources:
        for record in iter_records(source):
            if is_complete_row(record):
                yield analyse_record(record, source.run, goals[source.run])


def analyse_record(record: JsonDict, run: str, goals: dict[int, JsonDict]) -> JsonDict:
    """Rules cards of one complete record, screened: ``{run, episode_id, cards, rejected}``. Pure."""
    view = view_of(record, goals.get((record.get("job") or {}).get("task_id", -1)))
    return _screened(view, run, rules_cards(view, run=run))


def _screened(view: EpisodeView, run: str, cards: list[Card]) -> JsonDict:
    protected = episode_values(view)
    kept: list[JsonDict] = []
    rejected: list[str] = []
    for card in cards:
        found = screen(card, protected)
        if found.passed:
            kept.append(card.model_dump(mode="json", by_alias=True))
        else:
            rejected += [f"firewall: {reason}" for reason in found.reasons]
    return {"run": run, "episode_id": view.episode_id, "cards": kept, "rejected": rejected}


def analyse_chunk(chunk: Chunk, goals: dict[str, dict[int, JsonDict]]) -> list[bytes]:
    """As :func:`analyse_record` for every complete record that begins in a byte range."""
    mine = goals.get(chunk.source.run, {})
    return [
        orjson.dumps(analyse_record(record, chunk.source.run, mine))
        for _, record, _ in read_records(chunk)
        if record is not None and is_complete_row(record)
    ]


def _ray_items(
    sources: list[Source], goals: dict[str, dict[int, JsonDict]], settings: BuildSettings
) -> Iterator[JsonDict]:
    from actors.cluster import connect

    connect(settings.address)
    import ray

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    shared = ray.put(goals)
    chunks = plan_chunks(sources, RAY_CHUNK_BYTES)

    def process(batch: dict[str, Any]) -> dict[str, Any]:
        given = ray.get(shared)
        lines: list[bytes] = []
        for run, url, base, size, start, stop in zip(
            *(batch[k].tolist() for k in ("run", "url", "base", "size", "start", "stop")), strict=True
        ):
            lines += analyse_chunk(Chunk(Source(run, url, base, size, "jsonl"), start, stop), given)
        return {"item": lines}

    rows = [
        {
            "run": c.source.run,
            "url": c.source.url,
            "base": c.source.base,
            "size": c.source.size,
            "start": c.start,
            "stop": c.stop,
        }
        for c in chunks
    ]
    dataset = ray.data.from_items(rows, override_num_blocks=max(1, len(rows)))
    for row in dataset.map_batches(process, batch_size=None, batch_format="numpy").iter_rows():
        yield orjson.loads(row["item"])


async def _ask(sources: list[Source], settings: BuildSettings) -> list[JsonDict]:
    """Cards by a model, a few episodes at a time, in the order of the records."""
    if settings.model is None:
        raise ConfigError("the llm analyst has no model")
    wanted: list[tuple[JsonDict, str, JsonDict | None]] = []
    for source in sources:
        goals = load_goals(source)
        places = sorted((p for p in find_results(source)[0] if p.complete), key=lambda p: (p.task_id, p.sample_id))
        for record in read_places(places[: settings.max_episodes]):
            wanted.append((record, source.run, goals.get((record.get("job") or {}).get("task_id", -1))))
    model = build_model(settings.model)
    gate = asyncio.Semaphore(settings.concurrency)
    try:
        async with _environments(settings.replay) as factory:

            async def one(record: JsonDict, run: str, goal: JsonDict | None) -> JsonDict:
                async with gate:
                    instruction = str((record.get("reset") or {}).get("instruction") or "")
                    view = view_of(record, goal)
                    view.extra["instruction"] = instruction
                    replayed = None
                    if factory is not None and not view.success:
                        replayed = await probe_failure(factory, record, goal)
                    seed = int(sha256_hex(f"{run}:{view.episode_id}")[:8], 16)
                    found = await analyse(model, view, run=run, replayed=replayed, seed=seed)
                    item = _screened(view, run, [found.card] if found.card is not None else [])
                    if found.card is None:
                        item["rejected"].append(found.reason)
                    return item

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*item)) for item in wanted]
        return [task.result() for task in tasks]
    finally:
        await model.aclose()


class _environments:  # noqa: N801 - reads as a function at its one use
    """The environment of a run config for replays, its embedded servers included; ``None`` without a config."""

    def __init__(self, config: str | None) -> None:
        self._config = config
        self._shops: Any = nullcontext()
        self._factory: Any = None

    async def __aenter__(self) -> Any:
        if self._config is None:
            return None
        from jobs.shop_servers import embedded_shops
        from rayrl.environments.config import build_environments, resolve_paths
        from rayrl.experiment import load_run_config

        config, base = load_run_config(self._config)
        self._shops = embedded_shops(resolve_paths(config.environment, base), host="127.0.0.1", on_event=lambda _: None)
        shops = self._shops.__enter__()
        self._factory = build_environments(shops.environment, admin_token=shops.admin_token)
        await self._factory.start()
        return self._factory

    async def __aexit__(self, *error: Any) -> None:
        if self._config is None:
            return
        try:
            await self._factory.aclose()
        finally:
            self._shops.__exit__(*error)


def _read_cards(out: Path) -> list[Card]:
    return [Card.model_validate(item) for item in read_lines(out / CARDS)]


def _clusters(out: Path) -> JsonDict:
    clusters = cluster_cards(_read_cards(out))
    write_json_atomic(out / CLUSTERS, [c.model_dump(mode="json") for c in clusters])
    return {"clusters": len(clusters)}


def _candidates(out: Path, parent: SkillBank | None, limit: int) -> JsonDict:
    clusters = [Cluster.model_validate(c) for c in orjson.loads((out / CLUSTERS).read_bytes())]
    candidates = compile_chunks(clusters, _read_cards(out), bank=parent, limit=limit)
    write_lines_atomic(out / CANDIDATES, (c.model_dump(mode="json") for c in candidates))
    return {"candidates": len(candidates), "rewrites": sum(c.action == "REWRITE" for c in candidates)}


def _snapshot(out: Path, parent: SkillBank | None) -> JsonDict:
    candidates = [Candidate.model_validate(c) for c in read_lines(out / CANDIDATES)]
    path = out / SNAPSHOT
    path.unlink(missing_ok=True)  # left by an earlier build of other inputs; the stage is being made anew
    return {"bank_sha256": save_bank(candidate_bank(candidates, parent), path)}


def analyst_model(path: str) -> ModelConfig:
    """The model section of a config file (a run config, or one with nothing but ``model``)."""
    from rayrl.config import Section, find_config, load_raw, parse_config

    class _OnlyModel(Section):
        model: ModelConfig

    raw = load_raw(find_config(path))
    if "model" not in raw:
        raise ConfigError(f"{path}: has no section 'model'")
    return parse_config({"model": raw["model"]}, _OnlyModel, source=path).model


def run(args: argparse.Namespace) -> int:
    """Entry point of the command."""
    settings = BuildSettings(
        analyst=args.analyst,
        engine=args.engine,
        model=analyst_model(args.model_config) if args.model_config else None,
        max_episodes=args.max_episodes,
        limit=args.max_chunks,
        replay=args.replay,
        address=args.address,
        parent=args.bank,
    )
    facts = build(args.runs, args.out, settings)
    if not facts["candidates"]:
        raise UserError(
            f"{facts['episodes']} episodes gave no candidate ({facts['cards']} cards, rejected: {facts['rejected']}); "
            "more episodes, or another analyst, would help"
        )
    if args.json:
        print_json(facts)
        return 0
    shown = [(key.replace("_", " "), value) for key, value in facts.items()]
    console().print(facts_table("Skills built", shown))
    return 0


if __name__ == "__main__":
    from jobs.command import command_main

    raise SystemExit(command_main("skills build", add_arguments, run, None))
