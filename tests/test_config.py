"""Loading configs: interpolation, overrides, errors that name file and key and say what to do."""

from __future__ import annotations

import pytest
from pydantic import Field

from rayrl import config as config_module
from rayrl.config import (
    Section,
    configs_root,
    find_config,
    is_operational,
    load_config,
    load_raw,
    operational,
    parse_config,
    resolve_resource,
)
from rayrl.errors import ConfigError
from rayrl.experiment import load_run_config
from rayrl.settings import RunConfig


class Inner(Section):
    depth: int = 1
    """Depth."""
    where: str = operational("here")
    """Where."""


class Outer(Section):
    name: str
    """Name."""
    inner: Inner = Inner()
    """Inner."""
    ratio: float = Field(0.5, gt=0)
    """Ratio."""
    speed: Inner = operational(Inner())
    """Speed."""


def write(tmp_path, text, name="c.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_are_yaml_and_win(tmp_path):
    path = write(tmp_path, "name: a\ninner: {depth: 2}\n")
    found = load_config(path, Outer, ["inner.depth=5", "ratio=1e-3", "name=x=y"])
    assert (found.inner.depth, found.ratio, found.name) == (5, 0.001, "x=y")


def test_interpolation_reaches_other_keys_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_NAME", "from-env")
    path = write(tmp_path, "name: ${oc.env:SOME_NAME}\ninner: {where: 'of ${name}'}\n")
    found = load_config(path, Outer)
    assert found.inner.where == "of from-env"


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("name: [", [], r"c\.yaml: cannot be read as YAML"),
        ("just text", [], r"c\.yaml: "),
        ("- a\n- b\n", [], r"c\.yaml: the top level must be a mapping"),
        ("name: a\nname: b\n", [], r"c\.yaml: cannot be read as YAML.*duplicate"),
        ("name: ${nowhere}\n", [], r"c\.yaml: .*nowhere"),
        ("name: ${oc.env:RAYRL_NOT_SET}\n", [], r"c\.yaml: .*RAYRL_NOT_SET"),
        ("name: ???\n", [], r"c\.yaml: .*[Mm]issing.*name"),
        ("name: a\n", ["ratio"], r"override 'ratio' is not of the form section\.key=value"),
        ("name: a\n", ["=3"], r"override '=3' is not of the form"),
        ("name: a\n", ["inner..depth=3"], r"is not of the form"),
        ("name: a\n", ["inner.depth=[1,"], r"c\.yaml: override cannot be parsed|c\.yaml: "),
        ("name: a\ninner: {depth: deep}\n", [], r"c\.yaml: the config is not valid:\n  inner\.depth: .*integer"),
        ("name: a\ninner: {dept: 3}\n", [], r"inner\.dept: unknown key \(did you mean 'depth'\?\); known keys: depth"),
        ("name: a\nratoi: 3\n", [], r"ratoi: unknown key \(did you mean 'ratio'\?\)"),
        ("name: a\nratio: .nan\n", [], r"ratio: .*finite"),
        ("name: a\nratio: 0\n", [], r"ratio: .*greater than 0"),
        ("{}\n", [], r"name: Field required"),
        ("", [], r"name: Field required"),
    ],
)
def test_mistakes_name_the_file_and_the_key(tmp_path, text, overrides, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        load_config(write(tmp_path, text), Outer, overrides)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "nmae: a\nratio: 0\ninner: {depth: x}\n"), Outer)
    for key in ("nmae", "name", "ratio", "inner.depth"):
        assert key in str(caught.value)


def test_a_value_is_never_repeated_in_the_message(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "name: a\ninner: {depth: sk-very-secret}\n"), Outer)
    assert "sk-very-secret" not in str(caught.value)


def test_unions_show_the_keys_of_the_right_member(tmp_path, plain_run):
    path = plain_run(environment__kind="shop", environment__embeded={"generate": 60})
    with pytest.raises(ConfigError, match=r"environment\.embeded: unknown key \(did you mean 'embedded'\?\)"):
        load_run_config(path)
    path = plain_run(environment__option={"steps": 3})
    with pytest.raises(ConfigError, match=r"environment\.option: unknown key \(did you mean 'options'\?\)"):
        load_run_config(path)


@pytest.mark.parametrize("value", ["{a: 1, b: [x, 2]}", "{}"])
def test_free_form_sections_keep_what_they_are_given(tmp_path, plain_run, value):
    config, _ = load_run_config(plain_run(), [f"skills.options={value}"])
    assert config.skills.options == ({"a": 1, "b": ["x", 2]} if "a" in value else {})


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Outer(name="a").ratio = 3.0


def test_semantic_leaves_the_operational_out_at_every_depth():
    assert Outer(name="a").semantic() == {"name": "a", "inner": {"depth": 1}, "ratio": 0.5}
    assert is_operational(Outer.model_fields["speed"]) and not is_operational(Outer.model_fields["inner"])


def test_attribute_docstrings_become_descriptions():
    assert Outer.model_fields["ratio"].description == "Ratio."


def test_empty_sections_mean_the_defaults(plain_run):
    path = plain_run(skills=None, runtime=None, prompt=None)
    config, _ = load_run_config(path)
    assert config == load_run_config(plain_run())[0]


# --- finding files


def test_shipped_configs_are_found_by_name_and_a_file_here_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = configs_root() / "quickstart.yaml"
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml", str(shipped)):
        assert find_config(name) == shipped
    own = write(tmp_path, "a: 1", "quickstart.yaml")
    assert find_config("quickstart.yaml").resolve() == own


def test_an_unknown_config_gets_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config 'quickstrat' does not exist \(did you mean 'quickstart'\?\)"):
        find_config("quickstrat")


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_raw(tmp_path / "none.yaml")


def test_resources_are_looked_for_beside_the_config_then_here_then_among_the_shipped(tmp_path, monkeypatch):
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    name = "prompts/shop_v1.yaml"
    assert resolve_resource(name, beside) == (configs_root() / name).resolve()
    (here / "prompts").mkdir()
    mine = write(here, "x", name)
    assert resolve_resource(name, beside) == mine
    (beside / "prompts").mkdir()
    theirs = write(beside, "x", name)
    assert resolve_resource(name, beside) == theirs
    assert resolve_resource(str(mine), beside) == mine
    with pytest.raises(ConfigError, match=r"'nowhere\.json'.*looked at: .*beside.*here"):
        resolve_resource("nowhere.json", beside)


def test_an_installation_without_configs_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "__file__", str(tmp_path / "lib" / "rayrl" / "config.py"))
    with pytest.raises(ConfigError, match="reinstall rayrl"):
        configs_root()
    (tmp_path / "lib" / "rayrl" / "_configs" / "prompts").mkdir(parents=True)
    assert configs_root() == (tmp_path / "lib" / "rayrl" / "_configs").resolve()


def test_parse_config_takes_plain_dicts():
    assert parse_config({"name": "n"}, Outer, source="here").name == "n"
    with pytest.raises(ConfigError, match="here: the config is not valid"):
        parse_config({}, Outer, source="here")


def test_a_run_config_needs_its_four_sections():
    with pytest.raises(ConfigError) as caught:
        parse_config({}, RunConfig, source="x")
    assert all(
        f"{name}: Field required" in str(caught.value) for name in ("experiment", "tasks", "environment", "model")
    )
