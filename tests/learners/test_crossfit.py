"""Cross-fit evaluation and ablations on a small scale: what is fitted, what is kept, what the report says."""

import numpy as np
import orjson
import pytest
import yaml

from jobs.evaluate_policy import main
from learners.ablations import DEFAULT, table, variants
from learners.crossfit import CrossFitConfig, read_ledger
from rayrl.config import configs_root
from rayrl.errors import ConfigError

SMALL = [
    "train.task.encoder=hash",
    "train.task.check_encoder=''",
    "train.task.groups=SLR",
    "train.task.random_memories=1",
    "train.policy.width=8",
    "train.policy.members=2",
    "train.sft.epochs=2",
    "train.rl.updates=3",
    "train.rl.questions=8",
    "train.rl.group_size=4",
    "methods=[tuned_threshold,logistic_plan,sft,sft_plan,sft_trace,trace_plan]",
    "first_draw_methods=[]",
    "splits=[known]",
    "max_folds=1",
    "ablations={SFT only: [rl.updates=0]}",
    "ablation_folds=2",
]


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """A finished small evaluation: its folder and the arguments that made it."""
    root = tmp_path_factory.mktemp("crossfit")
    arguments = [
        *SMALL,
        f"output={root / 'out'}",
        f"ledger={root / 'looks.jsonl'}",
        f"train.task.cache={root / 'cache'}",
    ]
    # overrides add to a mapping: start from the shipped config without its own ablations
    raw = yaml.safe_load((configs_root() / "train" / "crossfit.yaml").read_text())
    (root / "crossfit.yaml").write_text(yaml.safe_dump({k: v for k, v in raw.items() if k != "ablations"}))
    arguments = [str(root / "crossfit.yaml"), *arguments]
    assert main([*arguments, "--ablations", "--json"]) == 0
    return root, arguments


@pytest.mark.slow
def test_report_holds_methods_ablations_curves_and_the_look(evaluation):
    root, _ = evaluation
    report = orjson.loads((root / "out" / "report.json").read_bytes())
    methods = report["splits"]["known"]["methods"]
    assert methods["oracle"]["balanced"] >= max(m["balanced"] for m in methods.values())
    default, sft = report["ablations"]
    assert default["name"] == DEFAULT and default["delta_interval"] is None
    low, high = sft["delta_interval"]
    assert low <= sft["delta"] <= high
    assert sft["delta"] == pytest.approx(sft["balanced"] - default["balanced"])
    assert [p[0] for p in report["curves"]["TRACE, validation"]] == [0.0]
    assert len(read_ledger(root / "looks.jsonl")) == 1, "ablations look at no unseen question"
    page = (root / "out" / "report.html").read_text()
    assert "SFT only" in page and "validation folds" in page


@pytest.mark.slow
def test_finished_folds_and_variants_are_not_fitted_again(evaluation, capsys):
    root, arguments = evaluation
    files = sorted((root / "out").rglob("*.npz"))
    assert len(files) == 1 + 2 * 2
    before = [f.stat().st_mtime_ns for f in files]
    assert main([*arguments, "--ablations", "--json"]) == 0
    assert [f.stat().st_mtime_ns for f in files] == before
    assert len(read_ledger(root / "looks.jsonl")) == 1
    capsys.readouterr()
    assert main([*arguments, "train.rl.kl=0.5"]) == 3
    assert "another config" in capsys.readouterr().err


def test_an_ablation_with_a_wrong_key_is_named():
    config = CrossFitConfig.model_validate({"ablations": {"odd": ["rl.updats=3"]}})
    with pytest.raises(ConfigError, match=r"ablation 'odd'.*\n.*did you mean 'updates'"):
        variants(config)


def test_differences_are_paired_by_question():
    kind, rng = np.repeat([0, 1, 2], 40), np.random.default_rng(0)
    rows = {"question": np.arange(120), "kind": kind, "returns": rng.normal(5.0, 3.0, 120)}
    better = {**rows, "returns": rows["returns"] + 1.0}
    default, other = table({"a": rows, "b": better}, ["c"] * 120, 1)
    assert other["delta"] == pytest.approx(1.0)
    assert other["delta_interval"] == pytest.approx((1.0, 1.0)), "a constant shift has no uncertainty"
    assert default["balanced_interval"][0] < default["balanced"] < default["balanced_interval"][1]
