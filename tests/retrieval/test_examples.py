"""The example of a gate is one the gate retrieves for, the most probable of them."""

from types import SimpleNamespace

from rayrl.retrieval.examples import suggest


def gate(decisions):
    memories = [SimpleNamespace(text=f"{name}. More words.") for name in decisions]
    answer = {f"{name}.": SimpleNamespace(retrieve=n, probability=p) for name, (n, p) in decisions.items()}
    return SimpleNamespace(index=SimpleNamespace(memories=memories), decide=answer.__getitem__)


def test_the_most_probable_that_retrieves():
    assert suggest(gate({"a": (1, 0.6), "b": (1, 0.9), "c": (0, 0.99)})) == "b."
    assert suggest(gate({"a": (0, 0.4)})) is None
