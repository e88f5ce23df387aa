"""Which parameters of a request count, which are ignored, and which are refused.

What this endpoint cannot do is refused by name when it is asked for, and let pass when it says
what holds anyway. What changes nothing about the text is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edgespec.endpoint.errors import invalid
from edgespec.endpoint.fields import shown

COMMON: Final = frozenset(
    "model stream stream_options n stop seed max_tokens temperature top_p logit_bias logprobs"
    " prompt_cache_key frequency_penalty presence_penalty response_format grammar regex"
    # Not OpenAI's: those of the servers that people have at home.
    " top_k min_p repetition_penalty stop_token_ids ignore_eos".split()
)
CHAT: Final = COMMON | frozenset(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls"
    " chat_template_kwargs".split()
)
COMPLETION: Final = COMMON | {"prompt"}
IGNORED: Final = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_retention"
    " prediction cache_prompt request_id priority".split()
)
"""They say who asks, where to file it or how to be quick; the text is the same."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "prompt_logprobs": (0,),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tfs_z": (1,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Not supported, with the values that ask for nothing; so does null."""


def check_names(data: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises ``ApiError`` naming the first parameter that would matter and is not supported."""
    for name, value in data.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in NEUTRAL:
            raise invalid(name, f"unknown parameter {shown(name)}", "unknown_parameter")
        # 1 == True in Python, but not in JSON.
        if not any(value == one and type(value) in (type(one), float) for one in NEUTRAL[name]):
            raise invalid(
                name,
                f"{name} is {shown(value)}, but {name} is not supported",
                "unsupported_parameter",
            )
