"""The root command: what it lists, what it imports, how every error ends."""

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest
import typer

from jobs import cli
from schemas import errors

ROOT = Path(cli.__file__).parents[1]
HEAVY = ("av", "pyarrow", "ray", "torch", "streaming", "transformers", "matplotlib", "pydantic", "numpy")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=120, check=False
    )


def ended(error: Exception, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command that raises this."""
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise error

    module = module_from_spec(ModuleSpec("failing_command", None))
    module.app = failing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing_command", module)
    monkeypatch.setitem(cli.GROUPS, "doctor", ("failing_command", "x"))
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "doctor"])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def loaded(heavy: tuple[str, ...], *arguments: str) -> str:
    """Which of these packages a command has imported when it ends."""
    code = (
        f"import sys\nfrom jobs import cli\ntry:\n    cli.main({list(arguments)})\nexcept SystemExit: pass\n"
        f"print('LOADED', [name for name in {heavy} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return answer.stdout.splitlines()[-1]


def test_help_imports_nothing_heavy() -> None:
    assert loaded(HEAVY, "--help") == "LOADED []"


def test_what_starts_trainings_reads_its_configuration_and_nothing_heavy() -> None:
    """It waits beside its ranks for as long as they train."""
    heavy = tuple(name for name in HEAVY if name != "pydantic")
    assert loaded(heavy, "train", "lengths", "--help") == "LOADED []"


def test_help_lists_the_exit_codes() -> None:
    said = " ".join(run("--help").stdout.split())
    for code, meaning in errors.EXIT_CODES.items():
        assert f"{code} {meaning}" in said
    assert "130 Ctrl-C" in said


def test_help_lists_the_groups_that_are_there_and_only_those() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    there = {name for name, (module, _) in cli.GROUPS.items() if (ROOT / f"{module.replace('.', '/')}.py").exists()}
    assert {"demo", "doctor"} <= there
    for name in cli.GROUPS:
        assert (f"│ {name} " in answer.stdout) == (name in there), name


def test_every_listed_group_has_an_app() -> None:
    group = typer.main.get_command(cli.app)
    for name in group.list_commands(None):  # type: ignore[attr-defined]
        answer = run(name, "--help")
        assert answer.returncode == 0, answer.stderr
        assert f"omniloom {name}" in answer.stdout


def test_version() -> None:
    answer = run("--version")
    assert answer.returncode == 0
    assert answer.stdout.split()[:2] == ["omniloom", cli.installed_version().split()[0]]


@pytest.mark.parametrize(("typed", "meant"), [("demmo", "'demo'"), ("docter", "'doctor'")])
def test_an_unknown_command_names_the_nearest(typed: str, meant: str) -> None:
    answer = run(typed)
    assert answer.returncode == 2
    assert meant in answer.stderr and not answer.stdout


@pytest.mark.parametrize("kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)])
def test_every_error_is_one_line_and_its_own_exit_code(
    kind: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("missing_file", "clip.mp4") if kind is errors.RowError else kind("clips.jsonl:3: no such key")
    code = ended(error, monkeypatch)
    assert code == kind.exit_code and code in errors.EXIT_CODES and code != 0
    shown = capsys.readouterr()
    assert shown.err == f"error: {error}\n" and shown.out == ""


def test_several_faults_are_a_line_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(errors.ConfigError("a.yaml:1: one\na.yaml:2: two"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: a.yaml:1: one\nerror: a.yaml:2: two\n"


def test_system_errors_and_our_own_faults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(OSError(28, "No space left on device", "/data/x"), monkeypatch) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: '/data/x'\n"
    assert ended(ZeroDivisionError("division by zero"), monkeypatch) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "ZeroDivisionError: division by zero" in shown and "--traceback" in shown


def test_the_stack_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "0")
    ended(errors.ConfigError("wrong"), monkeypatch)
    assert "Traceback" not in capsys.readouterr().err
    ended(errors.ConfigError("wrong"), monkeypatch, "--traceback")
    assert "Traceback" in capsys.readouterr().err
    assert os.environ[cli.TRACEBACK_VARIABLE] == "1"


def test_traceback_may_stand_anywhere_before_two_dashes() -> None:
    assert cli._without_traceback_option(["pack", "run", "--traceback", "x", "--", "--traceback"]) == [
        "pack",
        "run",
        "x",
        "--",
        "--traceback",
    ]


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt(), monkeypatch) == 130  # type: ignore[arg-type]
    assert capsys.readouterr().err == "error: ended by Ctrl-C\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    shell = f"{sys.executable} -c 'from jobs import cli; cli.main([\"--help\"])' | true; echo ${{PIPESTATUS[0]}}"
    answer = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stderr == ""
    assert answer.stdout.strip() in ("0", "1")
