import threading

import pytest
from starlette.testclient import TestClient

from actors.inprocess import InProcessBackend
from actors.pool import RolloutPool
from rayrl.studio.app import create_app
from rayrl.studio.config import StudioConfig
from rayrl.workbench.driver import Driver
from rayrl.workbench.launcher import Supervisor
from rayrl.workbench.samples import SKILL, sample_file, sample_profile, skill_folder
from rayrl.workbench.workbench import Workbench


def make_pool(spec, execution, on_event):
    return RolloutPool(InProcessBackend(spec), spec, execution, on_event=on_event)


class ThreadDriver:
    """A driver in a thread of the test process; same store, same code as the driver processes."""

    def __init__(self, root, experiment_id):
        self.bench = Workbench(root)
        self.driver = Driver(self.bench, experiment_id, make_pool)
        self.thread = threading.Thread(target=self.driver.run, daemon=True)
        self.thread.start()

    def alive(self):
        return self.thread.is_alive()

    def stop(self, timeout_s):
        self.driver.request_stop()
        self.thread.join(timeout_s)
        self.bench.close()


@pytest.fixture
def studio(tmp_path):
    """A client of a running application with a supervisor that drives in threads."""
    root = tmp_path / "store"
    bench = Workbench(root)
    config = StudioConfig(root=str(root), skills={SKILL: str(skill_folder(1)), "v2": str(skill_folder(2))})
    supervisor = Supervisor(bench.store, lambda e: ThreadDriver(root, e), poll_s=0.1)
    app = create_app(bench, config, supervisor=supervisor)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client
    bench.close()


def upload(client, kind="jsonl", n=30, name="routing"):
    file_name, data = sample_file(kind, n)
    answer = client.post("/api/evaluations/datasets", files={"file": (file_name, data)})
    assert answer.status_code == 201, answer.text
    body = {"name": name, "profile_name": kind, "profile": sample_profile(kind).model_dump()}
    answer = client.post(f"/api/evaluations/datasets/{answer.json()['upload_id']}/mapping", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def snapshot(client, skill=SKILL):
    answer = client.post("/api/evaluations/skill-snapshots", json={"skill": skill})
    assert answer.status_code == 201, answer.text
    return answer.json()


def experiment(client, dataset, skill=SKILL, model="reader", start=True, **more):
    body = {"name": "e", "dataset_id": dataset["id"], "snapshot_id": snapshot(client, skill)["id"], "model": model}
    answer = client.post("/api/evaluations", json={**body, "start": start, **more})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def wait(client, experiment_id, states=("completed",), timeout_s=60):
    import time

    until = time.monotonic() + timeout_s
    while True:
        found = client.get(f"/api/evaluations/{experiment_id}").json()
        if found["state"] in states:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.05)
