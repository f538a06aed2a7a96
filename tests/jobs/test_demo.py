"""The demo, run once as a user runs it; then what it says, and what is in the shards, against what the clips are."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from pack.reader import PackedDataset
from schemas.sample import PackedSample
from tests.browser import Page, find_chromium
from tests.environment import ROOT, environment

pytestmark = pytest.mark.timeout(1000)  # the demo trains: minutes where other work runs beside it
PACKED = ["bunny", "bunny-narrated", "phone", "lesson", "lesson-slide-3", "clock"]
PACKED += ["austen", "burrow", "picture-and-voice", "text-only"]


def omniloom(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    variables = environment(COLUMNS="160")
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=900, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder in which `omniloom demo` ran, what it printed)."""
    folder = tmp_path_factory.mktemp("demo")
    answer = omniloom("demo", cwd=folder)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder, answer.stdout


@pytest.fixture(scope="module")
def samples(demo: tuple[Path, str]) -> dict[str, PackedSample]:
    return {sample.meta.id: sample for sample in PackedDataset(str(demo[0] / "demo_out/packed"))}


def loudness(sound: bytes, start_s: float, end_s: float) -> float:
    data, rate = soundfile.read(io.BytesIO(sound))
    return float(np.sqrt(np.mean(data[int(start_s * rate) : int(end_s * rate)] ** 2)))


def test_it_says_step_by_step_what_it_does(demo: tuple[Path, str]) -> None:
    steps = re.findall(r"^(\d)/9 (\w+) .*  \d+\.\d s$", demo[1], re.M)
    names = ["clips", "plan", "pack", "verify", "preview", "train", "resume", "convert", "reload"]
    assert steps == [(str(number), name) for number, name in enumerate(names, 1)]
    assert "11 rows -> 10 samples, 1 rejected; 2 processes" in demo[1]
    assert demo[1].startswith("omniloom demo: ")


def test_long_steps_say_what_they_begin_and_what_they_do(demo: tuple[Path, str]) -> None:
    lines = demo[1].splitlines()
    for step in ("3/9 pack", "5/9 preview", "6/9 train", "7/9 resume", "8/9 convert", "9/9 reload"):
        begun, ended = (number for number, line in enumerate(lines) if line.startswith(step))
        assert lines[begun].endswith(" ...")
        between = lines[begun + 1 : ended]
        assert len(between) < 20 and all(re.match(r" {4}\S", line) for line in between)
        assert bool(between) == (step not in ("3/9 pack", "5/9 preview"))
        if step in ("6/9 train", "7/9 resume"):
            assert any(re.match(r" +step \d+ of 12, loss ", line) for line in between), between


def test_it_stops_resumes_and_learns(demo: tuple[Path, str]) -> None:
    stopped = re.search(r"2 processes, stopped by SIGTERM after step (\d+), saved, exit code 5", demo[1])
    ended = re.search(r"to step (\d+); loss ([\d.]+) -> ([\d.]+)", demo[1])
    assert stopped and ended
    assert 4 <= int(stopped[1]) < int(ended[1]) == 12
    assert float(ended[3]) < float(ended[2]) - 0.5
    lines = (demo[0] / "demo_out/training/metrics.jsonl").read_text().splitlines()
    steps = [values["step"] for values in map(json.loads, lines) if "loss" in values]
    assert steps == list(range(1, 13))  # none twice, none left out


def test_its_weights_go_through_every_format_and_back(demo: tuple[Path, str]) -> None:
    assert re.search(r"back: \d{3} tensors, every one bit for bit the same", demo[1])
    agreed = re.search(r"transformers agrees in (\d+) modules .* logits differ by ([\de.+-]+); it says '", demo[1])
    assert agreed
    assert int(agreed[1]) > 100
    assert float(agreed[2]) < 1e-5
    assert (demo[0] / "demo_out/training/metrics.html").is_file()


def test_it_says_what_became_of_every_row(demo: tuple[Path, str]) -> None:
    rows = re.findall(r"^(\d+) +([\w-]+) +(packed|rejected) +(\S.*)$", demo[1], re.M)
    manifest = [json.loads(line)["id"] for line in (ROOT / "jobs/assets/demo.jsonl").read_text().splitlines()]
    assert [(int(row), name) for row, name, _, _ in rows] == list(enumerate(manifest))
    outcomes = {name: (outcome, what) for _, name, outcome, what in rows}
    assert [name for name, (outcome, _) in outcomes.items() if outcome == "packed"] == PACKED
    assert outcomes["broken"][0] == "rejected" and outcomes["broken"][1].startswith("unreadable_container: ")


def test_it_says_where_everything_is_and_all_of_that_works(demo: tuple[Path, str]) -> None:
    folder, said = demo
    page = re.search(r"^look +file://(\S+)", said, re.M)
    assert page and Path(page[1]).is_file()
    assert (folder / "demo_out/packed/index.json").is_file()
    commands = re.findall(r"^(?:as files|rejected|again|compare) +(\S.+)$", said, re.M)
    assert len(commands) == 4
    for command in commands:  # as it is printed
        answer = subprocess.run(
            shlex.split(command), cwd=folder, env=environment(), capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
    assert (folder / "demo_out/files/bunny/video0.wav").is_file()


def test_a_second_run_finds_everything_done(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    before = {p: p.stat().st_mtime_ns for p in (folder / "demo_out/packed/parts").rglob("*") if p.is_file()}
    answer = omniloom("demo", cwd=folder)
    assert answer.returncode == 0 and "the same as before" in answer.stdout and "nothing to do" in answer.stdout
    assert before == {p: p.stat().st_mtime_ns for p in (folder / "demo_out/packed/parts").rglob("*") if p.is_file()}


def test_the_late_speech_starts_where_the_file_says(samples: dict[str, PackedSample]) -> None:
    video, meta = samples["bunny-narrated"].videos[0], samples["bunny-narrated"].meta.videos[0]
    assert meta.audio is not None and video.audio is not None
    assert meta.audio.start_s == pytest.approx(1.2, abs=0.06)
    assert loudness(video.audio, 0, 1.1) == 0 and loudness(video.audio, 1.25, 4.0) > 0.02


def test_speech_beyond_half_a_minute_is_whole(samples: dict[str, PackedSample]) -> None:
    video, meta = samples["lesson"].videos[0], samples["lesson"].meta.videos[0]
    assert meta.audio is not None and video.audio is not None
    assert meta.audio.duration_s == pytest.approx(41.8, abs=0.1) and len(video.frames) == 84
    assert min(loudness(video.audio, s, s + 4) for s in range(0, 40, 4)) > 0.01


def test_a_span_is_cut_out_of_the_same_sound(samples: dict[str, PackedSample]) -> None:
    span, whole = samples["lesson-slide-3"].videos[0].audio, samples["lesson"].videos[0].audio
    assert span is not None and whole is not None
    part, everything = soundfile.read(io.BytesIO(span))[0], soundfile.read(io.BytesIO(whole))[0]
    assert len(part) == pytest.approx(7.9 * 16000, abs=160)
    middle = part[16000:32000]
    begin = int(19.6 * 16000) - 400
    found = np.correlate(everything[begin : begin + 16800], middle, "valid")
    at = int(found.argmax())
    assert at == pytest.approx(400, abs=160)
    assert np.corrcoef(everything[begin + at :][:16000], middle)[0, 1] > 0.99


def test_the_phone_clip_is_upright_and_the_clock_is_silent(samples: dict[str, PackedSample]) -> None:
    phone = samples["phone"].meta.videos[0]
    assert phone.height > phone.width and {"rotated", "vfr"} <= set(phone.flags) and phone.origin.rotation == 90
    top = np.asarray(Image.open(io.BytesIO(samples["phone"].videos[0].frames[0])).convert("RGB"), dtype=float)
    grass, shade = top[-60:].mean(axis=(0, 1)), top[:60].mean(axis=(0, 1))
    assert grass[1] > grass[2] + 20 and grass.sum() > shade.sum()  # the meadow is at the bottom
    clock = samples["clock"]
    assert clock.videos[0].audio is None and clock.meta.videos[0].audio is None


def test_sound_image_and_text_rows(samples: dict[str, PackedSample]) -> None:
    assert samples["austen"].meta.audios[0].duration_s == pytest.approx(7.1, abs=0.1)
    assert loudness(samples["austen"].audios[0], 0.5, 6.5) > 0.02
    both = samples["picture-and-voice"]
    assert (len(both.images), len(both.audios), len(both.videos)) == (1, 1, 0)
    assert samples["text-only"].meta.media_bytes == 4


def test_streaming_dataset_reads_the_shards(demo: tuple[Path, str]) -> None:
    script = (
        "import sys\nfrom streaming import StreamingDataset\nfrom schemas.sample import from_columns\n"
        "print(sorted(from_columns(c).meta.id for c in StreamingDataset(local=sys.argv[1], batch_size=1)))"
    )
    command = [sys.executable, "-c", script, str(demo[0] / "demo_out/packed")]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    assert answer.stdout.splitlines()[-1] == str(sorted(PACKED))


def test_the_manifest_tells_the_truth_about_its_files() -> None:
    assets = ROOT / "jobs/assets"
    rows = [json.loads(line) for line in (assets / "demo.jsonl").read_text().splitlines()]
    named = {
        m if isinstance(m, str) else m["path"]
        for r in rows
        for k in ("videos", "audios", "images")
        for m in r.get(k, [])
    }
    there = {p.name for p in assets.iterdir()} - {
        "README.md",
        "demo.jsonl",
        "make_assets.sh",
        "make_tokenizer.py",
        "tiny_pseudo_vl",
        "tiny_qwen3_omni",
        "tokenizer",
    }
    assert named == there
    readme = (assets / "README.md").read_text()
    script = (assets / "make_assets.sh").read_text()
    assert all(f"`{name}`" in readme and name in script for name in there)
    assert sum(p.stat().st_size for p in assets.iterdir()) < 3e6
    subprocess.run(["bash", "-n", str(assets / "make_assets.sh")], check=True)


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium; whoever has one runs `pytest -m browser`")
def test_the_page_shows_and_plays_it(demo: tuple[Path, str], tmp_path: Path) -> None:
    with Page(tmp_path) as page:
        page.open(demo[0] / "demo_out/preview.html")
        players = "[...document.querySelectorAll('audio')]"
        page.wait_for(lambda: page.evaluate(f"{players}.every((a) => a.readyState >= 1 || a.error)"))
        durations = page.evaluate(f"{players}.map((a) => a.duration)")
        assert durations == pytest.approx([5.31, 4.76, 3.41, 41.81, 7.9, 7.1, 7.1], abs=0.03)
        pictures = page.evaluate("[...document.images].map((i) => i.naturalWidth)")
        assert len(pictures) == 11 * 3 + 16 * 2 + 8 + 6 + 2 and min(pictures) > 0
        assert (page.complaints(), page.requests()) == ([], [])
