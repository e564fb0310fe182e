"""Scripted models, and how roles are connected to models."""

import asyncio
import json
import time

import pytest

from tests.patience import patience
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import Abilities, Completion, Model, Request
from upshot.models.connect import connect, connect_all
from upshot.models.structured import ask_json


def call(spec, request, **options):
    async def run():
        async with connect(spec, **options) as model:
            return await model.generate(request)

    return asyncio.run(run())


def say(text, **options):
    return Request([Message("user", text)], **options)


async def slow_shout(request):
    """An async script that returns a whole completion."""
    await asyncio.sleep(0)
    return Completion(request.prompt[-1].content.upper(), "length", completion_tokens=7)


def seeds(request):
    """A script that returns its seed."""
    return str(request.sampling.seed)


def test_built_in_scripts_answer():
    assert call("scripted:echo", say("hello you"))[0].text == "hello you"
    assert call("scripted:ok", say("x"))[0].text == "OK"
    assert call("scripted:number", say("12 apples and -3.5 pears"))[0].text == "#### -3.5"


def test_a_users_function_may_be_sync_or_async():
    (completion,) = call("scripted:tests.models.test_scripted:slow_shout", say("hey"))
    assert (completion.text, completion.finish, completion.completion_tokens) == ("HEY", "length", 7)


def test_each_sample_has_its_own_seed_and_the_same_seed_gives_the_same():
    request = say("x", n=3, sampling=Sampling(seed=5))
    first = [c.text for c in call("scripted:tests.models.test_scripted:seeds", request)]
    assert first[0] == "5"
    assert len(set(first)) == 3
    assert first == [c.text for c in call("scripted:tests.models.test_scripted:seeds", request)]


def test_scripts_fill_schemas():
    schema = {
        "type": "object",
        "properties": {
            "response": {"type": "string"},
            "score": {"type": "number", "minimum": 0.5},
            "kind": {"enum": ["a"]},
        },
        "required": ["response", "score", "kind"],
    }

    async def run():
        async with connect("scripted:echo") as model:
            return await ask_json(model, [Message("user", "hi")], schema)

    assert asyncio.run(run()) == {"response": "hi", "score": 0.5, "kind": "a"}
    assert json.loads(call("scripted:ok", say("x", schema=schema))[0].text)["response"] == "OK"


def test_latency_is_concurrent():
    async def run():
        async with connect({"model": "scripted:echo", "latency_s": 0.1, "concurrency": 100}) as model:
            began = time.monotonic()
            await asyncio.gather(*(model.generate(say("x")) for _ in range(100)))
            return time.monotonic() - began

    assert 0.1 <= asyncio.run(run()) < patience(3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("scripted:ecko", "did you mean 'echo'?"),
        ("scripted:no_such_module:f", "cannot import"),
        ("scripted:tests.models.test_scripted:nothing", "has no 'nothing' (scripted model)"),
        ("policy", "no model is trained here"),
    ],
)
def test_a_model_that_cannot_be_connected_is_reported_at_once(spec, message):
    with pytest.raises(UserError) as caught:
        connect(spec, role="user")
    assert message in str(caught.value)


def test_ids_are_refused_by_models_that_take_messages():
    with pytest.raises(UserError, match="takes messages, not token ids"):
        call("scripted:echo", Request([1, 2, 3]))


class Policy(Model):
    """A stand-in for the model in training."""

    name = "tiny"
    abilities = Abilities(ids_in=True, ids_out=True, seed=True)
    closed = False

    async def generate(self, request: Request) -> list[Completion]:
        return [Completion("p", "stop", (1,), (-1.0,), prompt_tokens=2, completion_tokens=1)] * request.n

    async def aclose(self) -> None:
        self.closed = True


def test_the_policy_is_lent_and_counted_by_role_and_never_closed():
    policy = Policy()

    async def run():
        models = connect_all({"user": "policy", "judge": {"model": "policy", "temperature": 0}}, policy=policy)
        async with models["user"] as user:
            assert user.abilities.ids_in
            assert [c.ids for c in await user.generate(Request([1, 2], n=2))] == [(1,), (1,)]
            assert user.stats()["user/completion_tokens"] == 2
            assert user.stats()["user/prompt_tokens"] == 2

    asyncio.run(run())
    assert not policy.closed


def test_roles_with_the_same_spec_share_one_model():
    models = connect_all({"user": "scripted:echo", "judge": "scripted:echo", "other": "scripted:ok"})
    assert models["user"] is models["judge"]
    assert models["other"] is not models["user"]
