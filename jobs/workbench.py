"""``rayrl workbench``: evaluate a Skill on labelled data from the command line. The same store as ``rayrl studio``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from jobs.output import console, facts_table, print_json
from rayrl.errors import RunIncompleteError, UserError
from rayrl.schemas import JsonDict
from rayrl.settings import ExecutionConfig
from rayrl.worker import WorkerSpec

DEFAULT_ROOT = "~/.rayrl/studio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``rayrl workbench``."""
    commands = parser.add_subparsers(dest="command", required=True)
    run_ = commands.add_parser("run", help="data file + Skill + model: run, or resume with --experiment")
    run_.add_argument("data", nargs="?", type=Path, help="CSV, XLSX or JSONL file")
    run_.add_argument("--skill", help="Skill folder, or REPOSITORY@REF:PATH")
    run_.add_argument("--model", default="reader", help="model profile (default reader)")
    run_.add_argument("--experiment", metavar="ID", help="run this experiment of the store instead")
    _data_arguments(run_)
    matrix = commands.add_parser("matrix", help="several Skills times several models over one data file")
    matrix.add_argument("data", type=Path)
    matrix.add_argument("--skill", action="append", required=True, help="may be given several times")
    matrix.add_argument("--model", action="append", required=True, help="may be given several times")
    _data_arguments(matrix)
    compare = commands.add_parser("compare", help="experiment B compared with A")
    compare.add_argument("a")
    compare.add_argument("b")
    export = commands.add_parser("export", help="results, reviews, a comparison, or a self-verifying bundle")
    export.add_argument("experiment")
    export.add_argument("--kind", choices=("results", "reviews", "compare", "bundle"), default="results")
    export.add_argument("--with", dest="other", metavar="ID", help="compare: the second experiment")
    export.add_argument("--format", choices=("csv", "xlsx", "jsonl"), default="csv")
    export.add_argument("--out", type=Path, required=True)
    show = commands.add_parser("list", help="experiments of the store")
    models = commands.add_parser("models", help="model profiles; --add NAME FILE adds one from a `model` section")
    models.add_argument("--add", nargs=2, metavar=("NAME", "FILE"))
    sample = commands.add_parser("sample", help="write the sample data set (three formats) and Skill (two versions)")
    sample.add_argument("out", type=Path)
    drive = commands.add_parser("drive", help="run one experiment of the store until it ends (what the server starts)")
    drive.add_argument("experiment")
    for command in (run_, matrix, compare, export, show, models, drive):
        command.add_argument("--root", type=Path, default=Path(DEFAULT_ROOT), help=f"store (default {DEFAULT_ROOT})")


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="name of the data set (default: the file's)")
    parser.add_argument(
        "--map", action="append", default=[], metavar="FIELD=SOURCE", help="query=data.query; may repeat"
    )
    parser.add_argument(
        "--label", action="append", default=[], metavar="CLASS=SPELLING,...", help="fast=快,0; may repeat"
    )
    parser.add_argument("--profile", help="saved mapping profile")
    parser.add_argument("--skip-errors", action="store_true", help="leave out rows that cannot be used")
    parser.add_argument("--encoding")
    parser.add_argument("--sheet")
    parser.add_argument("--canaries", type=Path, metavar="FILE", help="YAML with checks to run first")
    parser.add_argument(
        "--tool", action="append", default=[], metavar="NAME", help="a further tool, package.module:Tool; may repeat"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--mode", choices=("inprocess", "ray"), default="inprocess")


def run(args: argparse.Namespace) -> int:
    """``rayrl workbench``."""
    if args.command == "sample":
        return _sample(args)
    from rayrl.workbench.workbench import Workbench

    bench = Workbench(args.root)
    try:
        actions = {"run": _run, "matrix": _matrix, "compare": _compare, "export": _export}
        actions |= {"list": _list, "models": _models, "drive": _drive}
        return actions[args.command](bench, args)
    finally:
        bench.close()


def make_pool(spec: WorkerSpec, execution: ExecutionConfig, on_event: Any) -> Any:
    """A rollout pool as the experiment's parameters say: in this process, or on Ray."""
    from actors.pool import RolloutPool

    if execution.mode == "inprocess":
        from actors.inprocess import InProcessBackend

        return RolloutPool(InProcessBackend(spec), spec, execution, on_event=on_event)
    from actors.cluster import connect
    from actors.rollout import RayBackend

    connect(execution.ray_address)
    backend = RayBackend(spec, cpus_per_actor=execution.cpus_per_actor, worker_timeout_s=execution.worker_timeout_s)
    return RolloutPool(backend, spec, execution, on_event=on_event)


def _drive(bench: Any, args: argparse.Namespace) -> int:
    from rayrl.workbench.driver import Driver

    driver = Driver(bench, args.experiment, make_pool)
    signal.signal(signal.SIGTERM, lambda *_: driver.request_stop())
    signal.signal(signal.SIGINT, lambda *_: driver.request_stop())
    found = driver.run()
    if args.json:
        print_json(_public(found))
    return 0 if found["state"] == "completed" else RunIncompleteError.exit_code


def _run(bench: Any, args: argparse.Namespace) -> int:
    if args.experiment is None:
        if args.data is None or args.skill is None:
            raise UserError("give a data file and --skill, or --experiment ID to go on with one")
        from rayrl.workbench.snapshots import snapshot_label

        dataset, snapshot = _dataset(bench, args), _snapshot(bench, args.skill)
        made = bench.experiments.create(
            name=f"{args.name or args.data.stem} · {snapshot_label(snapshot)}",
            dataset_id=dataset["id"],
            snapshot_id=snapshot["id"],
            model=args.model,
            params=_params(args),
            concurrency=args.concurrency,
        )
        args.experiment = made["id"]
    found = _to_the_end(bench, args.experiment)
    _show(bench, found, args)
    return 0 if found["state"] == "completed" else RunIncompleteError.exit_code


def _to_the_end(bench: Any, experiment_id: str) -> JsonDict:
    from rayrl.workbench.driver import Driver

    found: JsonDict = bench.experiments.get(experiment_id)
    if found["state"] in ("created", "paused"):
        bench.experiments.move(experiment_id, "start" if found["state"] == "created" else "resume")
    driver = Driver(bench, experiment_id, make_pool)
    before = signal.signal(signal.SIGINT, lambda *_: driver.request_stop())
    try:
        return driver.run()
    finally:
        signal.signal(signal.SIGINT, before)


def _matrix(bench: Any, args: argparse.Namespace) -> int:
    from rayrl.workbench.matrix import create_matrix, matrix_table

    dataset = _dataset(bench, args)
    made = create_matrix(
        bench,
        name=args.name or args.data.stem,
        dataset_id=dataset["id"],
        snapshot_ids=[_snapshot(bench, skill)["id"] for skill in args.skill],
        models=args.model,
        params=_params(args),
        concurrency=args.concurrency,
    )
    states = [_to_the_end(bench, experiment["id"])["state"] for experiment in made]
    rows = matrix_table(bench, [experiment["id"] for experiment in made])
    if args.json:
        print_json({"experiments": rows})
    else:
        table = Table("experiment", "Skill", "model", "accuracy", "95 % interval", "kappa", "scored")
        for row in rows:
            kappa = "-" if row["kappa"] is None else f"{row['kappa']:.3f}"
            accuracy, interval = _rate(row["accuracy"])
            skill = f"{row['skill']} {row['skill_sha256'][:8]}"
            table.add_row(row["experiment_id"], skill, row["model"], accuracy, interval, kappa, str(row["scored"]))
        console().print(table)
    return 0 if set(states) == {"completed"} else RunIncompleteError.exit_code


def _compare(bench: Any, args: argparse.Namespace) -> int:
    from rayrl.workbench.compare import compare

    found = compare(bench, args.a, args.b, examples=50)
    if args.json:
        print_json(found)
        return 0
    out = console()
    out.print(found["overall"]["sentence"], markup=False)
    out.print(facts_table("cases", list({**found["denominators"], **found["counts"]}.items())))
    table = Table("domain", "n", "A", "B", "fixed", "regressed", "p (Holm)")
    for name, domain in found["by_domain"].items():
        rates = [_rate(domain[side]["accuracy"])[0] for side in ("a", "b")]
        table.add_row(
            name or "-",
            str(domain["n"]),
            *rates,
            str(domain["fixed"]),
            str(domain["regressed"]),
            f"{domain['p_holm']:.3g}",
        )
    out.print(table)
    for change in found["skill_diff"]:
        out.print(f"{change['change']} {change['path']}: {', '.join(change['sections'])}", markup=False)
        out.print(f"  fixed there: {', '.join(change['fixed'][:20]) or '-'}", markup=False)
        out.print(f"  regressed there: {', '.join(change['regressed'][:20]) or '-'}", markup=False)
    return 0


def _export(bench: Any, args: argparse.Namespace) -> int:
    from rayrl.workbench import exports
    from rayrl.workbench.store import write_atomic

    bench.experiments.get(args.experiment)
    if args.kind == "bundle":
        data = exports.bundle(bench, args.experiment)
    else:
        if args.kind == "compare" and not args.other:
            raise UserError("--kind compare needs --with ID")
        rows = {
            "results": lambda: exports.result_rows(bench, args.experiment),
            "reviews": lambda: exports.review_rows(bench, args.experiment),
            "compare": lambda: exports.compare_rows(bench, args.experiment, args.other),
        }[args.kind]()
        data, name, _ = exports.export(rows, args.format, args.out.stem, exports.COLUMNS[args.kind])
        if name.endswith(".zip") and args.out.suffix != ".zip":
            args.out = args.out.with_suffix(".zip")  # some texts did not fit a cell and lie beside the workbook
    write_atomic(args.out.expanduser().absolute(), data)
    if args.json:
        print_json({"path": str(args.out), "bytes": len(data)})
    else:
        console().print(f"{args.out}: {len(data)} bytes", markup=False)
    return 0


def _list(bench: Any, args: argparse.Namespace) -> int:
    rows = bench.experiments.page(limit=200)
    if args.json:
        print_json({"experiments": [_public(row) for row in rows]})
        return 0
    table = Table("experiment", "name", "state", "done", "failed", "cases")
    for row in rows:
        counts = row["counts"]
        table.add_row(
            row["id"],
            row["name"],
            row["state"],
            str(counts["completed"]),
            str(counts["failed"]),
            str(sum(counts.values())),
        )
    console().print(table)
    return 0


def _models(bench: Any, args: argparse.Namespace) -> int:
    if args.add:
        from rayrl.config import load_raw

        raw = load_raw(args.add[1])
        bench.models.save(args.add[0], raw.get("model", raw), trusted=True)
    rows = bench.models.all()
    if args.json:
        print_json({"models": rows})
    else:
        for row in rows:
            console().print(f"{row['name']} v{row['version']}: {row['body'].get('kind', 'openai')}", markup=False)
    return 0


def _sample(args: argparse.Namespace) -> int:
    import shutil

    from rayrl.workbench.samples import sample_file, skill_folder

    args.out.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in ("csv", "xlsx", "jsonl"):
        name, data = sample_file(kind)
        (args.out / name).write_bytes(data)
        written.append(name)
    for version in (1, 2):
        target = args.out / f"v{version}" / skill_folder(version).name
        shutil.copytree(skill_folder(version), target, dirs_exist_ok=True)
        written.append(str(target.relative_to(args.out)))
    if args.json:
        print_json({"out": str(args.out), "written": written})
    else:
        console().print(f"{args.out}: {', '.join(written)}", markup=False)
    return 0


def _dataset(bench: Any, args: argparse.Namespace) -> JsonDict:
    from rayrl.config import parse_config
    from rayrl.workbench.mapping import FieldRule, MappingProfile, label_values, suggest, suggest_labels
    from rayrl.workbench.readers.rows import Options

    try:
        data = args.data.read_bytes()
    except OSError as error:
        raise UserError(f"{args.data}: {error.strerror}") from None
    upload = bench.uploads.add(args.data.name, data)
    options = Options(encoding=args.encoding, sheet=args.sheet)
    name = args.name or args.data.stem
    profile_name = args.profile or name
    if args.profile is None:
        table = bench.uploads.read(upload["sha256"], options)
        sources = suggest(table) | dict(_pair(item, "--map") for item in args.map)
        if "query" not in sources:
            raise UserError(f"no column looks like the query; name it: --map query=COLUMN. Columns: {table.columns}")
        fields = {
            target: FieldRule(sources=[source], transforms=["json"] if target in ("history", "context") else ["strip"])
            for target, source in sources.items()
        }
        given = {key: value.split(",") for key, value in (_pair(item, "--label") for item in args.label)}
        if not given:
            given = suggest_labels(label_values(table, fields["gold_route"]) if "gold_route" in fields else {})
        body = {"fields": {target: rule.model_dump() for target, rule in fields.items()}}
        profile = parse_config({**body, "labels": given}, MappingProfile, source="--map and --label")
        bench.datasets.save_profile(profile_name, profile, table.columns)
    found: JsonDict = bench.datasets.create(
        name=name, upload=upload["sha256"], options=options, profile_name=profile_name, skip_errors=args.skip_errors
    )
    return found


def _snapshot(bench: Any, text: str) -> JsonDict:
    repository, at, rest = text.rpartition("@")
    found: JsonDict
    if at and ":" in rest and not Path(text).is_dir():
        ref, _, path = rest.partition(":")
        found = bench.snapshots.add_git(Path(repository), ref, path)
    else:
        found = bench.snapshots.add_folder(Path(text))
    return found


def _params(args: argparse.Namespace) -> Any:
    from pydantic import ValidationError

    from rayrl.environments.skill_case import DEFAULT_TOOLS
    from rayrl.environments.skill_case_tools import build_tools
    from rayrl.workbench.experiments import Params

    try:
        params = Params(repeats=args.repeats, mode=args.mode, tools=[*DEFAULT_TOOLS, *args.tool])
    except ValidationError as error:
        raise UserError(f"--repeats, --tool: {error.errors()[0]['msg']}") from None
    build_tools(params.tools)  # an unknown one is said now, not by the first case
    if args.canaries is None:
        return params
    from rayrl.config import load_raw, parse_config

    found = load_raw(args.canaries)
    return parse_config({**params.model_dump(), "canaries": found.get("canaries")}, Params, source=str(args.canaries))


def _pair(item: str, option: str) -> tuple[str, str]:
    key, separator, value = item.partition("=")
    if not separator or not key or not value:
        raise UserError(f"{option} {item!r} is not of the form NAME=VALUE")
    return key, value


def _show(bench: Any, found: JsonDict, args: argparse.Namespace) -> None:
    from rayrl.workbench.metrics import experiment_metrics

    dataset = bench.datasets.get(found["dataset_id"])
    metrics = experiment_metrics(bench.store, found, dataset["classes"])
    if args.json:
        print_json({"experiment": _public(found), "metrics": metrics})
        return
    snapshot = bench.snapshots.get(found["snapshot_id"])
    accuracy, interval = _rate(metrics["overall"]["accuracy"])
    kappa = metrics["overall"]["kappa"]
    facts = [
        ("experiment", found["id"]),
        ("state", f"{found['state']} {found['reason']}".strip()),
        ("Skill", f"{snapshot['name']} {snapshot['content_sha256'][:12]} ({snapshot['status']})"),
        ("cases", ", ".join(f"{n} {state}" for state, n in found["counts"].items() if n)),
        ("accuracy", f"{accuracy} {interval}, {metrics['denominators']['scored']} scored"),
        ("kappa", "-" if kappa is None else f"{kappa:.3f}"),
        ("evidence", ", ".join(f"{n} {state}" for state, n in sorted(metrics["evidence"].items()))),
    ]
    console().print(facts_table(found["name"], facts))
    if not dataset["n_labelled"]:
        hint = "No case has a label, so nothing is scored: name its column with --map gold_route=COLUMN (and, where"
        console().print(f"{hint} spellings vary, the classes with --label CLASS=SPELLING,...)", markup=False)


def _rate(rate: JsonDict) -> tuple[str, str]:
    if rate["value"] is None:
        return "-", "-"
    return f"{rate['value']:.3f}", f"[{rate['low']:.3f}, {rate['high']:.3f}]"


def _public(experiment: JsonDict) -> JsonDict:
    return {key: value for key, value in experiment.items() if key not in ("driver", "driver_until")}


def main() -> int:
    """``python -m jobs.workbench``, for driver processes."""
    from jobs.command import command_main

    return command_main("workbench", add_arguments, run, None)


if __name__ == "__main__":
    sys.exit(main())
