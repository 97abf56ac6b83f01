"""What the service says, as messages of the wire."""

from collections.abc import Iterable

from cluster.messages import ModelInfo, Rule, TopLogprobs
from cluster.request import FinishReason
from cluster.text.stream import TextDelta
from cluster.tools.fields import EXACT_FIELDS, REFUSED_FIELDS
from deployments.answers import Answers
from protos import inference_pb2

FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
VERIFICATIONS = {
    Rule.COUPLED: inference_pb2.VERIFICATION_COUPLED,
    Rule.RATIO: inference_pb2.VERIFICATION_RATIO,
}


def chunk(index: int, delta: TextDelta, answers: Answers) -> inference_pb2.GenerateChunk:
    """A delta of answer `index`, which `answers` has taken in already."""
    message = inference_pb2.GenerateChunk(
        answer_index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        top_logprobs=_top_logprobs(delta.top_logprobs),
        prompt_logprobs=delta.prompt_logprobs,
        num_accepted=delta.num_accepted,
        num_steps=delta.num_steps,
    )
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
        message.seed = answers.each[index].seed
    if answers.finish_reason is not None:
        message.usage.CopyFrom(_usage(answers))
        message.speculation.CopyFrom(_speculation(answers))
    return message


def response(answers: Answers) -> inference_pb2.GenerateResponse:
    """All answers, which have ended."""
    return inference_pb2.GenerateResponse(
        answers=[
            inference_pb2.Answer(
                text=answer.text,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
                top_logprobs=_top_logprobs(answer.top_logprobs),
                finish_reason=FINISH_REASONS[answer.finish_reason],
                seed=answer.seed,
            )
            for answer in answers.each
            if answer.finish_reason is not None
        ],
        prompt_logprobs=answers.each[0].prompt_logprobs,
        usage=_usage(answers),
        speculation=_speculation(answers),
    )


def description(model: ModelInfo) -> inference_pb2.GetModelResponse:
    """What is served, and every field with how."""
    field = inference_pb2.Field
    exact = [field(name=name, support=field.SUPPORT_EXACT) for name in EXACT_FIELDS]
    refused = [field(name=name, support=field.SUPPORT_REFUSED) for name in REFUSED_FIELDS]
    return inference_pb2.GetModelResponse(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        drafters=model.drafters,
        bit_exact=not model.variant_operations,
        variant_operations=model.variant_operations,
        verification=VERIFICATIONS[Rule(model.verification)],
        fields=exact + refused,
    )


def _top_logprobs(positions: Iterable[TopLogprobs]) -> list[inference_pb2.TopLogprobs]:
    return [
        inference_pb2.TopLogprobs(
            token_ids=[token_id for token_id, _ in most_probable],
            logprobs=[logprob for _, logprob in most_probable],
        )
        for most_probable in positions
    ]


def _usage(answers: Answers) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=answers.num_prompt_tokens,
        completion_tokens=answers.num_tokens,
        total_tokens=answers.num_prompt_tokens + answers.num_tokens,
        cached_tokens=answers.each[0].num_cached_tokens,
    )


def _speculation(answers: Answers) -> inference_pb2.SpeculationStats:
    return inference_pb2.SpeculationStats(
        steps=sum(answer.num_steps for answer in answers.each),
        drafted=sum(answer.num_drafted for answer in answers.each),
        accepted=sum(answer.num_accepted for answer in answers.each),
    )
