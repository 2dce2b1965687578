import pytest

from actors.inprocess import InProcessBackend
from actors.pool import RolloutPool
from rayrl.workbench.driver import Driver
from rayrl.workbench.readers.rows import Options
from rayrl.workbench.samples import sample_file, sample_profile, skill_folder
from rayrl.workbench.workbench import Workbench


def make_pool(spec, execution, on_event):
    return RolloutPool(InProcessBackend(spec), spec, execution, on_event=on_event)


@pytest.fixture
def bench(tmp_path):
    made = Workbench(tmp_path / "store")
    yield made
    made.close()


def sample_dataset(bench, n=20, kind="jsonl", name="routing"):
    upload = bench.uploads.add(*sample_file(kind, n))
    bench.datasets.save_profile(kind, sample_profile(kind), [])
    return bench.datasets.create(name=name, upload=upload["sha256"], options=Options(), profile_name=kind)


def sample_experiment(bench, n=20, version=1, model="reader", start=True, **more):
    dataset = more.pop("dataset", None) or sample_dataset(bench, n)
    snapshot = bench.snapshots.add_folder(skill_folder(version))
    made = bench.experiments.create(name="e", dataset_id=dataset["id"], snapshot_id=snapshot["id"], model=model, **more)
    return bench.experiments.move(made["id"], "start") if start else made


def drive(bench, experiment_id, **more):
    return Driver(bench, experiment_id, make_pool, **more).run()
