"""What every settings model is made of: the frozen base, limits that several of them share, and the error that names a setting."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ConfigError(Exception):
    """A setting that cannot be used: the dotted path, what is wrong with it and how to mend it."""

    def __init__(self, path: str, problem: str, fix: str) -> None:
        super().__init__(path, problem, fix)
        self.path, self.problem, self.fix = path, problem, fix

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. Fix: {self.fix}"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1)]
