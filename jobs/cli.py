"""The ``rayrl`` command: one word picks a job module, which brings its own arguments.

Only the picked module is imported, so ``rayrl plan`` starts in a fraction of a second and never loads Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from jobs.command import UsageError, command_main, fail
from rayrl import __version__
from rayrl.errors import did_you_mean

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("jobs.quickstart", "the whole road on embedded defaults, in a minute or two"),
    "plan": ("jobs.plan", "validate a config and show what it would run; touches no network"),
    "run": ("jobs.rollout", "roll out a config (or resume it) and summarise"),
    "smoke": ("jobs.smoke", "play 3 tasks against the configured model and environment and say what happened"),
    "summarize": ("jobs.summarize", "summary of a run directory"),
    "evaluate": ("jobs.evaluate", "stream many runs into rows, summary and labels (Ray Data)"),
    "compare": ("jobs.compare", "paired comparison of two or more runs"),
    "replay": ("jobs.replay", "run an episode again against its recorded model outputs, and diff"),
    "export": ("jobs.export", "SFT, GRPO, DPO records and slime samples from runs"),
    "workbench": ("jobs.workbench", "evaluate a Skill on labelled data, compare versions, export"),
    "studio": ("jobs.studio", "web application: runs, training, arena, skills and the Skill evaluation workbench"),
    "skills": ("jobs.skills", "build, gate, show, review banks of skills; snapshot, lint, diff Skill folders"),
    "pipeline": ("jobs.pipeline", "the loop: rollouts, diagnosis, candidates, gate, bank, selector, evaluation"),
    "calls": ("jobs.calls", "accuracy of tool choice and arguments where the right call is known"),
    "judge": ("jobs.judge", "score frozen traces with a judge model"),
    "report": ("jobs.report", "one self-contained HTML page per run"),
    "runs": ("jobs.runs", "list, show or remove run directories"),
    "traces": ("jobs.traces", "verify, import or compact traces"),
    "splits": ("jobs.splits", "build, import or check split manifests"),
    "shop": ("jobs.shop", "serve the embedded shop environment"),
    "check": ("jobs.check", "conformance test of your own environment, model or skill provider"),
    "doctor": ("jobs.doctor", "check this machine, the endpoint and the environment, and say what to do"),
    "train": ("jobs.train", "train the retrieval policy: SFT, then TRACE"),
    "evaluate-policy": ("jobs.evaluate_policy", "evaluate retrieval policies on unseen questions"),
    "sweep": ("jobs.sweep", "hyperparameter sweep on Ray Tune"),
    "memory": ("jobs.memory", "build a memory from your own documents"),
    "gate": ("jobs.gate", "ask a trained retrieval gate about a question"),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"rayrl {__version__}")
        return 0
    name, rest = words[0], words[1:]
    available = _available()
    if name not in available:
        unknown = UsageError(f"no command {name!r}{did_you_mean(name, list(available))}", _overview() + "\n\n")
        return fail(unknown, unknown.exit_code, as_json="--json" in rest)
    module = importlib.import_module(COMMANDS[name][0])
    return command_main(name, module.add_arguments, module.run, rest, description=COMMANDS[name][1])


def _available() -> dict[str, str]:
    return {name: text for name, (module, text) in COMMANDS.items() if importlib.util.find_spec(module) is not None}


def _overview() -> str:
    lines = ["usage: rayrl COMMAND [--json] ...     (rayrl COMMAND --help for its arguments)", ""]
    lines += [f"  {name:<16} {text}" for name, text in _available().items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
