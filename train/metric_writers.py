"""Where metrics go: metrics.jsonl always, TensorBoard and Weights & Biases if asked for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from convert.output import write_atomic
from convert.small_files import read_object
from schemas.errors import ConfigError, OmniloomError
from train.config import LoggingConfig

METRICS_FILE = "metrics.jsonl"
WANDB_FILE = "wandb.json"


class MetricWriter(Protocol):
    """Takes the metrics of a log line."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """metrics: name -> number or text."""

    def close(self) -> None:
        """No more is coming."""


def open_writers(
    output_dir: Path, logging: LoggingConfig, start_step: int, config: Mapping[str, Any], *, evaluated: bool = True
) -> list[MetricWriter]:
    """Of rank 0. start_step: after which training goes on; what an earlier run wrote of later steps is taken back, and
    the evaluation of this one unless it was `evaluated`, for then it comes again. config: of the run, noted in Weights
    & Biases. ConfigError when a package is missing."""
    writers: list[MetricWriter] = [JsonlWriter(output_dir / METRICS_FILE, start_step, evaluated=evaluated)]
    if logging.tensorboard:
        writers.append(TensorBoardWriter(output_dir / "tensorboard", start_step))
    if logging.wandb.enable:
        writers.append(WandbWriter(output_dir, logging.wandb.project, logging.wandb.name, config))
    return writers


def check_packages(logging: LoggingConfig) -> None:
    """ConfigError when a package is missing that `open_writers` needs."""
    if logging.tensorboard:
        _import("tensorboard", "train.logging.tensorboard")
    if logging.wandb.enable:
        _import("wandb", "train.logging.wandb.enable")


class JsonlWriter:
    """One JSON object per line, on disk as soon as it is written. A number that JSON does not have is a text: "nan",
    "inf", "-inf"."""

    def __init__(self, path: Path, start_step: int, *, evaluated: bool = True) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _take_back(path, start_step, evaluated=evaluated)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        line = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OmniloomError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Events below output_dir/tensorboard."""

    def __init__(self, folder: Path, start_step: int) -> None:
        _import("tensorboard", "train.logging.tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """One run of Weights & Biases, the same one after a resume."""

    def __init__(self, output_dir: Path, project: str, name: str | None, config: Mapping[str, Any]) -> None:
        wandb = _import("wandb", "train.logging.wandb.enable")
        file = output_dir / WANDB_FILE
        identity = read_object(file).get("id") if file.is_file() else None
        self._run = wandb.init(
            project=project, name=name, id=identity, resume="allow", dir=str(output_dir), config=dict(config)
        )
        write_atomic(file, json.dumps({"id": self._run.id}).encode())

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in metrics.items() if isinstance(value, int | float)}, step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, [] when there is none; a last one that a kill cut off is left out."""
    return list(_lines(path)) if path.is_file() else []


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield line


def _take_back(path: Path, start_step: int, *, evaluated: bool) -> None:
    """A new training puts an earlier one's file aside; one that goes on drops the lines of steps it takes again, and of
    an evaluation it makes again."""
    lines = read_metrics(path)
    if start_step == 0 and lines:
        number = 1
        while (aside := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
        return
    again = set[int]() if evaluated else {start_step}
    kept = [line for line in lines if line["step"] <= start_step and not (line["step"] in again and _evaluates(line))]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def _evaluates(line: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in line)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _import(package: str, key: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{key}: needs the package {package}, which cannot be imported ({error})") from None
