import dataclasses
import enum


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """With the defaults of vLLM."""

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: list = dataclasses.field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
