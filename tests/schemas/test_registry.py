"""The registry: names, duplicates, unknown names, what a preprocessor may return or raise, and how they arrive."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import RegistryError, RowError
from schemas.registry import PREPROCESSOR_REGISTRY, Registry, conv_preprocess, load_preprocessors

TURNS = [["user", ("text", "a")], ["assistant", ("text", "b")]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def registered():
    """Registers functions under names that go away with the test."""
    names = []

    def add(function, name="test_only", **kwargs):
        PREPROCESSOR_REGISTRY.register(name, **kwargs)(function)
        names.append(name)
        return name

    yield add
    for name in names:
        del PREPROCESSOR_REGISTRY._entries[name]


def test_decorators_stack_and_return_the_function():
    registry = Registry("preprocessor")

    @registry.register("one")
    @registry.register("two")
    def function(conversations, **kwargs):
        return conversations

    assert registry["one"] is registry["two"] is function
    assert registry.names() == list(registry) == ["one", "two"]
    assert function(TURNS) is TURNS
    assert "one" in registry and "three" not in registry


def test_duplicates_raise_with_both_functions_and_the_known_names():
    registry = Registry("preprocessor")
    registry.register("one")(len)
    registry.register("two")(len)
    with pytest.raises(
        RegistryError, match=r"'one' of builtins\.max is registered already by builtins\.len; known: one, two"
    ):
        registry.register("one")(max)
    assert registry["one"] is len
    with pytest.raises(RegistryError, match="registered already"):
        registry.register("one")(len)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qwen_omni_ofline_av", r"'qwen_omni_ofline_av'; did you mean 'qwen_omni_offline_av'\? known: plain, qwen"),
        ("zzz", r"unknown preprocessor 'zzz'; known: plain, qwen_omni_offline_av"),
        (None, "unknown preprocessor None; known: plain"),
    ],
)
def test_unknown_names_list_the_known_and_the_nearest(name, says):
    registry = Registry("preprocessor")
    registry.register("qwen_omni_offline_av")(len)
    registry.register("plain")(len)
    with pytest.raises(RegistryError, match=says) as error:
        registry[name]
    assert error.value.exit_code == 2


@pytest.mark.parametrize("name", ["", None, 3])
def test_names_are_strings(name):
    with pytest.raises(RegistryError, match="a string that is not empty"):
        Registry("preprocessor").register(name)


def test_arguments_are_checked_where_they_are_declared():
    registry = Registry("preprocessor")
    registry.register("some", arguments=["answer_form", "shuffle"])(len)
    registry.register("any")(len)
    registry.register("none", arguments=())(len)
    registry.check_arguments("some", ["shuffle"])
    registry.check_arguments("any", ["whatever"])
    with pytest.raises(RegistryError, match="no argument 'anser_form'; did you mean 'answer_form'"):
        registry.check_arguments("some", ["anser_form"])
    with pytest.raises(RegistryError, match="no argument 'x'; known: none"):
        registry.check_arguments("none", ["x"])


def test_conv_preprocess_passes_everything_on(registered):
    seen = {}

    def function(conversations, **kwargs):
        seen.update(kwargs, conversations=conversations)
        return TURNS

    rng = random.Random(1)
    assert conv_preprocess(registered(function), "raw", rng=rng, num_videos=2, extra="x") == TURNS
    assert seen == {"conversations": "raw", "rng": rng, "num_videos": 2, "extra": "x"}


def test_turns_of_lists_become_tuples(registered):
    name = registered(lambda conversations, **kwargs: [["user", ["text", "a"]]])
    assert conv_preprocess(name, None) == [["user", ("text", "a")]]


@pytest.mark.parametrize("returned", [None, "x", [["human", ("text", "a")]], [["user", ("video", "a.mp4")]], 3, [3]])
def test_what_is_returned_is_checked(registered, returned):
    name = registered(lambda conversations, **kwargs: returned)
    with pytest.raises(RowError) as error:
        conv_preprocess(name, None)
    assert error.value.stage == "preprocess"
    assert error.value.reason in ("preprocessor_failed", "empty_conversation")
    assert "'test_only'" in error.value.detail


@pytest.mark.parametrize("returned", [[], [["user"], ["assistant"]]])
def test_nothing_to_say_is_an_empty_conversation(registered, returned):
    with pytest.raises(RowError) as error:
        conv_preprocess(registered(lambda conversations, **kwargs: returned), None)
    assert error.value.reason == "empty_conversation"


def test_an_exception_is_chained_with_the_name(registered):
    def function(conversations, **kwargs):
        raise KeyError("value\nof two lines")

    with pytest.raises(RowError, match="preprocessor 'test_only' raised KeyError: ") as error:
        conv_preprocess(registered(function), None)
    assert error.value.reason == "preprocessor_failed"
    assert isinstance(error.value.__cause__, KeyError)
    assert "\n" not in error.value.detail


def test_a_row_error_of_the_preprocessor_passes(registered):
    def function(conversations, **kwargs):
        raise RowError("bad_row", "no answer", "preprocess")

    with pytest.raises(RowError) as error:
        conv_preprocess(registered(function), None)
    assert (error.value.reason, error.value.detail) == ("bad_row", "no answer")


def test_an_interrupt_is_no_fault_of_the_row(registered):
    def function(conversations, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conv_preprocess(registered(function), None)


def test_loading_twice_changes_nothing():
    load_preprocessors()
    names = PREPROCESSOR_REGISTRY.names()
    load_preprocessors()
    assert PREPROCESSOR_REGISTRY.names() == names
    assert {"qwen_omni_offline_av", "sharegpt4v_pretrain", "openai_messages", "plain_sft"} <= set(names)


def run(code, *paths, cwd):
    """stdout or stderr of a fresh interpreter with these import paths."""
    env = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


PLUGIN = """
from schemas.registry import PREPROCESSOR_REGISTRY

@PREPROCESSOR_REGISTRY.register("{name}")
def function(conversations, **kwargs):
    return [["user", ("text", "{name}")]]
"""
SHOW = "from schemas.registry import *; load_preprocessors({imports}); print(conv_preprocess({name!r}, None))"


def test_third_parties_by_entry_point(tmp_path):
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[omniloom.preprocessors]\ntheirs = theirs_module\n")
    (tmp_path / "theirs_module.py").write_text(PLUGIN.format(name="theirs"))
    assert run(SHOW.format(imports="", name="theirs"), ROOT, tmp_path, cwd="/") == "[['user', ('text', 'theirs')]]"
    (tmp_path / "theirs_module.py").write_text("import nothing_of_this_name")
    said = run(SHOW.format(imports="", name="theirs"), ROOT, tmp_path, cwd="/")
    assert "entry point 'theirs' of theirs: module 'theirs_module' cannot be imported: ModuleNotFoundError" in said


def test_third_parties_by_imports_from_the_path_or_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN.format(name="mine"))
    expected = "[['user', ('text', 'mine')]]"
    assert run(SHOW.format(imports="['mine']", name="mine"), ROOT, tmp_path, cwd="/") == expected
    code = "import sys; sys.path.remove(''); " + SHOW.format(imports="['mine']", name="mine")
    assert run(code, ROOT, cwd=tmp_path) == expected


def test_a_module_that_takes_a_built_in_name(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN.format(name="plain_sft"))
    said = run(SHOW.format(imports="['mine']", name="plain_sft"), ROOT, tmp_path, cwd="/")
    assert "pack.imports: module 'mine': preprocessor 'plain_sft' of mine.function is registered already" in said


def test_the_registry_imports_no_pack_until_it_is_asked_to_load():
    code = "import sys; from schemas.registry import *; print(PREPROCESSOR_REGISTRY.names(), 'pack' in sys.modules); "
    assert run(code, ROOT, cwd="/") == "[] False"
    load = "load_preprocessors(); print('plain_sft' in PREPROCESSOR_REGISTRY, 'torch' in sys.modules)"
    assert run(code + load, ROOT, cwd="/") == "[] False\nTrue False"
