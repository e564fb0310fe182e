"""What helpers count is told in the metrics; what chance decides is told apart, under time/."""

from typing import Any, cast

from upshot.config.model_spec import ModelSpec
from upshot.models.client.budget import Budget
from upshot.models.scripted import ScriptedModel
from upshot.rewards.workers.pool import PoolManager
from upshot.rollout.dependencies import Dependencies
from upshot.rollout.services import Services


def test_which_replica_answered_is_no_part_of_what_two_runs_of_one_seed_have_in_common():
    model = ScriptedModel(ModelSpec.parse("scripted:echo"), role="user")
    count = model.meter.role("user")
    count.calls = 3
    count.replicas.update({"127.0.0.1:8000/calls": 2, "127.0.0.1:8001/calls": 1})
    services = Services(
        cast(Any, None), {"user": model}, None, {}, {}, Budget(), Dependencies(manager=PoolManager(workers=1))
    )
    told = services.stats()
    assert told["model/user/user/calls"] == 3
    assert told["time/model/user/user/replica/127.0.0.1:8000/calls"] == 2
    assert not [key for key in told if "replica" in key and not key.startswith("time/")]
