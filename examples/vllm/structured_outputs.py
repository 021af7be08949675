"""Constrain answers to a choice, a pattern, a schema, a grammar.

vLLM: examples/features/structured_outputs/structured_outputs_offline.py
"""

from enum import StrEnum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


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
    params = StructuredOutputsParams(**constraint)
    return SamplingParams(structured_outputs=params, max_tokens=64, temperature=0)


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
