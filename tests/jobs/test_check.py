"""check env|model|skills: what keeps the contract passes, each broken clause is named."""

from __future__ import annotations

import asyncio

import pytest

from rayrl.schemas import Skill
from rayrl.testing import conformance
from rayrl.testing.conformance import check_environment, check_model, check_skills
from tests.doubles import TOOLS, FakeFactory, FakeModel, answer, hang, page, reset_result


@pytest.mark.parametrize(
    "words",
    [
        ("env", "rayrl.testing.null_environment:NullEnvironmentFactory", "steps=3"),
        ("env", "shop"),
        ("model", "scripted"),
        ("skills", "none"),
        ("skills", "tests.doubles:OptionSkills", "a=1"),
    ],
)
def test_what_ships_keeps_its_own_contract(command, words):
    code, found = command("check", *words)
    assert code == 0 and found["ok"], [f for f in found["findings"] if not f["ok"]]


def test_a_broken_environment_exits_5_and_names_the_clauses(command, says):
    code, found = command("check", "env", "tests.jobs.sick:Down")
    assert code == 5 and not found["ok"]
    code, out, _ = says("check", "env", "tests.jobs.sick:Down")
    assert code == 5 and "FAIL start()" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model", "scriptd"), "did you mean 'scripted'"),
        (("skills", "bank"), r"skills.path: needed"),
        (("env", "shop", "persona"), "is not of the form key=value"),
        (("env", "shop", "persna=true"), "persna: unknown key (did you mean 'persona'?)"),
        (("env", "tests.doubles:FakeModel"), "is no EnvironmentFactory"),
    ],
)
def test_what_cannot_be_built_is_bad_input(command, words, says):
    code, found = command("check", *words)
    assert code in (2, 5) and says in found["error"]["message"]


def failed(findings):
    return {finding.clause for finding in findings if not finding.ok}


async def test_a_sound_environment_has_no_findings():
    assert failed(await check_environment(FakeFactory())) == set()


class Leaky(FakeFactory):
    def open(self):
        environment = super().open()

        async def close():
            environment.closes += 1

        environment.close = close
        return environment


def starting(**observation):
    return FakeFactory(on_reset=lambda *_: reset_result(observation=page(**observation)))


@pytest.mark.parametrize(
    ("factory", "clause"),
    [
        (Leaky(), "no lease is open after all closes"),
        (FakeFactory(on_terminate=lambda *_: answer(done=False)), "terminate() ends the episode"),
        (FakeFactory(on_step=lambda *_: answer(done=True, reward=float("inf"))), "a done step has a finite reward"),
        (FakeFactory(on_step=lambda *_: "x"), "step() returns a StepResult"),
        (FakeFactory(on_reset=lambda *_: "x"), "reset() returns a ResetResult"),
        (starting(tools=[]), "at least one tool before the end"),
        (starting(tools=[{"name": "x"}]), "tools are OpenAI function tools"),
        (starting(text=" "), "the observation has text"),
    ],
)
async def test_each_broken_clause_is_named(factory, clause):
    assert clause in failed(await check_environment(factory, max_steps=3))


async def test_a_start_that_differs_each_time_is_found():
    count = iter(range(99))
    factory = FakeFactory(on_reset=lambda *_: reset_result(observation=page(f"page {next(count)}")))
    assert "the same job gives the same first observation" in failed(await check_environment(factory))


async def test_what_hangs_is_a_finding_not_a_hang(monkeypatch):
    monkeypatch.setattr(conformance, "CALL_TIMEOUT_S", 0.05)
    found = failed(await check_environment(FakeFactory(on_reset=hang)))
    assert "reset()" in found

    class Stuck(FakeModel):
        async def generate(self, messages, tools, *, seed):
            if seed == 2:
                await asyncio.Event().wait()
            return await super().generate(messages, tools, seed=seed)

    assert "four calls at once" in failed(await check_model(Stuck(), tools=TOOLS))


class Twice(FakeModel):
    """Another identity each time, with an address in it."""

    n = 0

    def identity(self):
        self.n += 1
        return {"kind": "x", "n": self.n, "url": "http://10.0.0.1"}


async def test_identities_must_be_pure_and_free_of_addresses():
    found = failed(await check_model(Twice(), tools=TOOLS))
    assert {"identity() is the same twice", "identity() holds no address or key"} <= found


async def test_an_object_without_the_methods_is_said_to_lack_them():
    assert failed(await check_environment(object())) == {"offers identity, start, open, aclose"}
    assert failed(await check_model(object(), tools=TOOLS)) == {"offers identity, generate, aclose"}
    assert failed(await check_skills(object())) == {"offers identity and select"}


class Skills:
    def __init__(self, *chosen):
        self.chosen = list(chosen)

    def identity(self):
        return {"kind": "x"}

    async def select(self, context):
        return self.chosen.pop(0) if self.chosen else []


async def test_skill_providers():
    skill = Skill(skill_id="a", content="x")
    assert failed(await check_skills(Skills([skill], [skill]))) == set()
    assert "the same context selects the same skills" in failed(await check_skills(Skills([skill], [])))
    twice = [skill, skill]
    assert "skill ids are unique within a selection" in failed(await check_skills(Skills(twice, twice)))
    empty = [Skill(skill_id="a", content=" ")]
    assert "every skill has content" in failed(await check_skills(Skills(empty, empty)))
    assert "select() returns a list of Skill" in failed(await check_skills(Skills("x")))
