"""Whether a request can ever be served, decided before it is queued, with the arithmetic in the message.

The last token of a sequence is sampled and never computed, so a sequence of L tokens needs KV for L - 1.
"""

from castline.engines.capacity import blocks_for
from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import EffectiveLimits
from castline.runtime.sampling_params import SamplingParams


def length_limit(prompt_len: int, params: SamplingParams, limits: EffectiveLimits) -> int:
    """Tokens, prompt included, at which a sequence ends with ``length``.

    A max_tokens past max_model_len ends at max_model_len; without max_tokens the text may fill the model's length or
    the whole KV pool, whichever is less.
    """
    longest = min(limits.max_model_len, limits.num_blocks * limits.block_size + 1)
    if params.max_tokens is None:
        return longest
    return min(prompt_len + params.max_tokens, longest)


def validate_fits(prompt_len: int, params: SamplingParams, limits: EffectiveLimits) -> None:
    """Raises RequestError for a prompt, or prompt and max_tokens, that model length or KV pool can never hold."""
    if prompt_len == 0:
        raise RequestError("the prompt is empty: it needs at least one token", field="prompt")
    _check_model_length(prompt_len, params, limits)
    _check_pool(prompt_len, params, limits)


def validate_places(num_prompts: int, n: int, limits: EffectiveLimits) -> None:
    """Raises RequestError for more continuations of one call than can ever run and wait."""
    if num_prompts * n > limits.num_places:
        prompts = f"{num_prompts} prompts with n {n} are {num_prompts * n} texts" if num_prompts > 1 else f"n is {n}"
        raise RequestError(
            f"{prompts}, and here {limits.max_num_seqs} may run and {limits.max_waiting} wait at a time: ask for at "
            f"most {limits.num_places}, or serve with a larger --max-waiting",
            field="n",
            code=ErrorCode.REQUEST_TOO_LARGE,
        )


def _check_model_length(prompt_len: int, params: SamplingParams, limits: EffectiveLimits) -> None:
    room_for_output = 0 if params.max_tokens == 0 else 1
    if prompt_len + room_for_output > limits.max_model_len:
        at_most = limits.max_model_len - room_for_output
        raise RequestError(
            f"the prompt has {prompt_len} tokens, and max_model_len is {limits.max_model_len}: a prompt may have at"
            f" most {at_most} tokens here; shorten it, or serve with a larger --max-model-len",
            field="prompt",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )


def _check_pool(prompt_len: int, params: SamplingParams, limits: EffectiveLimits) -> None:
    pool = f"the KV pool has {limits.num_blocks} blocks of {limits.block_size} tokens"
    needed = blocks_for(prompt_len, limits.block_size)
    if needed > limits.num_blocks:
        raise RequestError(
            f"the prompt has {prompt_len} tokens and needs {needed} KV blocks, and {pool}; shorten the prompt, or serve"
            " with a larger --kv-blocks",
            field="prompt",
            code=ErrorCode.REQUEST_TOO_LARGE,
        )
    if params.max_tokens is None:
        return
    longest = min(prompt_len + params.max_tokens, limits.max_model_len)
    needed = blocks_for(longest - 1, limits.block_size)
    if needed > limits.num_blocks:
        most = limits.num_blocks * limits.block_size + 1 - prompt_len
        raise RequestError(
            f"the prompt has {prompt_len} tokens; with max_tokens {params.max_tokens} it needs {needed} KV blocks, and"
            f" {pool}; ask for at most {most} tokens, or serve with a larger --kv-blocks",
            field="max_tokens",
            code=ErrorCode.REQUEST_TOO_LARGE,
        )
