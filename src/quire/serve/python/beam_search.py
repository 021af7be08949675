"""`LLM.beam_search`: vLLM's names for a search that runs inside the scheduler (P 4.4)."""

from dataclasses import dataclass, field

from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search."""

    beam_width: int  # number of beams, all of which are returned
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True, False or "never"
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None  # constraint on each beam

    def sampling_params(self) -> SamplingParams:
        """Return the same search as parameters of `generate`."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=self.structured_outputs,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # prompt and output
    cum_logprob: float  # before the length penalty
    text: str  # of the output
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

    @classmethod
    def of(cls, output: RequestOutput) -> "BeamSearchOutput":
        prompt = output.prompt_token_ids or []
        return cls(
            [
                BeamSearchSequence(
                    prompt + beam.token_ids,
                    beam.cumulative_logprob or 0.0,
                    beam.text,
                    beam.finish_reason,
                    beam.stop_reason,
                )
                for beam in output.outputs
            ]
        )
