"""What all sections of the configuration share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Gigabytes = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]  # of 10^9 bytes
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    """Base: no unknown key, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
