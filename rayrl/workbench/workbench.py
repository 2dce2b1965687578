"""Everything under one root: store, uploads, data sets, snapshots, model profiles, experiments."""

from __future__ import annotations

from pathlib import Path

from rayrl.workbench.datasets import Datasets
from rayrl.workbench.experiments import Experiments
from rayrl.workbench.models import ModelProfiles
from rayrl.workbench.readers.rows import Limits
from rayrl.workbench.snapshots import Snapshots
from rayrl.workbench.store import Store
from rayrl.workbench.uploads import Uploads


class Workbench:
    """The services over one store. Each process opens its own."""

    def __init__(self, root: Path | str, *, limits: Limits | None = None, seed_models: bool = True) -> None:
        self.store = Store(Path(root))
        self.uploads = Uploads(self.store, limits)
        self.datasets = Datasets(self.store, self.uploads)
        self.snapshots = Snapshots(self.store)
        self.models = ModelProfiles(self.store)
        self.experiments = Experiments(self.store, self.models)
        if seed_models:
            self.models.seed()

    def close(self) -> None:
        """Release the database. Idempotent."""
        self.store.close()
