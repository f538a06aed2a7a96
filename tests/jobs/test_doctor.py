import json
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jobs import doctor, doctor_checks

Versions = Callable[[str], str]


def lacking(*names: str) -> Versions:
    """`importlib.metadata.version` of a machine without these packages."""
    real = doctor_checks.version

    def version(package: str) -> str:
        if package in names:
            raise PackageNotFoundError(package)
        return real(package)

    return version


def test_this_machine_is_ready_and_the_json_says_so() -> None:
    answer = CliRunner().invoke(doctor.app, ["--json"])
    checks = {check["name"]: check for check in json.loads(answer.stdout)}
    assert answer.exit_code == 0, checks
    assert {"Python", "Packages", "Streaming", "Decoders", "Memory", "Disk", "Ray", "GPU"} <= checks.keys()
    assert all(check["status"] in ("ok", "warn") for check in checks.values())
    assert "transformers 5" in checks["Streaming"]["found"]
    assert "h264" in checks["Decoders"]["found"].split()


def test_something_needed_that_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "version", lacking("soxr", doctor_checks.STREAMING))
    packages = doctor_checks.check_packages()
    assert packages.status == "fail" and "soxr is missing" in packages.found and "pip install" in packages.advice
    streaming = doctor_checks.check_streaming()
    assert (streaming.status, streaming.advice) == ("fail", doctor_checks.STREAMING_INSTALL)
    monkeypatch.setattr(doctor, "run_checks", lambda *_: iter([packages, doctor_checks.check_python()]))
    answer = CliRunner().invoke(doctor.app, [])
    assert answer.exit_code == 1
    assert "fail" in answer.stdout and "soxr is missing" in answer.stdout and "1 needed thing missing" in answer.stdout


def test_each_line_comes_when_its_check_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[tuple[str, str]] = []

    def slow() -> doctor_checks.Check:
        before.append(capsys.readouterr())
        return doctor_checks.Check("Streaming", "ok", "imports")

    planned = {"Python": lambda: doctor_checks.Check("Python", "ok", "3.11"), "Streaming": slow}
    monkeypatch.setattr(doctor, "planned_checks", lambda path: planned)
    doctor.doctor(as_json=False, path=Path())
    ((said, beside),) = before
    assert said.splitlines()[-1].split() == ["ok", "Python", "3.11"]
    assert beside == "checking Streaming takes seconds ...\n"
    after = capsys.readouterr().out
    assert after.splitlines()[0].split() == ["ok", "Streaming", "imports"] and "Ready to pack" in after
    doctor.doctor(as_json=True, path=Path())
    assert [check["name"] for check in json.loads(capsys.readouterr().out)] == ["Python", "Streaming"]


def test_checks_have_the_names_by_which_they_are_planned() -> None:
    planned = doctor.planned_checks(Path())
    begun: list[str] = []
    assert [check.name for check in doctor.run_checks(Path(), begun.append)] == list(planned) == begun


def test_what_this_machine_is_ready_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**statuses: doctor_checks.Status) -> list[doctor_checks.Check]:
        return [doctor_checks.Check(name, status, "x") for name, status in statuses.items()]

    unmet: dict[str, list[str]] = {"train": [], "convert": []}
    monkeypatch.setattr(doctor_checks, "unmet_requirements", lambda extra: (9, unmet[extra]))
    assert doctor.readiness(found(Python="ok", Disk="warn")) == ["Ready to pack, train and convert."]
    said = doctor.readiness(found(Packages="fail", Decoders="fail", Streaming="ok"))
    assert said == ["Ready to train and convert.", "Not ready to pack: Decoders, Packages."]
    unmet["train"] = ["psutil is missing"]
    said = doctor.readiness(found(Streaming="fail"))
    assert said == [
        "Ready to convert.",
        "Not ready to pack: Streaming.",
        "Not ready to train: Streaming, psutil is missing.",
    ]
    assert len(doctor.readiness(found(Python="fail"))) == 3
    unmet["train"] = []
    bare = doctor.readiness([doctor_checks.Check("GPU", "ok", doctor_checks.NO_GPU)])
    assert bare[1:] == ["Without a GPU, training is for tiny models, as that of the demo."]


def test_each_part_has_its_own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "version", lacking("av"))
    assert [doctor_checks.unmet_requirements(part)[1] for part in ("pack", "train", "convert")] == [
        ["av is missing"],
        [],
        [],
    ]


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_checks.version
    monkeypatch.setattr(doctor_checks, "version", lambda name: "10.0" if name == "av" else real(name))
    check = doctor_checks.check_packages()
    assert check.status == "fail" and check.found == "av 10.0 (needs >=15)"


def test_streaming_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = subprocess.CompletedProcess([], 1, "", "Traceback ...\nImportError: cannot import name 'BatchFeature'")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: broken)
    check = doctor_checks.check_streaming()
    assert check.status == "fail" and check.found.endswith("ImportError: cannot import name 'BatchFeature'")


def test_decoders_that_ffmpeg_was_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "NEEDED_DECODERS", ("h264", "aac", "no_such_codec"))
    assert doctor_checks.check_decoders().status == "warn"
    monkeypatch.setattr(doctor_checks, "VITAL_DECODERS", ("no_such_codec",))
    check = doctor_checks.check_decoders()
    assert check.status == "fail" and "no_such_codec" in check.advice and check.found == "2 of 3: h264 aac"
    monkeypatch.setattr(doctor_checks, "FILTERS", {"no_such_filter": "nothing"})
    assert doctor_checks.check_filters().found == "missing: no_such_filter (nothing)"


def test_ray_is_only_looked_for_where_an_address_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor_checks.check_ray().status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"ray://127.0.0.1:{port}", f"http://127.0.0.1:{port}", f"127.0.0.1:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert doctor_checks.check_ray().found.endswith(f"{address} answers")
    check = doctor_checks.check_ray()
    assert check.status == "fail" and "does not answer" in check.found and "unset RAY_ADDRESS" in check.advice


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor_checks.check_disk(tmp_path / "a" / "b")
    assert check.status == "ok" and check.found.endswith(f"free at {tmp_path}")
    monkeypatch.setattr(doctor_checks, "LOW_DISK", 2**70)
    assert doctor_checks.check_disk(tmp_path).status == "warn"


def test_little_memory_names_a_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_cgroup_limit", lambda: 4 * doctor_checks.GIB)
    monkeypatch.setattr(doctor_checks.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    check = doctor_checks.check_memory()
    assert check.status == "warn" and "pack.executor.workers to 1" in check.advice and "24 GiB" in check.advice


def test_advice_is_shown_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor_checks.Check("Stores", "warn", "x [y]", "pip install 'omniloom[cloud]'")
    monkeypatch.setattr(doctor, "run_checks", lambda *_: iter([check]))
    answer = CliRunner().invoke(doctor.app, [])
    assert "omniloom[cloud]" in answer.stdout and "x [y]" in answer.stdout


def test_the_command_is_there() -> None:
    assert isinstance(doctor.app, typer.Typer)
    answer = subprocess.run([sys.executable, "-m", "jobs.cli", "doctor", "--help"], capture_output=True, text=True)
    assert answer.returncode == 0 and "--json" in answer.stdout
