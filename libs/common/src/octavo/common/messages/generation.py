"""The gateway-scheduler hop: requests in, tokens out. See proto/octavo/v1/scheduler_service.proto."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.common.messages.token_rules import TokenRules


class FinishReason(enum.IntEnum):
    """Why a choice ended."""

    STOP = 1  # an end-of-sequence id, or one of `stop_token_ids`, was sampled
    LENGTH = 2  # max_tokens, or the model's length, was reached
    ABORT = 3  # the gateway asked for it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, with every default already filled in."""

    max_tokens: int
    """Output tokens per choice, at least 1. Prompt and output together fit the model's length."""
    n: int = 1
    """Choices, all of one prompt."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities reach this sum. In (0, 1]; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    seed: int = 0
    """Fixed by the gateway, uint64. Draws depend on (seed, choice, position) only."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a choice, also with `ignore_eos`."""
    ignore_eos: bool = False
    """Do not end at the model's own end-of-sequence ids."""
    num_logprobs: int | None = None
    """Most likely tokens to report beside each sampled one; None reports nothing."""
    beam_width: int = 0
    """0 samples; otherwise beam search of this width, whose `n` best answers come when it has ended."""
    length_penalty: float = 1.0
    """Beam scores are divided by (output length) ** length_penalty."""
    early_stopping: bool = False
    """Beam search ends as soon as there are `beam_width` finished beams, not when none can become better."""
    rules: TokenRules | None = None
    """What changes logits before a token is drawn; None for nothing."""
    num_prompt_logprobs: int | None = None
    """Most likely tokens to report beside each prompt token but the first; None reports nothing."""


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A place in another request's choice, live or kept, from which a new request goes on."""

    request_id: str
    choice_index: int
    num_tokens: int | None
    """Leading tokens of prompt and output that are shared; None takes all there are."""


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that goes on where another scheduler left it."""

    choice_index: int
    output_token_ids: tuple[int, ...]
    """At least one, fewer than `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, or one that another scheduler was serving. `request_no` names it on this stream and is not used
    again."""

    request_no: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: bytes = b""
    """Prefix blocks are shared only between equal salts."""
    priority: int = 0
    """Lower is served first, and preempted last."""
    branch: BranchPoint | None = None
    """The prompt goes on from there; `prompt_token_ids`, which may then be empty, come after the shared tokens."""
    keep_s: float = 0.0
    """Seconds for which the choices can be branched from after they have ended."""
    traceparent: str = ""
    """W3C trace context of the request; empty if it is not traced."""
    resumed: tuple[ResumedChoice, ...] = ()
    """Choices that have tokens and have not ended; all others have ended. Empty for a request that begins."""
    tenant: str = ""
    """Tenants of equal priority take turns, each for the first of its requests that wait."""
    weight: int = 1
    """At least 1: turns that the tenant has for each one of a tenant of weight 1."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request, or one choice of it. Unknown and finished requests are ignored."""

    request_no: int
    choice_index: int | None = None
    num_output_tokens: int | None = None
    """With a choice whose text has come to its end: so many of its tokens count, and `keep_s` keeps it up to there."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Gives up what `keep_s` keeps of a request, or would keep. Unknown ids, and ids of other salts, are ignored."""

    request_id: str
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Explain:
    """Asks what happened to a request, of this gateway or another, live or ended."""

    query_no: int
    """Comes back with the answer."""
    request_id: str
    """If a gateway made several requests of one, `ID-0`, `ID-1` and so on, `ID` stands for all of them."""
    salt_head: bytes = b""
    """Only a request whose salt begins so is told of."""


GatewayMessage = Submit | Abort | Forget | Explain


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway must know of the model to check requests."""

    model_name: str
    max_model_len: int
    """Prompt and output tokens that one sequence may hold, also limited by the block pool."""
    vocab_size: int
    """Rows of the embedding: token ids are 0 to vocab_size - 1."""
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    block_size: int

    def has_tokens_of(self, other: ModelInfo) -> bool:
        """Token ids mean the same to both."""
        ours = (self.model_name, self.vocab_size, self.eos_token_ids)
        return ours == (other.model_name, other.vocab_size, other.eos_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's logits before temperature and filters."""

    sampled: float
    """Log-probability of the sampled token."""
    top_token_ids: tuple[int, ...]
    """Most likely first."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, each given those before it."""

    start: int
    """Index of the first in the prompt, at least 1."""
    logprobs: list[float]
    ranks: list[int]
    """1 is the most likely of the vocabulary."""
    num_top: int
    top_token_ids: list[int]
    """`num_top` for each, best first."""
    top_logprobs: list[float]

    def after(self, num_skipped: int) -> PromptLogprobs:
        """Without the first ones."""
        first_top = num_skipped * self.num_top
        return PromptLogprobs(
            self.start + num_skipped,
            self.logprobs[num_skipped:],
            self.ranks[num_skipped:],
            self.num_top,
            self.top_token_ids[first_top:],
            self.top_logprobs[first_top:],
        )


@dataclass(slots=True)
class SampledToken:
    """One token of one choice. Tokens of a choice come in order. Not frozen: one is made for every token, and freezing
    doubles the cost."""

    request_no: int
    choice_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last word on a choice, after its last token."""

    request_no: int
    choice_index: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The entry of `stop_token_ids` that ended it; None for end-of-sequence and the other reasons."""


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The prompt has its blocks for the first time."""

    request_no: int
    num_cached_tokens: int
    """Prompt tokens that need no computing: found in the prefix cache, or shared with the branch point."""
    num_prompt_tokens: int = 0
    """Length of the prompt, with the tokens shared with a branch point."""
    shared_token_ids: tuple[int, ...] = ()
    """Those shared tokens: with them the request can be submitted again without the branch."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request, with all its choices, ends in an error."""

    request_no: int
    reason: str
    """Reason of an `OctavoError` class, see `octavo.common.errors`."""
    message: str


@dataclass(slots=True)
class TokenBatch:
    """Everything that one step brought for one gateway. Not frozen: one is made for every step."""

    started: list[RequestStarted] = field(default_factory=list)
    request_nos: list[int] = field(default_factory=list)
    """Of each token; the tokens are in columns, since a step brings one for every sequence."""
    choice_indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By the token's place, of those that were asked for."""
    finished: list[ChoiceFinished] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    """(request_no, what became known); the whole prompt's are there before its first token."""

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """One object for each token."""
        tokens = tuple(map(SampledToken, self.request_nos, self.choice_indexes, self.token_ids))
        for place, logprobs in self.logprobs.items():
            tokens[place].logprobs = logprobs
        return tokens

    def add(self, request_no: int, choice_index: int, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Append one token."""
        if logprobs is not None:
            self.logprobs[len(self.token_ids)] = logprobs
        self.request_nos.append(request_no)
        self.choice_indexes.append(choice_index)
        self.token_ids.append(token_id)


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Sent when a stream opens and whenever it changes: can requests be served, and by which model."""

    ready: bool
    reason: str
    """Why not ready, for people; empty when ready."""
    model: ModelInfo | None
    """None until a worker has told it."""
    is_draining: bool = False
    """It ends what it can, and wants no new requests; what is left when the stream ends is for the next scheduler."""
    pool_id: str = ""
    """The block pool that it serves."""
    epoch: int = 0
    """Fencing number: of two schedulers of one pool, the one with the lower has been replaced."""


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """What a scheduler has to do, for gateways that choose among several."""

    num_waiting: int = 0
    """Sequences without blocks."""
    num_waiting_tokens: int = 0
    """Tokens that these must compute at most: what the prefix cache has of them is not known yet."""
    num_running: int = 0
    """Sequences with blocks and a slot."""
    max_num_running: int = 0
    num_blocks: int = 0
    num_available_blocks: int = 0
    """Those that an admission can have: free, or cached in no table."""
    prefill_tokens_per_s: float = 0.0
    """As measured; 0 if that is not known yet."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The answer to an `Explain`."""

    query_no: int
    explanation: bytes
    """JSON object, UTF-8, without what tells of other tenants; empty if the request is unknown or forgotten."""


SchedulerMessage = SchedulerStatus | SchedulerLoad | TokenBatch | Explained
