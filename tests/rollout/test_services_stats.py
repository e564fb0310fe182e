"""The counters of helper models are logged as metrics; those that depend on timing are logged under time/."""

from typing import Any, cast

from upshot.config.model_spec import ModelSpec
from upshot.models.client.budget import Budget
from upshot.models.scripted import ScriptedModel
from upshot.rewards.workers.pool import PoolManager
from upshot.rollout.dependencies import Dependencies
from upshot.rollout.services import Services


def test_counters_per_replica_are_logged_under_time():
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
