"""The one interface of every model: a `Request` goes in, `Completion`s come out.

The policy, the simulated user and the judge are all models. A backend says what it can do in `Abilities`;
asking for more raises `UserError` before any work. A failed call raises `ModelCallError` with a reason; it is never
an empty string.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, Tools
from upshot.core.errors import UserError
from upshot.core.helper import Helper


class ModelCallError(Exception):
    """A call that gave no completion after all retries; `reason` is short, countable and stable."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        """timeout, rate_limited, connection, http_500, bad_response, refused …"""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a model: messages, or the exact token ids to continue."""

    prompt: Sequence[Message] | Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    schema: Mapping[str, Any] | None = None
    """JSON schema that the text must follow, if the backend can enforce it."""
    tools: Tools = ()
    """OpenAI tool definitions."""
    role: str = ""
    """Who speaks (policy, user, judge …): calls, cost and latency are counted by role."""
    top_logprobs: int = 0
    given: int = 0
    """The number of last ids of the prompt whose log-probabilities the only completion holds; nothing is sampled
    (`Model.logprobs`)."""
    lark: str = ""
    """Rules that the text must follow, in llguidance's Lark; only a model in this process enforces them."""

    @property
    def by_ids(self) -> bool:
        """Whether the prompt is token ids."""
        return bool(self.prompt) and isinstance(self.prompt[0], int)

    def with_seed(self, seed: int) -> Request:
        """The same request with another seed."""
        return replace(self, sampling=replace(self.sampling, seed=seed))


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation."""

    text: str
    finish: str
    """stop, length, or tool_calls."""
    ids: tuple[int, ...] | None = None
    """Sampled ids, including the end-of-turn token; None if the backend does not report them."""
    logprobs: tuple[float, ...] | None = None
    """For each of `ids`: log softmax(logits / temperature), before top-k/top-p/min-p cuts."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """US dollars, if known."""
    version: int = 0
    """Version of the weights (in process)."""
    cached: bool = False
    """Whether it came from the response cache."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can do."""

    ids_in: bool = False
    """Takes token ids as a prompt."""
    ids_out: bool = False
    """Returns sampled ids and log-probabilities."""
    schema: bool = False
    """Enforces a JSON schema."""
    lengths: bool = False
    """Also enforces the lengths of texts in it, so that an object can be made to fit."""
    tools: bool = False
    seed: bool = False
    """The same request with the same seed gives the same completion."""
    scores: bool = False
    """Reports the log-probabilities of given ids."""


class Model(Helper, ABC):
    """A model that continues text."""

    name: str
    abilities: Abilities = Abilities()
    no_schema: str = ""
    """Why it does not enforce JSON schemas, if something can be done about that."""
    tokenizer: Any = None
    """The tokenizer of a model in this process that has started; None for all others."""

    @abstractmethod
    async def generate(self, request: Request) -> list[Completion]:
        """`request.n` completions, or `ModelCallError`."""

    def copy_at(self, when: str) -> Model:
        """A copy of this model that is not trained any further ('start', or renewed at an interval of steps)."""
        raise UserError(f"'policy@{when}': only a policy in training in this process can be copied")

    @property
    def state_now(self) -> int:
        """The model's current version, which changes when a copy of the policy is renewed."""
        return 0

    async def logprobs(self, prompt: Sequence[int], given: Sequence[int], role: str = "") -> tuple[float, ...]:
        """Log-probability of each `given` id after all ids before it, at temperature 1; `UserError` if it cannot."""
        if not self.abilities.scores:
            raise UserError(
                f"model '{self.name}' does not report the log-probabilities of given ids; a model in this process "
                "does, and so does a server that answers `echo` with `logprobs` (vLLM, upshot serve): token_ids: true"
            )
        if not prompt or not given:
            raise UserError(f"log-probabilities need a prompt and given ids, got {len(prompt)} and {len(given)}")
        sampling = Sampling(max_tokens=0, temperature=0.0)
        [scored] = await self.generate(Request([*prompt, *given], sampling, role=role, given=len(given)))
        assert scored.logprobs is not None
        return scored.logprobs

    async def start(self) -> None:
        """Check keys and files, and load weights; raises `UserError` before any work is lost."""

    async def __aenter__(self) -> Model:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class PolicySampler(Model):
    """The model in training as rollouts see it: it samples with the newest weights, and may lend copies of itself.

    The embedded engine (`training/snapshots.py`) and a vLLM server (`serving/vllm/policy.py`) implement it. The methods
    here are those of a sampler that lends no copies.
    """

    ahead: Sequence[Any] = ()
    """Copies of the policy that play steps ahead of the learner."""
    sync_seconds: float | None = None
    """Seconds spent on transferring weights since this was set to 0; None: it shares the learner's tensors."""

    def weights_changed(self) -> None:
        """The learner has taken a step: what is sampled from now on comes from the new weights."""
        raise NotImplementedError

    async def rest(self, park: bool) -> None:
        """The learner works: give memory back, where the learner needs it."""

    def play_ahead(self, steps: int) -> None:
        """Create copies that play this many steps ahead; called before any other copy is requested."""
        if steps:
            raise UserError("train.async_steps: this sampler holds one version of the weights; set it to 0")

    def renew(self, step: int) -> None:
        """After this many steps of the policy, renew the copies that are due."""

    def resume_at(self, step: int) -> None:
        """Continue with this step; copies have been renewed for those before it."""

    def snapshot(self) -> Callable[[Path], None]:
        """A function that writes all copies, as they are now, into a checkpoint."""
        return lambda folder: None

    def load_copies(self, folder: Path) -> None:
        """Load the copies from a checkpoint."""

    async def disconnect(self) -> None:
        """Close connections: nothing is sampled for now."""
