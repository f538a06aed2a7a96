"""`omniloom config` and `omniloom preprocessors` as commands."""

import json

from typer.testing import CliRunner

from jobs import config_cli, preprocessors_cli
from jobs.schemas_json import explain, reference_text, schema_text


def run(app, *words):
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_config_schema():
    assert run(config_cli.app, "schema") == schema_text("pack")
    assert json.loads(run(config_cli.app, "schema", "pack"))["required"] == ["pack"]


def test_config_explain():
    assert run(config_cli.app, "explain", "pack.video.fps") == explain("pack.video.fps") + "\n"
    assert "pack.rows.timeout_s" in run(config_cli.app, "explain")


def test_config_reference():
    assert run(config_cli.app, "reference") == reference_text()


def test_preprocessors_list():
    text = run(preprocessors_cli.app, "list")
    assert "qwen_omni_offline_av\n" in text and "pack.preprocessors.avqa.avqa; arguments: answer_form" in text
    listed = {entry["name"]: entry for entry in json.loads(run(preprocessors_cli.app, "list", "--json"))}
    assert listed["video_r1"]["arguments"] == ["reasoning", "types", "source_prefixes", "require_media"]
    assert all(entry["summary"] for entry in listed.values())


def test_preprocessors_list_with_imports(tmp_path, monkeypatch):
    source = '''
from schemas.registry import PREPROCESSOR_REGISTRY

@PREPROCESSOR_REGISTRY.register("of_the_list_test")
def function(conversations, **kwargs):
    """Mine."""
'''
    (tmp_path / "of_the_list_test_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    text = run(preprocessors_cli.app, "list", "--import", "of_the_list_test_module")
    assert "of_the_list_test\n    Mine.\n    of_the_list_test_module.function; arguments: any" in text
