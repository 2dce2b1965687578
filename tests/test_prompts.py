"""Prompts: every text is hashed, placeholders are checked, braces in foreign text are left alone."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayrl.config import configs_root
from rayrl.errors import ConfigError
from rayrl.prompts import PromptBuilder, PromptConfig, PromptTemplate, load_prompt
from rayrl.schemas import ProtocolError, Skill
from tests.doubles import TOOLS, page

BASE = {
    "name": "n",
    "version": "1",
    "system": "Rules. {skills} {max_actions}",
    "user": "{instruction}|{persona}|{observation}",
}


def write(tmp_path, value):
    path = tmp_path / "p.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, allow_unicode=True), encoding="utf-8")
    return path


def builder(config=None, **changes):
    return PromptBuilder(PromptTemplate(**{**BASE, **changes}), config or PromptConfig())


def start(made, instruction="buy", persona=None, text="page", skills=()):
    return made.start(
        instruction=instruction, persona=persona or {}, observation=page(text), skills=list(skills), max_actions=30
    )


@pytest.mark.parametrize("path", sorted((configs_root() / "prompts").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_prompts_load_and_ask_for_no_visible_thought(path):
    template = load_prompt(path)
    assert template.name and template.version
    texts = " ".join(template.model_dump().values()).lower()
    assert "thought:" not in texts and "action:" not in texts


@pytest.mark.parametrize(
    "key", ["system", "user", "persona", "skills", "skill", "protocol_feedback", "stub", "version", "name"]
)
def test_every_text_is_in_the_hash(key):
    template = PromptTemplate(**BASE)
    changed = template.model_copy(update={key: getattr(template, key) + " "})
    assert changed.sha256() != template.sha256()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("name: [", "cannot be read"),
        ("", "is not valid"),
        ({**BASE, "sytem": "x"}, "sytem"),
        ({k: v for k, v in BASE.items() if k != "user"}, "user: Field required"),
        ({**BASE, "system": "{skill}"}, r"system: unknown placeholder \{skill\}; known: \{max_actions\}, \{skills\}"),
        ({**BASE, "system": "none"}, r"system: the placeholder \{skills\} is missing"),
        ({**BASE, "user": "{observation}"}, r"user: the placeholder \{instruction\} is missing"),
        ({**BASE, "stub": "{text}"}, r"stub: unknown placeholder"),
    ],
)
def test_broken_prompts_name_the_file_and_the_key(tmp_path, value, says):
    with pytest.raises(ConfigError, match=rf"(?s)p\.yaml.*{says}"):
        load_prompt(write(tmp_path, value))


def test_a_missing_prompt_is_bad_input(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompt(tmp_path / "none.yaml")


def test_persona_and_skills_have_blocks_only_when_there_are_any():
    made = builder(persona="P={persona_json}", skills="S={skill_list}")
    system, user = start(made)
    assert system == {"role": "system", "content": "Rules.  30"}
    assert user["content"] == "buy||page"
    skills = [Skill(skill_id="a", content="one"), Skill(skill_id="b", content="two")]
    system, user = start(made, persona={"年龄": 30, "a": 1}, skills=skills)
    assert "S=- [a] one\n- [b] two" in system["content"]
    assert user["content"] == 'buy|P={"a": 1, "年龄": 30}|page'


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_foreign_text_is_never_taken_for_a_placeholder(text):
    made = builder()
    foreign = f"{{observation}} {{persona}} {text} {{max_actions}}"
    system, user = start(made, instruction=foreign, skills=[Skill(skill_id="s", content=foreign)])
    assert foreign in user["content"] and foreign in system["content"]


def test_feedback_names_the_code_and_the_tools():
    text = builder().protocol_feedback(ProtocolError(code="no_tool_call", message="Nothing."), TOOLS)
    assert "no_tool_call" in text and "Nothing." in text and "search, click" in text


def conversation(n):
    out = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for i in range(n):
        out.append({"role": "assistant", "content": "", "tool_calls": []})
        out.append({"role": "tool", "tool_call_id": str(i), "content": f"first line {i}\n" + "body " * 50})
    return out


def test_full_history_is_the_conversation_itself():
    talk = conversation(4)
    assert builder().visible(talk) is talk


@pytest.mark.parametrize("n", [1, 2, 9])
def test_last_n_keeps_the_newest_observations_whole(n):
    talk = conversation(4)
    before = [dict(m) for m in talk]
    seen = builder(PromptConfig(history="last_n", last_n=n)).visible(talk)
    whole = [m for m in seen if m["role"] == "tool" and "body" in m["content"]]
    stubs = [m for m in seen if m["role"] == "tool" and "body" not in m["content"]]
    assert len(whole) == min(n, 4) and whole == [m for m in talk if m["role"] == "tool"][-n:]
    assert [m["content"] for m in stubs] == [
        f"[earlier observation omitted: first line {i}]" for i in range(4 - len(whole))
    ]
    assert [m.get("tool_call_id") for m in seen] == [m.get("tool_call_id") for m in talk]
    assert talk == before and len(seen) == len(talk)


def test_the_history_policy_is_in_the_identity_and_zero_is_refused():
    assert builder().identity()["history"] == "full"
    assert builder(PromptConfig(history="last_n", last_n=3)).identity()["history"] == {"last_n": 3}
    with pytest.raises(ConfigError, match=r"prompt\.last_n: 0"):
        builder(PromptConfig(history="last_n", last_n=0))
