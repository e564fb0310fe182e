"""A thousand rows that differ only by their hidden goals, played by four agent-loop workers of verl inside Ray.

As a program: `python -m tests.verl.real.goals FOLDER MODEL ROWS` plays them with a stub server and prints a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.score import Score
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Observation, Participant

WORKERS = 4


class Keeper(Participant):
    """Tells its secret when it is asked."""

    async def observe(self, conversation: Conversation) -> Observation:
        """The secret, once."""
        await asyncio.sleep(conversation.rng.random() / 50)  # so that conversations overtake each other
        if "which" not in conversation.turns[-1].message.content:
            return Observation(done=True)
        return Observation((Message("user", conversation.row.goal),))


class Secrets(Task):
    """All rows open alike; each has its own secret, which is told as the digits of a number."""

    name = "secrets"

    def __init__(self, rows: int = 1000) -> None:
        self.count = rows

    def rows(self, split: str) -> list[Row]:
        """The rows."""
        numbers = range(self.count)
        return [Row(f"{split}/{n}", (Message("user", "guess ?"),), spelled(n), spelled(n), "secrets") for n in numbers]

    def user(self) -> Participant:
        """The user who keeps the secrets."""
        return Keeper()

    def vocabulary(self) -> list[str]:
        """Digits and three words."""
        return ["guess", "?", "which", *"0123456789"]

    async def verify(self, conversation: Conversation) -> Score:
        """1 if the assistant has found the secret."""
        last = conversation.last("assistant")
        return Score(float(last is not None and last.content.split() == conversation.row.reference.split()))


def spelled(number: int) -> str:
    """A number as separate digits."""
    return " ".join(str(number))


def heard(conversation: Conversation) -> float:
    """The secret that was told in this conversation."""
    told = [m.content for m in conversation.messages if m.role == "user" and re.fullmatch(r"[\d ]+", m.content)]
    return float(told[0].replace(" ", "")) if told else -1.0


class Parrot:
    """A server that asks, and then repeats what it heard."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokenizer: Any = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        """Verl's signature."""
        from transformers import AutoTokenizer
        from verl.workers.rollout.replica import TokenOutput

        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        await asyncio.sleep(random.random() / 50)
        digits = re.findall(r"\d", self.tokenizer.decode(prompt_ids, skip_special_tokens=True))
        text = " ".join(digits) or "which ?"
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 0)
        return TokenOutput(
            token_ids=ids, log_probs=[-0.1] * len(ids), num_preempted=0, stop_reason="completed", extra_fields=steps
        )


def play(folder: Path, model: str, rows: int) -> dict[str, Any]:
    """Play every row once; what was heard and earned in each."""
    import numpy as np
    import ray
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker

    from upshot.config.load import load_recipe
    from upshot.run.folder import RunFolder
    from upshot.verl.adapters.budget import open_budget
    from upshot.verl.plan import RECIPE
    from upshot.verl.rows import record_of
    from upshot.verl.worker import describe_place

    here = "tests.verl.real.goals"
    own = [f"task={{name: '{here}:Secrets', rows: {rows}}}", f"run_dir={folder}", f"model.path={model}"]
    own += [f"reward.metrics=[{{name: verifier}}, {{name: '{here}:heard', weight: 0, clamp: null}}]", "warm_start=null"]
    recipe = load_recipe("quickstart", ["credit.by=reply", *own]).recipe
    place = RunFolder.create(recipe).path
    os.environ[RECIPE] = str(place / "recipe.yaml")
    rollout = "actor_rollout_ref.rollout"
    words = [f"actor_rollout_ref.model.path={model}", f"{rollout}.name=vllm", f"{rollout}.agent.num_workers={WORKERS}"]
    words += [f"{rollout}.prompt_length=64", f"{rollout}.response_length=32", f"{rollout}.max_model_len=256"]
    words += ["actor_rollout_ref.model.external_lib=upshot.verl.adapters.register"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        theirs = compose("ppo_trainer", overrides=words)
    ray.init(num_cpus=WORKERS + 2, include_dashboard=False, logging_level="ERROR")
    budget = open_budget(recipe, place)

    class OneRow(AgentLoopWorker):  # type: ignore[misc]
        """Without TransferQueue, verl's worker takes one row per conversation."""

        async def _agent_loop_postprocess(self, output: Any, validate: bool, **row: Any) -> Any:
            return await super()._agent_loop_postprocess(output[0], validate, **row)

    class Manager(AgentLoopManager):  # type: ignore[misc]
        agent_loop_workers_class = ray.remote(OneRow)

    manager = Manager.create(config=theirs, llm_client=Parrot(model))
    records = [record_of(row, n, "train") for n, row in enumerate(Secrets(rows).rows("train"))]
    for number, record in enumerate(records):
        record["extra_info"] = describe_place(record["extra_info"], number, 0)

    def column(values: list[Any]) -> Any:
        out = np.empty(len(values), dtype=object)
        out[:] = values
        return out

    batch = {name: column([record[name] for record in records]) for name in ("agent_name", "extra_info", "data_source")}
    batch |= {"raw_prompt": column([record["raw_prompt"] for record in records])}
    batch |= {"uid": column([f"u{n}" for n in range(rows)]), "session_id": np.zeros(rows, dtype=int)}
    batch |= {"reward_model": column([record["reward_model"] for record in records]), "index": np.arange(rows)}
    batch |= {"global_steps": np.ones(rows, dtype=int)}
    out = manager.generate_sequences(DataProto.from_dict(non_tensors=batch))
    end = (
        time.monotonic() + 20
    )  # helpers without an endpoint do not wait for permission, so the first reports may come late
    while f"{WORKERS} workers" not in (view := ray.get(budget.describe.remote()))[1] and time.monotonic() < end:
        time.sleep(0.2)
    left = ray.get(budget.close.remote())
    ray.shutdown()
    found = out.non_tensor_batch
    return {
        "heard": [float(value) for value in found["heard"]],
        "verdicts": [float(value) for value in found["verifier"]],
        "index": [int(value) for value in found["index"]],
        "view": view,
        "not closed": left,
    }


if __name__ == "__main__":
    print("FOUND " + json.dumps(play(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
