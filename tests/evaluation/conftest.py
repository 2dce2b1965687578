import pytest

from rayrl.testing.traces import TraceRecipe, write_run


@pytest.fixture(scope="session")
def recipe():
    return TraceRecipe(experiment="a", tasks=30, samples=2, failure_rate=0.1)


@pytest.fixture(scope="session")
def messy_run(tmp_path_factory, recipe):
    """A run directory with duplicates, a torn tail and two schema versions."""
    path = tmp_path_factory.mktemp("runs") / "messy"
    write_run(path, recipe, duplicates=0.2, v4_share=0.2, torn_tail=True)
    return path
