"""What a scheduler could say of a request that waited for blocks, and was preempted once."""

from __future__ import annotations

from typing import Any

EXPLANATION: dict[str, Any] = {
    "id": "r-1",
    "object": "request.explanation",
    "prompts": [
        {
            "id": "r-1",
            "state": "running",
            "arrived_at": 1.0,
            "num_prompt_tokens": 640,
            "num_choices": 1,
            "first_token_s": 1.5,
            "ended_s": None,
            "error": None,
            "sequences": [
                {
                    "choice_index": 0,
                    "waits_for": None,
                    "waited_s": {"no_blocks": 1.25, "kv_answer": 0.0004},
                    "admissions": [
                        {
                            "at_s": 1.25,
                            "num_tokens": 640,
                            "num_blocks": 40,
                            "blocks": {"hit_device": 30, "evicted": 9, "tail_not_full": 1},
                        }
                    ],
                    "preemptions": [
                        {
                            "at_s": 2.0,
                            "why": "no_credit",
                            "kind": "swap",
                            "num_computed_tokens": 650,
                            "num_blocks": 41,
                            "num_swapped_blocks": 41,
                            "num_tokens_computed_again": 0,
                            "cost_s": 0.012,
                            "back_after_s": 0.4,
                        }
                    ],
                    "finish_reason": None,
                    "ended_s": None,
                }
            ],
        }
    ],
}
