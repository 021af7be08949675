"""Constrain answers by the older names of structured outputs.

vLLM: examples/offline_inference/structured_outputs.py
"""

from enum import StrEnum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams


class CarType(StrEnum):
    sedan = "sedan"
    suv = "SUV"


class CarDescription(BaseModel):
    brand: str
    car_type: CarType


SIMPLE_GRAMMAR = """
    root ::= "SELECT " column " FROM table_1"
    column ::= "col_1" | "col_2"
"""


def sampling_params(**constraint) -> SamplingParams:
    params = GuidedDecodingParams(**constraint)
    return SamplingParams(guided_decoding=params, max_tokens=64, temperature=0)


def main():
    llm = LLM(model="demo", max_model_len=256)
    schema = CarDescription.model_json_schema()
    schema["properties"]["brand"]["maxLength"] = 8
    constraints = [
        {"choice": ["Positive", "Negative"]},
        {"regex": r"\w{3,8}@\w{3,8}\.com\n"},
        {"json": schema},
        {"grammar": SIMPLE_GRAMMAR},
    ]
    for constraint in constraints:
        [output] = llm.generate("Classify: vLLM is wonderful!", sampling_params(**constraint))
        print(f"{list(constraint)[0]}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
