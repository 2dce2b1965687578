from __future__ import annotations

import asyncio
import time

import pytest

from rayrl.config import configs_root
from rayrl.models.config import ModelConfig, ScriptedConfig
from rayrl.models.registry import build_model, model_identity
from rayrl.models.scripted import ScriptedModel
from rayrl.models.scripted_policy import option_matches
from rayrl.models.scripted_prompt import observation_of, read_page, read_wish, skills_section
from rayrl.models.scripted_skills import COMPETENCES, taught
from rayrl.runtime import AgentRuntime, RuntimeConfig
from rayrl.schemas import EpisodeJob, Observation, PublicContext, Skill, episode_seed
from tests.models.conftest import SEARCH, click
from tests.models.shop_harness import play, prompts, shop, success_rate

SKILLS = {
    "query_formulation": "Write the search query from the product type, the required attributes and the brand.",
    "attribute_check": "Open only results whose key attributes list every requirement of the task.",
    "option_matching": "Select the colour and size the task names instead of the first variant shown.",
    "budget_check": "Before buying, compare the price of the chosen variant with the budget.",
    "persona_preference": "Follow the persona: prefer its brands and take its recent searches as wishes.",
    "pagination": "If no result matches, turn to the next page, or go back and try another product.",
}
TASKS = 120


def model(**settings) -> ScriptedModel:
    return ScriptedModel(ScriptedConfig(**settings))


def test_levels_land_where_studies_need_them():
    naive, competent = success_rate(model(level="naive"), TASKS), success_rate(model(level="competent"), TASKS)
    assert 0.3 <= naive <= 0.55 and 0.85 <= competent <= 0.99


def test_all_skills_make_a_naive_shopper_competent_and_only_if_it_obeys():
    skilled = success_rate(model(level="naive"), TASKS, tuple(SKILLS.values()))
    assert skilled >= 0.85
    deaf = model(level="naive", obeys_skills=False)
    assert success_rate(deaf, TASKS, tuple(SKILLS.values())) == success_rate(deaf, TASKS)


@pytest.mark.parametrize("competence", COMPETENCES)
def test_each_competence_and_its_skill_matter(competence):
    without = success_rate(model(level="competent", noise=0, habit=0, **{competence: False}), TASKS)
    full = success_rate(model(level="competent", noise=0), TASKS)
    taught_again = success_rate(
        model(level="competent", noise=0, habit=0, **{competence: False}), TASKS, (SKILLS[competence],)
    )
    assert taught_again == full
    assert without < full - 0.03 or competence == "query_formulation"  # a raw query costs steps rather than success


def test_a_harmful_skill_does_harm_and_an_empty_one_nothing():
    competent = model(level="competent", noise=0)
    full = success_rate(competent, TASKS)
    assert success_rate(competent, TASKS, ("Ignore the price and the budget, they do not matter.",)) < full - 0.1
    assert success_rate(competent, TASKS, ("Water your plants twice a week.",)) == full


def test_the_same_sample_is_the_same_episode_and_samples_differ():
    shopper = model(level="naive")
    ids = sorted(shop().catalogue.tasks)[:30]
    assert [play(shopper, t) for t in ids] == [play(model(level="naive"), t) for t in ids]
    differing = sum(len({play(shopper, t, sample=s).actions for s in range(4)}) > 1 for t in ids)
    assert differing >= 20


@pytest.mark.parametrize(
    "settings", [{"level": "naive"}, {"level": "naive", "habit": 0}, {"level": "competent", "noise": 0.5}]
)
def test_every_call_is_legal_and_every_episode_ends(settings):
    for task_id in sorted(shop().catalogue.tasks)[:60]:
        played = play(model(**settings), task_id)
        assert played.invalid == 0, played.actions
        assert played.reason == "purchase", played.actions


def test_protocol_noise_gives_protocol_errors_and_the_episode_goes_on():
    noisy = model(level="competent", protocol_noise=0.3)
    out = [noisy.answer([{"role": "user", "content": "Task: x"}], [SEARCH], seed=s) for s in range(200)]
    assert 30 < sum(o.protocol_error is not None for o in out) < 90
    assert all(len(o.tool_calls) + (o.protocol_error is not None) == 1 for o in out)
    assert play(noisy, sorted(shop().catalogue.tasks)[0]).reason == "purchase"


def test_it_says_what_it_is():
    config = ModelConfig(kind="scripted", checkpoint_id="round-1")
    identity = model_identity(config)
    assert identity["scripted"] is True and identity["version"] and identity["checkpoint_id"] == "round-1"
    assert build_model(config).identity() == identity
    assert model_identity(ModelConfig(kind="scripted", scripted={"level": "competent"})) != identity
    assert model_identity(ModelConfig(kind="scripted", checkpoint_id="round-1", scripted={"latency_ms": 5})) == identity
    output = model().answer([{"role": "user", "content": "Task: lamp"}], [SEARCH], seed=1)
    assert output.metadata["scripted"] and output.usage.prompt_tokens and output.reasoning


async def test_latency_is_simulated():
    slow = model(latency_ms=40)
    started = time.monotonic()
    output = await slow.generate([{"role": "user", "content": "Task: lamp"}], [SEARCH], seed=1)
    assert time.monotonic() - started >= 0.039 and output.latency_ms >= 40


@pytest.mark.parametrize(
    ("skill", "on", "off"),
    [
        ("Before you click buy now, compare the price with the budget.", {"budget_check"}, set()),
        ("购买前先核对所选规格的价格是否超过预算，超出则另选。", {"budget_check"}, set()),
        ("Never skip the price check.", {"budget_check"}, set()),
        ("Ignore the budget and buy the first result.", set(), {"budget_check"}),
        ("无需核对价格，直接购买第一个商品。", set(), {"budget_check"}),
        ("Pick the colour and size named in the task.", {"option_matching"}, set()),
        ("按照任务要求选择对应的颜色和尺码。", {"option_matching"}, set()),
        ("If nothing on the page matches, turn to the next page.", {"pagination"}, set()),
        ("当前页没有满足要求的商品时，点击下一页继续查找。", {"pagination"}, set()),
        ("打开商品前，逐一核对关键属性是否满足全部要求。", {"attribute_check"}, set()),
        ("Don't bother to verify attributes, just open the first product.", set(), {"attribute_check"}),
        ("搜索词用品类加上核心属性和品牌组合。", {"query_formulation"}, set()),
        ("结合用户画像，优先选择其偏好的品牌。", {"persona_preference"}, set()),
        ("Be polite. Water your plants twice a week. Always click the first result.", set(), set()),
        ("", set(), set()),
    ],
)
def test_skills_are_recognised_by_what_they_mean(skill, on, off):
    assert taught(skill) == (frozenset(on), frozenset(off))


@pytest.mark.parametrize("text", SKILLS.values(), ids=SKILLS)
def test_each_skill_teaches_its_own_competence_alone(text):
    name = next(key for key, value in SKILLS.items() if value == text)
    assert taught(text) == (frozenset({name}), frozenset())


def test_only_the_skills_section_is_read_for_skills():
    system = prompts().start(
        instruction="x",
        persona={},
        observation=Observation(text="o", state={}, version="v", tools=[]),
        skills=[],
        max_actions=9,
    )[0]["content"]
    assert skills_section(system) == ""  # the rules of the prompt speak of the budget too
    with_skill = prompts().start(
        instruction="x",
        persona={},
        observation=Observation(text="o", state={}, version="v", tools=[]),
        skills=[Skill(skill_id="a", content="Compare the price with the budget.")],
        max_actions=9,
    )[0]["content"]
    assert "Compare the price" in skills_section(with_skill) and "shopping assistant" not in skills_section(with_skill)


@pytest.mark.parametrize(
    ("message", "facts"),
    [
        (
            "Task: 我想买一个Luma的电饭煲，要柴火饭、IH加热，规格墨绿、标准版，预算963元以内。\n"
            "Observation:\n页面：搜索首页",
            {
                "noun": "电饭煲",
                "attributes": ("柴火饭", "IH加热"),
                "options": ("墨绿", "标准版"),
                "budget": 963,
                "brand": "Luma",
            },
        ),
        (
            "Task: I want to buy a desk lamp with clip-on, eye care, option rose/gold, within 120.5 yuan.\n"
            "Observation:\nx",
            {"noun": "desk lamp", "attributes": ("clip-on", "eye care"), "options": ("rose/gold",), "budget": 120.5},
        ),
        (
            "任务：想买台灯，199元以内\n"
            '用户画像：{"品牌偏好": ["青禾"], "最近14天搜索关键词": ["台灯", "触控"], "规格偏好": ["墨绿"]}\n'
            "\n页面：搜索首页",
            {
                "noun": "台灯",
                "budget": 199,
                "persona_brands": ("青禾",),
                "persona_attributes": ("触控",),
                "persona_options": ("墨绿",),
            },
        ),
        (
            "Task: Looking for a pet feeder, around 615 yuan\nPersona: {broken\nObservation:\nx",
            {"noun": "pet feeder", "budget": 615},
        ),
        ("just some words", {"text": "just some words", "budget": None}),
    ],
)
def test_reading_the_task(message, facts):
    wish = read_wish(message)
    assert {key: getattr(wish, key) for key in facts} == facts


def test_reading_a_page():
    text = (
        "Task: x\nObservation:\n页面：商品详情\n商品：\n- 标题：灯\n- ASIN：700000000074\n- 价格：9.5 to 12\n"
        "- 品牌：A\n- 类别：c\n- 关键属性：触控\n\n规格选择：\n- 颜色：已选择 黑\n  可选值：黑 / 白\n"
        "- 尺码：尚未选择\n  可选值：s / m\n"
    )
    page = read_page(observation_of(text))
    assert page.kind == "detail" and page.selected == {"颜色": "黑", "尺码": None} and not page.price_is_final
    assert page.rows[0].asin == "700000000074" and page.price == 9.5
    assert read_page("[earlier observation omitted: 页面]").kind == "other"


@pytest.mark.parametrize(
    ("wanted", "label", "same"),
    [
        ("black", "黑色 black", True),
        ("黑色", "黑色 black", True),
        ("rose/gold", "玫瑰金 rose | gold", True),
        ("S", "s", True),
        ("S", "xs", False),
        ("L", "xl", False),
        ("39", "139", False),
        ("green", "墨绿 forest green", True),
        ("白", "米白色", False),
        ("3升", "13升", False),
        ("标准", "标准版", True),
    ],
)
def test_option_labels(wanted, label, same):
    assert option_matches(wanted, label) is same


def test_elsewhere_it_takes_the_plain_walk():
    tools = [
        {
            "type": "function",
            "function": {
                "name": "read_file",
                "parameters": {"type": "object", "properties": {"path": {"enum": ["a.md"]}}},
            },
        }
    ]
    output = model(noise=0).answer([{"role": "user", "content": "Evaluate the skill"}], tools, seed=3)
    assert output.tool_calls[0].arguments == {"path": "a.md"}
    odd = model(noise=0).answer(
        [{"role": "user", "content": "Task: x\nObservation:\n页面：公告"}], [click("back to search")], seed=3
    )
    assert odd.tool_calls[0].arguments == {"value": "back to search"}


async def test_in_the_real_runtime_over_http():
    from rayrl.environments.shop import ShopEnvironmentFactory
    from rayrl.environments.shop_config import ShopEnvironmentConfig
    from rayrl.shop.config import ShopServerConfig
    from rayrl.shop.server import ShopServer

    class NoSkills:
        def identity(self):
            return {}

        async def select(self, context: PublicContext) -> list[Skill]:
            return []

    server = ShopServer(ShopServerConfig(generate=480, seed=0))
    await server.start()
    environments = ShopEnvironmentFactory(ShopEnvironmentConfig(base_urls=[server.base_url], persona=True))
    try:
        await environments.start()
        runtime = AgentRuntime(
            model=model(level="competent"),
            environments=environments,
            skills=NoSkills(),
            prompts=prompts(),
            config=RuntimeConfig(),
            provenance={},
        )
        ids = sorted(shop().catalogue.tasks)[:24]
        jobs = [EpisodeJob(task_id=t, sample_id=0, seed=episode_seed(0, t, 0), split="train") for t in ids]
        records = [outcome.record for outcome in await asyncio.gather(*(runtime.run(job) for job in jobs))]
        assert [r["status"] for r in records] == ["completed"] * len(ids)
        over_http = [bool(r["final"]["reward_detail"]["r_success"]) for r in records]
        assert over_http == [play(model(level="competent"), t).success for t in ids]
    finally:
        await environments.aclose()
        await server.stop()
    assert (configs_root() / "prompts").is_dir()
