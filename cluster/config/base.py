"""What every section of the configuration is made of."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

BUILTIN_MODEL = "smollm2-135m-instruct"

DType = Literal["float32", "int8", "bfloat16", "float16"]
Resources = dict[str, float]


class Config(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid")
