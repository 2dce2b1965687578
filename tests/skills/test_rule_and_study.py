from __future__ import annotations

import hashlib

import numpy as np
import pytest
from pydantic import ValidationError

from jobs.gate_study import draw_worlds, figure, load_outcomes, markdown, reported_seed, study
from rayrl.config import configs_root, load_config
from rayrl.errors import ConfigError
from rayrl.schemas import EpisodeJob
from rayrl.skills.bank import BankEntry
from rayrl.skills.providers import MaskedSkills, mask_bit
from rayrl.skills.rule import PLAIN_RULE, SEED_RULE, GateRule, final_verdicts, single, take_look, unit_order
from rayrl.skills.simulator import STANDARD_EFFECTS, Outcomes, fit_outcomes, hidden_world, make_world, random_world
from rayrl.skills.study import score_rule, simulate_gate
from tests.skills.test_design_and_selection import fit_of

OUTCOMES = Outcomes(mu=-0.6, tau=0.7, rho=0.9, failures=(0.0, 0.0, 0.3, 0.6))


def independent_bit(seed, split, task, sample, chunk, p):
    """The mask bit once more, in other words."""
    digest = hashlib.sha256(":".join(map(str, (seed, split, task, sample, chunk))).encode()).digest()
    return int.from_bytes(digest[:8], "big") < p * 2**64


def test_masks_are_a_pure_function_reproduced_independently():
    for task in range(40):
        for sample in range(2):
            job = EpisodeJob(task_id=task, sample_id=sample, seed=99, split="gate")
            for chunk in ("a", "b-2", "规格"):
                for p in (0.25, 0.5, 0.9):
                    expected = independent_bit(7, "gate", task, sample, chunk, p)
                    assert mask_bit(7, job, chunk, p) == expected
                    assert mask_bit(7, job.model_copy(update={"seed": 1}), chunk, p) == expected


def test_flipped_masks_are_complements_and_their_rate_is_right():
    entries = [BankEntry(skill_id=f"s{i}", content="x") for i in range(8)]
    plain = MaskedSkills(entries, mask_seed=3, inclusion=0.5)
    all_flipped = MaskedSkills(entries, mask_seed=3, inclusion=0.5, flip=["*"])
    one = MaskedSkills(entries, mask_seed=3, inclusion=0.5, flip=["s2"])
    total = 0
    for task in range(500):
        job = EpisodeJob(task_id=task, sample_id=0, seed=0, split="val")
        a, b = ({e.skill_id for e in p.assigned(job)} for p in (plain, all_flipped))
        assert a | b == {e.skill_id for e in entries} and not a & b
        assert a ^ {e.skill_id for e in one.assigned(job)} == {"s2"}
        total += len(a)
    assert total / 4000 == pytest.approx(0.5, abs=0.03)
    assert "flip" not in plain.identity() and all_flipped.identity()["flip"] == ["*"]


def test_units_take_every_task_once_before_any_twice():
    units = unit_order([5, 9, 2], 7, mask_seed=1)
    assert sorted(units[:3]) == [(2, 0), (5, 0), (9, 0)] and {s for _, s in units[3:6]} == {1}
    assert units == unit_order([9, 2, 5], 7, mask_seed=1)
    assert unit_order([5, 9, 2], 3, mask_seed=2) != units[:3] or unit_order([5, 9, 2], 3, mask_seed=3) != units[:3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"stages": []}, "stages"),
        ({"stages": [1.0, -1.0], "spending": [0.5, 0.5]}, "positive"),
        ({"spending": [0.5]}, "one share per stage"),
        ({"spending": [0.5, 0.5, 0.5, 0.5, 0.5]}, "not to 1"),
        ({"inclusion": 0.3}, "inclusion 0.5"),
        ({"spending": [0.5, 0.5, 0.0, 0.0, 0.0]}, "last look"),
    ],
)
def test_impossible_rules_are_refused(bad, message):
    with pytest.raises(ValidationError, match=message):
        GateRule(**bad)


def test_the_shipped_rule_is_the_default_one():
    assert load_config(configs_root() / "skills/gate_rule.yaml", GateRule) == GateRule()


def test_looks_accept_for_good_close_what_is_hopeless_and_stop_when_nothing_is_open():
    rule = GateRule()
    first = take_look(rule, 2, fit_of([0.10, 0.03, 0.0], [0.02] * 3), None, done=400, total=800)
    assert first.accepted == {"s0"} and first.open == {"s1"} and not first.stop
    # the accepted one stays, although it would not pass now
    second = take_look(rule, 3, fit_of([0.01, 0.0, 0.0], [0.015] * 3), first, done=600, total=800)
    assert second.accepted == {"s0"} and second.stop
    verdicts = final_verdicts(rule, fit_of([0.01, 0.0, 0.0], [0.015] * 3), second)
    assert [v.status for v in verdicts] == ["selected", "undecided", "undecided"]


def test_a_look_drops_what_does_harm_and_a_screening_one_decides_nothing_else():
    rule = GateRule()
    fit = fit_of([0.2, 0.0, -0.2], [0.03] * 3)
    first = take_look(rule, 0, fit, None, done=100, total=800)
    assert first.dropped == {"s2"} and not first.accepted and first.open == {"s0", "s1"} and not first.stop
    # it stays dropped, whatever its estimate does later, and is open no more
    later = take_look(rule, 2, fit_of([0.2, 0.0, 0.1], [0.02] * 3), first, done=400, total=800)
    assert later.accepted == {"s0"} and later.dropped == {"s2"} and "s2" not in later.open
    last = take_look(rule, 4, fit_of([0.2, -0.2, 0.1], [0.02] * 3), later, done=800, total=800)
    assert last.harmful == {"s1", "s2"} and last.dropped == {"s2"}  # nothing is played without s1 any more
    verdicts = final_verdicts(rule, fit_of([0.2, -0.2, 0.1], [0.02] * 3), last)
    assert [v.status for v in verdicts] == ["selected", "harmful", "harmful"]
    kept = take_look(GateRule(drop_harmful=False), 0, fit, None, done=100, total=800)
    assert not kept.dropped and kept.open == {"s0", "s1", "s2"}


def test_the_rate_of_false_harm_is_shared_out_over_the_looks():
    rule = GateRule()
    assert sum(rule.harm_rate(i) for i in range(len(rule.stages))) == pytest.approx(rule.fdr)
    off = GateRule(drop_harmful=False)
    assert [off.harm_rate(i) for i in range(5)] == [0, 0, 0, 0, off.fdr]


def test_a_first_look_can_be_joined_with_the_second():
    joined = GateRule().later().later()
    assert (joined.stages, joined.spending) == ([1.0, 0.5, 0.5], [0.4, 0.3, 0.3])
    assert single(1).later() == single(1)


def test_without_the_harmful_chunks_the_others_are_found():
    worlds = [hidden_world(OUTCOMES)]
    assert worlds[0].effects[14] < -0.2 and (worlds[0].effects[6:14] == 0).all()
    args = {"gates": 6, "seed": [3], "tasks": 300}
    kept = score_rule(worlds, GateRule(drop_harmful=False), **args)
    dropped = score_rule(worlds, GateRule(), **args)
    assert dropped.recall > kept.recall + 0.2 and dropped.false_discovery <= 0.1
    gate = simulate_gate(worlds[0], GateRule(), np.random.default_rng(0), tasks=300)
    assert gate.dropped >= {14} and not gate.dropped & set(range(6))


def test_a_chunk_left_out_is_in_no_arm_and_moves_no_other():
    entries = [BankEntry(skill_id=f"s{i}", content="x") for i in range(6)]
    for flip in ([], ["*"]):
        plain = MaskedSkills(entries, mask_seed=3, inclusion=0.5, flip=flip)
        fewer = MaskedSkills(entries, mask_seed=3, inclusion=0.5, flip=flip, without=["s2"])
        for task in range(50):
            job = EpisodeJob(task_id=task, sample_id=0, seed=0, split="val")
            assert fewer.assigned(job) == [e for e in plain.assigned(job) if e.skill_id != "s2"]
    assert fewer.identity()["without"] == ["s2"] and "without" not in plain.identity()
    with pytest.raises(ConfigError, match=r"skills\.without: the bank has no skill 's9'"):
        MaskedSkills(entries, mask_seed=3, inclusion=0.5, without=["s9"])


def test_the_last_look_always_stops():
    look = take_look(single(1), 0, fit_of([0.0, 0.1], [0.02, 0.02]), None, done=400, total=400)
    assert look.stop and look.accepted == {"s1"}
    seed = take_look(SEED_RULE, 0, fit_of([0.001, -0.1], [1, 1]), None, done=400, total=400)
    assert seed.stop and seed.accepted == {"s0"}


def test_stage_sizes_add_up():
    assert GateRule().stage_sizes(400) == [100, 100, 200, 200, 200]
    assert sum(GateRule().stage_sizes(33)) == GateRule().total_pairs(33) == 66


def test_a_world_has_exactly_the_effects_it_promises():
    world = make_world(OUTCOMES, STANDARD_EFFECTS, ((0, 1, -0.2),))
    rng = np.random.default_rng(0)
    n = 60_000
    from rayrl.skills.simulator import draw_luck

    difficulty = OUTCOMES.mu + OUTCOMES.tau * rng.standard_normal(n)
    masks = (rng.random((n, 16)) < 0.5).astype(float)
    luck = draw_luck(rng, n, 1, OUTCOMES.rho, common=True)[0]
    for j in (0, 4, 8, 15):
        on, off = masks.copy(), masks.copy()
        on[:, j], off[:, j] = 1, 0
        effect = (world.play(difficulty, on, luck) - world.play(difficulty, off, luck)).mean()
        assert effect == pytest.approx(STANDARD_EFFECTS[j], abs=0.006)


def test_an_impossible_world_is_refused():
    with pytest.raises(ValueError, match="more than there is"):
        make_world(OUTCOMES, np.full(16, 0.4))


def test_fitting_recovers_the_outcomes_rewards_were_drawn_from():
    from rayrl.skills.simulator import draw_luck

    world = make_world(OUTCOMES, np.array([0.1, 0.1, 0.0, -0.05]))
    rng = np.random.default_rng(1)
    tasks = 6000
    difficulty = np.repeat(OUTCOMES.mu + OUTCOMES.tau * rng.standard_normal(tasks), 2)
    masks = (rng.random((2 * tasks, 4)) < 0.5).astype(float)
    luck = draw_luck(rng, 2 * tasks, 2, OUTCOMES.rho, common=True)
    bare = world.play(difficulty, np.zeros_like(masks), luck[0])
    masked = world.play(difficulty, masks, luck[1])
    found = fit_outcomes((bare == 1).reshape(-1, 2), (masked == 1).reshape(-1, 2), bare[bare < 1], bare[bare == 1])
    assert found.mu == pytest.approx(OUTCOMES.mu, abs=0.06)
    assert found.tau == pytest.approx(OUTCOMES.tau, abs=0.06)
    assert found.rho == pytest.approx(OUTCOMES.rho, abs=0.06)


def test_common_seeds_help_and_complement_pairs_help_more():
    worlds = [make_world(OUTCOMES, STANDARD_EFFECTS)]
    args = {"gates": 8, "seed": [5], "tasks": 200}
    own = score_rule(worlds, PLAIN_RULE, common=False, **args)
    common = score_rule(worlds, PLAIN_RULE, **args)
    pairs = score_rule(worlds, single(1), **args)
    assert common.correlation > own.correlation + 0.1
    assert pairs.se < common.se < own.se
    assert pairs.rollouts == common.rollouts == 400


def test_a_world_without_effects_gives_hardly_any_selection():
    world = make_world(OUTCOMES, np.zeros(16))
    gates = [simulate_gate(world, GateRule(), np.random.default_rng(i), tasks=200) for i in range(40)]
    assert sum(bool(g.selected) for g in gates) <= 6  # 5 % of 40, with room for luck


def test_random_worlds_have_helpful_useless_and_harmful_chunks():
    rng = np.random.default_rng(0)
    for _ in range(3):
        effects = random_world(OUTCOMES, rng).effects
        assert (effects > 0).any() and (effects == 0).any() and (effects < 0).any()


def test_reported_worlds_follow_from_the_frozen_rule():
    a, b = GateRule(), GateRule(futility=0.2)
    assert reported_seed(a, "standard") != reported_seed(b, "standard") != reported_seed(b, "random")
    first, again = (draw_worlds(OUTCOMES, a, "standard", 2) for _ in range(2))
    assert [w.outcomes.mu for w in first] == [w.outcomes.mu for w in again]
    assert [w.outcomes.mu for w in draw_worlds(OUTCOMES, b, "standard", 2)] != [w.outcomes.mu for w in first]


def test_a_small_study_has_its_table_and_figure():
    outcomes = load_outcomes(configs_root() / "skills/outcomes_scripted.json")
    found = study(GateRule(), outcomes, gates=4, tasks=80, repeats=[1])
    assert {r["rule"] for r in found["standard"]["rows"]} >= {"seed rule", "default rule", "lower bound, bare pairs"}
    text = markdown(found)
    assert text.count("|---|") >= 4 and "random worlds" in text
    assert figure(found).startswith("<svg") and "recall" in figure(found)


def test_shuffled_assignments_give_no_lift():
    """A negative control: the same rewards with masks of other tasks select (nearly) nothing."""
    from rayrl.skills.design import Blocks, contrast_design
    from rayrl.skills.estimators import fit_cluster
    from rayrl.skills.selection import lower_bound
    from rayrl.skills.simulator import draw_luck

    world = make_world(OUTCOMES, STANDARD_EFFECTS)
    names = [str(i) for i in range(16)]
    right, shuffled = 0, 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        difficulty = OUTCOMES.mu + OUTCOMES.tau * rng.standard_normal(400)
        m = (rng.random((400, 16)) < 0.5).astype(float)
        luck = draw_luck(rng, 400, 2, OUTCOMES.rho, common=True)
        rewards = np.stack([world.play(difficulty, a, w) for a, w in zip((m, 1 - m), luck, strict=True)], axis=1)
        for masks, kind in ((m, "right"), (m[rng.permutation(400)], "shuffled")):
            design = contrast_design([Blocks(np.arange(400), rewards, np.stack([masks, 1 - masks], axis=1))])
            found = lower_bound(fit_cluster(design.x, design.y, design.tasks, names))
            count = sum(v.status == "selected" for v in found)
            right, shuffled = (right + count, shuffled) if kind == "right" else (right, shuffled + count)
    assert right >= 40 and shuffled <= 3
