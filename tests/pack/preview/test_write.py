"""The page of a dataset on disk, made by the real job."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from pack.config import PackConfig, PreviewConfig
from pack.job import run_job
from pack.preview import load
from pack.preview.page import write_preview
from pack.reader import PackedDataset
from schemas.errors import IncompleteSourceError, SchemaError

RARE = 33  # the only row with a transparent image


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows with a small image each in several partitions, from 4 sources, one of them rare; two rows are bad."""
    folder = tmp_path_factory.mktemp("dataset")
    for name, mode in (("plain.png", "RGB"), ("clear.png", "RGBA")):
        data = io.BytesIO()
        Image.new(mode, (40, 30), 0x80402010).save(data, "PNG")
        (folder / name).write_bytes(data.getvalue())
    rows = []
    for i in range(60):
        image = "absent.png" if i in (7, 50) else "clear.png" if i == RARE else "plain.png"
        turns = [{"from": "human", "value": f"<image>\nnumber {i}"}, {"from": "gpt", "value": "yes"}]
        source = "rare" if i == 44 else f"source{i % 3}"
        rows.append({"id": f"row{i:02d}", "source": source, "images": [image], "conversations": turns})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"manifest": str(folder / "rows.jsonl"), "output": str(folder / "packed"), "partition": {"target_mb": 4}}
    run_job(PackConfig.model_validate(config | {"executor": {"kind": "local", "workers": 1}}))
    return folder / "packed"


def shown_ids(page: Path) -> list[str]:
    return re.findall(r'<h3 id="s\d+-title">(row\d\d)</h3>', page.read_text())


def test_samples_of_every_kind_and_the_rejected_rows(packed: Path, tmp_path: Path) -> None:
    assert len(list((packed / "parts").iterdir())) > 3
    out = tmp_path / "deep" / "page.html"
    write_preview(str(packed), out, PreviewConfig(samples=6))
    shown = shown_ids(out)
    assert len(shown) == 6 and shown == sorted(shown)
    assert {f"row{RARE}", "row44"} <= set(shown)
    text = out.read_text()
    assert text.count("absent.png") >= 2 and "row07" in text and "row50" in text
    assert re.search(r"<b>2</b> <code>missing_file</code>", text)
    assert re.search(r"<dt>Rows</dt><dd>60</dd>", text) and re.search(r"<dt>Packed</dt><dd>58</dd>", text)
    assert not list(out.parent.glob(".*"))


def test_every_sample_shown_is_the_one_of_its_id(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_preview(str(packed), out, PreviewConfig(samples=200))
    shown = shown_ids(out)
    assert shown == [f"row{i:02d}" for i in range(60) if i not in (7, 50)]
    for article in out.read_text().split("<article ")[1:]:
        number = int(re.search(r'-title">row(\d\d)<', article)[1])  # type: ignore[index]
        assert f"\nnumber {number}<" in article


def test_the_page_is_the_same_every_time(packed: Path, tmp_path: Path) -> None:
    pages = [tmp_path / "a.html", tmp_path / "b.html"]
    for page in pages:
        write_preview(str(packed), page, PreviewConfig(samples=5))
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_few_rows_tables_are_read_unless_a_kind_is_missing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MOST_TABLES", 1)
    out = tmp_path / "page.html"
    write_preview(str(packed), out, PreviewConfig(samples=6))
    assert {f"row{RARE}", "row44"} <= set(shown_ids(out))


def test_a_copy_without_its_plan_and_without_its_index(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy, ignore=shutil.ignore_patterns("plan"))
    write_preview(str(copy), tmp_path / "page.html", PreviewConfig(samples=3))
    assert len(shown_ids(tmp_path / "page.html")) >= 3
    (copy / "dataset.json").unlink()
    with pytest.raises(IncompleteSourceError, match=r"dataset\.json does not exist; `omniloom pack merge`"):
        write_preview(str(copy), tmp_path / "no.html", PreviewConfig())
    assert not (tmp_path / "no.html").exists()


def test_a_damaged_sample_is_an_error_that_names_it(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    info, place = PackedDataset(str(copy)).locate(0)
    shard = copy / info.name
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff", place)
    data[at + 40] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SchemaError, match=rf"{re.escape(info.name)}.*crc"):
        write_preview(str(copy), tmp_path / "no.html", PreviewConfig(samples=200))
    assert not (tmp_path / "no.html").exists()
