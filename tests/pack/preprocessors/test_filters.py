"""Filters of the reward preprocessors: what they leave out is counted by reason, and what they keep can be scored."""

import json

import pyarrow.parquet as pq
import pytest

from pack.config import PackFile
from pack.job import check_threshold, retry_job, run_job
from pack.plan_file import load_plan
from pack.reader import PackedDataset
from pack.rejects import final_rejects, read_plan_commits
from pack.report import bad_ratio, bad_rows
from pack.storage import LocalStorage
from schemas.errors import FILTER_REASONS, REJECT_REASONS, ConfigError, DataThresholdError
from schemas.strict import load_config
from tests.pack.job_fakes import MEDIA, job_config, write_clips, write_manifest
from tests.pack.preprocessors.run import preprocess, rejected

AVQA = {
    "question_text": "What is heard?",
    "multi_choice": ["a horn", "rain"],
    "answer": 1,
    "question_relation": "Sound",
    "question_type": "Which",
    "videos": ["a.mp4"],
}
VIDEO_R1 = {
    "problem": "How many?",
    "problem_type": "numerical",
    "solution": "<answer>3</answer>",
    "data_type": "video",
    "path": "a.mp4",
    "data_source": "CLEVRER/train",
}


@pytest.mark.parametrize(
    ("name", "raw", "arguments"),
    [
        ("avqa", AVQA, {"types": "Which"}),
        ("avqa", AVQA, {"types": ["Happening", "which"], "relations": ["Sound", "Both"]}),
        ("avqa", {**AVQA, "data_source": "AVQA/val"}, {"source_prefixes": ["Music", "AVQA/"]}),
        ("avqa", {**AVQA, "source": "AVQA/val"}, {"source_prefixes": "AVQA/"}),
        ("avqa", {**AVQA, "audios": ["a.wav"]}, {"require_media": ["video", "audio"]}),
        ("video_r1", VIDEO_R1, {"types": ["numerical", "ocr"], "source_prefixes": "CLEVRER", "require_media": "video"}),
        ("Video-R1", VIDEO_R1, {"types": [], "source_prefixes": None}),
    ],
)
def test_wanted_rows_are_what_they_are_without_filters(name, raw, arguments):
    assert preprocess(name, raw, **arguments) == preprocess(name, raw)


@pytest.mark.parametrize(
    ("name", "raw", "arguments", "reason", "says"),
    [
        ("avqa", AVQA, {"types": ["Happening"]}, "filtered_type", "question_type is 'Which'; wanted: Happening"),
        ("avqa", AVQA, {"relations": "View"}, "filtered_type", "question_relation is 'Sound'; wanted: View"),
        ("avqa", {**AVQA, "question_type": None}, {"types": "Which"}, "filtered_type", "question_type is None"),
        ("avqa", AVQA, {"source_prefixes": "AVQA"}, "filtered_source", "the row has neither data_source nor source"),
        ("video_r1", VIDEO_R1, {"source_prefixes": ["STAR", "clevrer"]}, "filtered_source", "'CLEVRER/train' begins"),
        ("video_r1", VIDEO_R1, {"types": "ocr"}, "filtered_type", "problem_type is 'numerical'; wanted: ocr"),
        ("video_r1", {**VIDEO_R1, "problem_type": "essay"}, {"types": "ocr"}, "filtered_type", "is 'essay'"),
        ("video_r1", VIDEO_R1, {"require_media": ["video", "audio"]}, "filtered_media", "the row has 1 video; wanted"),
        ("avqa", {**AVQA, "videos": []}, {"require_media": "video"}, "filtered_media", "the row has no media"),
        # the filter comes first: a row that is not wanted is not called bad
        ("avqa", {**AVQA, "multi_choice": ["one"]}, {"types": "Happening"}, "filtered_type", "wanted"),
    ],
)
def test_other_rows_are_left_out_under_a_reason_of_their_own(name, raw, arguments, reason, says):
    error = rejected(name, raw, **arguments)
    assert (error.reason, error.stage) == (reason, "preprocess")
    assert says in error.detail


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"types": ["numeric"]}, "types has 'numeric'; did you mean 'numerical'? known: multiple choice, numerical"),
        ({"require_media": "videos"}, "require_media has 'videos'; did you mean 'video'?"),
        ({"types": 3}, "types is 3; it is a text or a list of texts"),
        ({"source_prefixes": ["a", ""]}, "it is a text or a list of texts"),
    ],
)
def test_a_filter_that_no_row_could_pass_is_an_error_and_not_a_filter(arguments, says):
    error = rejected("video_r1", VIDEO_R1, **arguments)
    assert error.reason == "preprocessor_failed"
    assert says in error.detail


def _rows():
    kinds = [("multiple choice", "B"), ("numerical", "1/4"), ("OCR", "STOP")]
    for i in range(12):
        kind, solution = kinds[i % 3]
        yield {
            "id": f"r{i}",
            "problem": f"Question {i}?",
            "problem_type": kind,
            "options": ["A. red", "B. blue"] if kind == "multiple choice" else [],
            "solution": f"<answer>{solution}</answer>",
            "data_source": f"{'NeXT' if i < 9 else 'STAR'}/part",
            "videos": [f"{i}.txt"],
        }


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Twelve rows of three kinds from two sources, packed with filters for kind and source."""
    folder = tmp_path_factory.mktemp("reward")
    write_clips(folder, 8)
    manifest = write_manifest(folder / "m.jsonl", list(_rows()))
    arguments = {"types": ["multiple choice", "numerical"], "source_prefixes": ["NeXT"]}
    config = job_config(
        manifest, folder / "out", source_name="video_r1", imports=[], preprocessor_args=arguments, rows={}
    )
    done, _ = run_job(config, MEDIA)
    return config, done.card


def test_filters_are_lists_in_the_file_and_on_the_command_line(tmp_path):
    text = "pack: {manifest: m, output: o, source_name: video_r1, preprocessor_args: {types: [ocr, numerical]}}"
    (tmp_path / "c.yaml").write_text(text)
    overrides = ["pack.preprocessor_args.require_media=[video, audio]"]
    config = load_config(tmp_path / "c.yaml", overrides, PackFile).pack
    assert config.preprocessor_args == {"types": ["ocr", "numerical"], "require_media": ["video", "audio"]}
    (tmp_path / "c.yaml").write_text(text.replace("[ocr, numerical]", "[[ocr]]"))
    with pytest.raises(ConfigError, match=r"preprocessor_args\.types"):
        load_config(tmp_path / "c.yaml", [], PackFile)


def test_what_is_left_out_is_counted_by_reason_and_is_no_bad_row(packed):
    config, card = packed
    # r0 r1 r3 r4 r6 r7 pass; r2 r5 r8 r11 are ocr; r9 r10 come from STAR
    assert card.totals.rejected == {"filtered_source": 2, "filtered_type": 4}
    assert (card.totals.rows_in, card.totals.rows_packed) == (12, 6)
    assert bad_rows(card) == (0, 6)
    assert bad_ratio(card) == 0
    check_threshold(card, config)


def test_bad_rows_are_still_measured_against_what_was_wanted(packed):
    config, card = packed
    totals = card.totals.model_copy(update={"rejected": {"filtered_type": 9, "missing_file": 1}, "rows_packed": 2})
    worse = card.model_copy(update={"totals": totals})
    assert bad_ratio(worse) == pytest.approx(1 / 3)
    with pytest.raises(DataThresholdError, match="1 of 3 rows were rejected"):
        check_threshold(worse, config)


def test_filtered_rows_are_tried_again_only_by_name(packed):
    config, _ = packed
    assert retry_job(config, media=MEDIA)[1] == 0
    done, count = retry_job(config, ["filtered_source"], media=MEDIA)
    assert count == 2
    assert done.card.totals.rejected == {"filtered_source": 2, "filtered_type": 4}
    storage = LocalStorage(config.output)
    plan = load_plan(storage)
    found = {reject.id: reject for reject in final_rejects(storage, plan, read_plan_commits(storage, plan))}
    assert found["r9"].reason == "filtered_source"
    assert "'STAR/part' begins with none of NeXT" in found["r9"].detail
    assert REJECT_REASONS.keys() >= FILTER_REASONS


def test_labels_choices_and_scoring_reach_the_packed_row(packed):
    """Both ways of reading it back: the shard's meta column and the rows table."""
    config, _ = packed
    samples = {sample.meta.id: sample.meta for sample in PackedDataset(config.output)}
    assert samples.keys() == {"r0", "r1", "r3", "r4", "r6", "r7"}
    assert samples["r0"].extra == {
        "choices": ["red", "blue"],
        "answer": "B",
        "answer_text": "blue",
        "scoring": "multiple_choice",
        "question": "Question 0?",
        "problem_type": "multiple choice",
        "data_source": "NeXT/part",
    }
    assert samples["r1"].extra["scoring"] == "numerical"
    assert samples["r1"].extra["answer_value"] == 0.25
    tables = [pq.read_table(path) for path in LocalStorage(config.output).local_path("parts").glob("*/rows.parquet")]
    metas = [json.loads(meta) for table in tables for meta in table.column("meta").to_pylist()]
    assert {meta["id"]: meta["extra"] for meta in metas} == {key: meta.extra for key, meta in samples.items()}
