"""What holds for the repository as a whole: sizes, no traces of a machine, documents that are true."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from jobs import cli
from jobs.cli import AFTER_CTRL_C
from pack.config import PackFile
from schemas.errors import EXIT_CODES
from schemas.registry import PREPROCESSOR_REGISTRY, load_preprocessors
from schemas.strict import load_config

ROOT = Path(__file__).parents[1]
PACKAGES = ("schemas", "pack", "convert", "train", "jobs")
MAX_LINES = 400
MAX_FUNCTION = 60
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:work|farm|root|home/\w+|Users)/")
REGISTRY_HOST = re.compile(
    r"pypi\.org|pythonhosted|/simple/?\b|--(?:extra-)?index-url|--find-links|npmjs|docker\.io|ghcr\.io"
)


def files_of_git() -> list[Path]:
    """Tracked files and new ones that are not ignored; tests/tools are copies of tools from elsewhere."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip("not a git checkout; whoever has one runs this")
    names = [name for name in answer.stdout.splitlines() if not name.startswith("tests/tools/")]
    return [path for name in names if (path := ROOT / name).is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    for path in files_of_git():
        data = path.read_bytes()
        if b"\0" not in data[:4096]:
            yield path.relative_to(ROOT), data.decode("utf-8")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for name, text in texts():
        if name.suffix == ".py":
            yield name, ast.parse(text)


def test_no_file_is_too_long() -> None:
    sizes = {
        str(name): text.count("\n") for name, text in texts() if name.suffix in (".py", ".html", ".css", ".js", ".sh")
    }
    assert "schemas/sample.py" in sizes
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_no_function_is_too_long() -> None:
    long = {}
    for name, tree in modules():
        if name.parts[:2] == ("train", "ops"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > MAX_FUNCTION:
                    long[f"{name}:{node.lineno} {node.name}"] = size
    assert long == {}


def test_no_path_of_a_machine_and_no_registry() -> None:
    found = []
    for name, text in texts():
        if name == Path("tests/test_repository.py"):
            continue
        for i, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) and not (name.parts[:2] == ("jobs", "cluster") and "/home/ray" in line):
                found.append(f"{name}:{i}: {line.strip()[:100]}")
            if REGISTRY_HOST.search(line):
                found.append(f"{name}:{i}: {line.strip()[:100]}")
    assert found == []


def test_the_lock_pins_every_package_and_names_no_host() -> None:
    lines = [line.partition(" ;")[0] for line in (ROOT / "requirements.lock").read_text().splitlines() if line]
    assert len(lines) > 100
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+(\[[a-z,]+\])?==[\w.+!]+", line)] == []
    locked = {line.partition("==")[0] for line in lines}
    wanted = re.findall(r"^([A-Za-z0-9-]+)", (ROOT / "requirements.in").read_text(), re.M)
    assert {name.lower() for name in wanted} <= locked
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["pack"]]
    assert {re.match(r"[A-Za-z0-9-]+", text)[0].lower() for text in needed} <= locked  # type: ignore[index]


def test_no_relative_import_and_no_forbidden_word() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name}:{node.lineno} imports relatively"
    folders = {part for name in files_of_git() for part in name.relative_to(ROOT).parts}
    assert not {"utils", "utils.py", "helpers", "helpers.py"} & folders


def test_entry_points_resolve() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = declared["scripts"]["omniloom"].partition(":")
    assert getattr(import_module(module), name) is cli.main
    for target in declared["entry-points"]["omniloom.preprocessors"].values():
        import_module(target)
    assert "omniloom" in {point.name for point in entry_points(group="omniloom.preprocessors")}


def test_every_package_is_declared_and_there() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for package in declared:
        assert (ROOT / package.replace(".", "/")).is_dir(), package
    with_code = {str(name.parent).replace("/", ".") for name, _ in modules() if name.parts[0] in PACKAGES}
    assert with_code <= set(declared)


def documents() -> list[Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_commands_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    goals = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)) | {"bench-pack"}
    for line in commands_in(text, "make"):
        assert line.split()[0] in goals, f"make {line}"
    for line in commands_in(text, "omniloom"):
        command = typer.main.get_command(cli.app)
        for word in line.split():
            if not hasattr(command, "commands"):
                break
            _, command, _ = command.resolve_command(typer.Context(command), [word])  # type: ignore[attr-defined]


def commands_in(text: str, program: str) -> set[str]:
    """What follows the program's name, in code."""
    lines = [line for block in code_blocks(text) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = [re.match(rf"{program} ([a-z].*)", code) for code in [*lines, *inline]]
    return {match[1] for match in found if match}


def test_the_commands_are_found_in_the_documents() -> None:
    """That the test before this one looks at something."""
    assert {"demo", "test"} <= {line.split()[0] for line in commands_in((ROOT / "README.md").read_text(), "make")}
    found = commands_in((ROOT / "docs/packing.md").read_text(), "omniloom")
    assert {"pack run CONFIG", "pack gc DATASET", "config explain KEY", "preprocessors list"} <= found


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_in_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_tree_in_the_readme_is_the_tree() -> None:
    (tree,) = [block for block in code_blocks((ROOT / "README.md").read_text()) if block.startswith("schemas/")]
    folder, count = "", 0
    for line in tree.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
            assert (ROOT / folder).is_dir(), folder
            continue
        for name in re.findall(r"(?:^|  )([\w/]+(?:\.py|/))(?= )", line):
            assert (ROOT / folder / name).exists(), f"{folder}{name}"
            count += 1
    assert count > 25
    there = {p.name for p in ROOT.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    empty = {name for name in there if len(list((ROOT / name).rglob("*.py"))) == 1}
    assert there - empty <= {line.split("/")[0] for line in tree.splitlines() if not line.startswith(" ")}


def test_exit_codes_in_the_documents_are_the_ones_of_the_code() -> None:
    text = " ".join((ROOT / "docs/packing.md").read_text().split())
    (said,) = re.findall(r"Exit codes: (.*?);", text)
    found = {int(code): words for code, words in re.findall(r"(\d+) ([^,]+)", said)}
    assert found.keys() == EXIT_CODES.keys()
    training = re.findall(r"^\| (\d+) \|", (ROOT / "docs/training.md").read_text(), re.M)
    # a training has no threshold of bad rows
    assert sorted(map(int, training)) == sorted((EXIT_CODES.keys() | {AFTER_CTRL_C}) - {3})


@pytest.mark.parametrize("path", sorted((ROOT / "jobs/pack").glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_are_valid(path: Path) -> None:
    assert load_config(path, [], PackFile).pack.output


RECIPES = sorted((ROOT / "jobs").glob("*/*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_preprocessors_of_recipes_exist(path: Path) -> None:
    """Comments included: they are what is copied."""
    load_preprocessors()
    for name in preprocessors_in(path.read_text()):
        assert name in PREPROCESSOR_REGISTRY, f"source_name: {name}"


def preprocessors_in(text: str) -> list[str]:
    return re.findall(r"source_name: *([^\s,}#]+)", text)


def test_the_preprocessors_are_found_in_the_recipes() -> None:
    """That the test before this one looks at something."""
    assert preprocessors_in("a: {source_name: x}  # b: {source_name: y-z, weight: 2}") == ["x", "y-z"]
    named = {path.stem: preprocessors_in(path.read_text()) for path in RECIPES}
    assert named["qwen3_30b_a3b"] == named["qwen3_omni_30b_a3b"] == ["plain_sft"]


def test_yaml_in_the_documents_is_valid(tmp_path: Path) -> None:
    (small,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/packing.md").read_text(), re.S)
    (tmp_path / "c.yaml").write_text(small)
    assert load_config(tmp_path / "c.yaml", [], PackFile).pack.manifest == "clips.jsonl"


def code_blocks(text: str) -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", text, re.S)
