"""YAML 1.2 core schema, places, and everything that a configuration file must not hold."""

import math
import textwrap

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas import yaml_source
from schemas.errors import ConfigError
from schemas.yaml_source import dump_yaml, parse_value, parse_yaml, read_yaml

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("+12", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("1_000", "1_000"),
        ("190:20:30", "190:20:30"),
        ("2024-01-02", "2024-01-02"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("tRUE", "tRUE"),
        ("null", None),
        ("~", None),
        ("None", "None"),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("'1'", "1"),
        ('"true"', "true"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("=", "="),
        ("!!str 1", "1"),
        ("!!int '3'", 3),
        ("!!float 3", 3.0),
    ],
)
def test_plain_scalars(text, value):
    found = parse_yaml(f"key: {text}", "f").data["key"]
    assert found == value and type(found) is type(value)


def test_nan():
    assert math.isnan(parse_yaml("key: .nan", "f").data["key"])


def test_places_of_keys_and_values():
    source = parse_yaml("a:\n  b: [1, {c: 2}]\n  d:\n", "f.yaml")
    assert source.data == {"a": {"b": [1, {"c": 2}], "d": None}}
    assert source.keys[("a", "b")] == "f.yaml:2:3"
    assert source.values[("a", "b", 1, "c")] == "f.yaml:2:14"
    assert source.keys[("a", "d")] == "f.yaml:3:3"


@given(values)
def test_plain_yaml_agrees_with_pyyaml(value):
    """What PyYAML writes for quoted strings and numbers means the same to us."""
    text = yaml.safe_dump({"key": value}, default_style='"', allow_unicode=True)
    assert parse_yaml(text, "f").data == {"key": value}


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), values, max_size=4))
def test_dump_is_read_back(data):
    assert parse_yaml(dump_yaml(data), "f").data == data


def test_dump_quotes_what_older_readers_misread():
    text = dump_yaml({"a": "on", "b": "1e5", "c": "1_000", "d": "x"})
    assert yaml.safe_load(text) == {"a": "on", "b": "1e5", "c": "1_000", "d": "x"}


def test_anchors_aliases_and_merges():
    text = """
        base: &base {fps: 2, size: [1, 2]}
        more: &more {fps: 9, codec: wav}
        one: {<<: *base, fps: 3}
        two: {<<: [*base, *more]}
        list: *base
        """
    data = parse_yaml(textwrap.dedent(text), "f").data
    assert data["one"] == {"fps": 3, "size": [1, 2]}
    assert data["two"] == {"fps": 2, "size": [1, 2], "codec": "wav"}
    data["list"]["size"].append(3)
    assert data["base"]["size"] == [1, 2]  # an override of one place must not change the others


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a: 1\nb: 2\na: 3\n", ["f:3:1: a: duplicate key; it stands at f:1:1 already"]),
        ("a: {b: 1, b: 1}\nc: {d: 1,\n d: 2}", ["f:1:11: a.b: duplicate", "f:3:2: c.d: duplicate"]),
        ("1: x", ["f:1:1: a key is a string, not '1'"]),
        ("true: x", ["a key is a string, not 'true'"]),
        ("? [a]\n: x", ["a key is a string, not a collection"]),
        ("a: !!python/object/apply:os.system ['x']", ["f:1:4: the tag !!python/object/apply:os.system is not allowed"]),
        ("a: !mine 3", ["the tag !mine is not allowed"]),
        ("a: !!set {x}", ["the tag !!set is not allowed"]),
        ("a: !!timestamp 2020-01-01", ["the tag !!timestamp is not allowed"]),
        ("a: !!int x", ["'x' is no int"]),
        ("a: {<<: 3}", ["a merge (<<) takes a mapping"]),
    ],
)
def test_faults_are_listed(text, faults):
    found = parse_yaml(text, "f").faults
    assert len(found) == len(faults)
    for line, said in zip(found, faults, strict=True):
        assert said in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", r"^f:1:\d+: not YAML: .*expected"),
        ("a: b: c", r"^f:1:5: not YAML: mapping values are not allowed here$"),
        ("a:\n\t- b", r"^f:2:1: not YAML: .*'\\t'"),
        ("a: *nowhere", r"^f:1:4: not YAML: found undefined alias"),
        ("a: 1\n---\nb: 2", r"^f:2:1: not YAML: expected a single document"),
        ("a: \x07", r"^f: not YAML: unacceptable character"),
        ("a: &x [*x]", r"^f:1:8: an alias inside its own anchor|^f:1:\d+: an alias inside"),
    ],
)
def test_what_is_not_yaml_is_one_line_with_its_place(text, says):
    with pytest.raises(ConfigError, match=says) as error:
        parse_yaml(text, "f")
    assert "\n" not in str(error.value)


def test_aliases_of_aliases_end(monkeypatch):
    monkeypatch.setattr(yaml_source, "MAX_NODES", 1000)
    text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    with pytest.raises(ConfigError, match="more than 1000 values"):
        parse_yaml(text, "f")


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("a: b: c", "a: b: c"), ("[a, 1]", ["a", 1]), ("", None), ("@x", "@x"), ("'3'", "3")]
)
def test_values_of_the_command_line(text, value):
    assert parse_value(text) == value


def test_files(tmp_path):
    path = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match=r"c\.yaml: no such file$"):
        read_yaml(path)
    with pytest.raises(ConfigError, match="is a directory, not a YAML file"):
        read_yaml(tmp_path)
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="not a UTF-8 text: byte 3 is 0xff"):
        read_yaml(path)
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa9")
    assert read_yaml(path).data == {"a": "é"}
    path.write_text("")
    assert read_yaml(path).data is None
