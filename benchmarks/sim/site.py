"""What a recipe does not say: how fast the machines are, how long replies get, what fails.

The defaults are assumptions for a 7B model in bfloat16 on H100-class GPUs, with 8B helpers served on the same;
none of them was measured. `docs/cluster-nodes.md` says how to measure your own.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from upshot.config.recipe import Section


class Length(Section):
    """A log-normal length or duration; a number alone is always that."""

    median: float = Field(ge=0)
    sigma: float = Field(0.0, ge=0)
    """Of the logarithm: 0.7 makes the longest of a thousand nine times the median."""
    most: float | None = Field(None, gt=0)
    """Longer ones are cut to this."""

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        return {"median": value} if isinstance(value, int | float) else value


class Speed(Section):
    """A model server: seconds of a decoding step are `fixed_s + per_sequence_s x running`."""

    fixed_s: float = Field(0.010, ge=0)
    per_sequence_s: float = Field(0.00008, ge=0)
    prompt_tokens_per_s: float = Field(25_000.0, gt=0)
    """Reading prompts, during which nothing is decoded."""
    max_running: int = Field(256, ge=1)
    """Sequences at once; the others wait."""

    def token_s(self, running: int) -> float:
        """Seconds of one step."""
        return self.fixed_s + self.per_sequence_s * running

    @property
    def most_per_s(self) -> float:
        """Tokens a second of a full batch."""
        return self.max_running / self.token_s(self.max_running)


class PolicySite(Section):
    """The policy's servers."""

    gpus_per_server: int = Field(1, ge=1)
    """`rollout.tensor_model_parallel_size`."""
    server: Speed = Speed()
    prompt_tokens: float = Field(1000.0, ge=0)
    """Of the opening; its replies read it once each."""
    turn_tokens: float = Field(150.0, ge=0)
    """Of what the others say between two turns of the policy."""
    reply_tokens: Length = Length(median=300, sigma=0.7)
    """Cut at the recipe's `episode.max_tokens`."""


class EndpointSite(Section):
    """A helper model: `replicas` of a server, or, with `latency_s`, somebody else's endpoint."""

    replicas: int = Field(1, ge=1)
    server: Speed = Speed()
    prompt_tokens: float = Field(1500.0, ge=0)
    """Of a call, those aside that the server has in its prefix cache."""
    tokens: Length = Length(median=150, sigma=0.5, most=2048)
    """Of an answer."""
    latency_s: Length | None = None
    """Seconds of an answer, however many are asked at once; None: as the servers are."""
    fails: float = Field(0.0, ge=0, lt=1)
    """Share of the attempts that end without an answer."""

    @property
    def hosted(self) -> bool:
        """Whether it is somebody else's, so that only our limits count."""
        return self.latency_s is not None


class WorkerSite(Section):
    """The processes that play conversations."""

    count: int = Field(8, ge=1)
    """`rollout.agent.num_workers`; verl's own default whatever the number of GPUs."""
    in_flight: int = Field(1024, ge=1)
    """Replies of a worker at once (`Stage.concurrency`)."""
    call_s: float = Field(0.0015, ge=0)
    """CPU of a worker for each call: rendering, HTTP, JSON. One thread does all of them."""
    poll_s: float = Field(2.0, ge=0)
    """Seconds between verl's checks whether all replies of a step are finished; 0: notified at once, as in local
    mode."""
    environment_s: Length = Length(median=0)
    """Of the environment between two turns of an episode."""


class LearnSite(Section):
    """What follows the rollouts."""

    tokens_per_s: float = Field(2500.0, gt=0)
    """Of a GPU, all passes over a reply and its prompt together (old and reference log-probabilities, update)."""
    fixed_s: float = Field(5.0, ge=0)
    sync_s: float = Field(8.0, ge=0)
    """Weights to the servers of one node …"""
    sync_per_doubling_s: float = Field(1.0, ge=0)
    """… and for each time that the nodes double."""
    gpus_per_node: int = Field(8, ge=1)


class FailureSite(Section):
    """What breaks, and what that costs: a lost GPU ends the run, which resumes from its last checkpoint."""

    gpu_hours: float = Field(50_000.0, ge=0)
    """Mean hours of one GPU between two failures; 0: none. Llama 3's report: 419 in 54 days on 16,384 GPUs."""
    restart_s: float = Field(600.0, ge=0)


class Site(Section):
    """Everything that `cluster_sim` needs besides the recipe."""

    policy: PolicySite = PolicySite()
    helpers: dict[str, EndpointSite] = Field(default_factory=dict)
    """By the names of the recipe's `models`; those not named here are as `EndpointSite` stands."""
    workers: WorkerSite = WorkerSite()
    learn: LearnSite = LearnSite()
    failures: FailureSite = FailureSite()
    leaves: float = Field(0.0, ge=0, le=1)
    """How likely the simulated user leaves at each of its turns."""

    def helper(self, name: str) -> EndpointSite:
        """A helper model by its name in the recipe."""
        return self.helpers.get(name, EndpointSite())
