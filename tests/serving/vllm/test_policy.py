"""The policy on vLLM: exact ids, one version of the weights per reply, and only the newest weights sample."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import until
from tests.serving.vllm.fake_vllm import KEY, RECORDED, FakeVllm
from tests.tiny import tiny_parts
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import LoraConfig, PolicyConfig
from upshot.config.sampling import Sampling
from upshot.core.errors import UserError
from upshot.engine.engine import Engine
from upshot.models.base import ModelCallError, Request
from upshot.models.engine_model import EngineModel
from upshot.models.openai_format import read_answer
from upshot.serving.vllm import policy as room
from upshot.serving.vllm.inside.upshot_hands import checksum
from upshot.serving.vllm.launch import KEY as VARIABLE
from upshot.serving.vllm.launch import Address
from upshot.serving.vllm.policy import VllmPolicy
from upshot.serving.vllm.weights import check_arrival, choose_route
from upshot.training.adapters import add_lora

ASK = Request([1, 5, 9], Sampling(max_tokens=6, seed=3))


class Scene:
    """A module in training, its stand-in server, and the policy between them."""

    def __init__(self, run: Path, lora: bool = False, same_gpu: bool = False, **server: Any) -> None:
        module, self.tokenizer, self.renderer, _ = tiny_parts()
        self.server = FakeVllm(module, **server)
        config = PolicyConfig(lora=LoraConfig(r=2, dropout=0.0) if lora else None)
        self.module = add_lora(module, config).eval()
        self.said: list[str] = []
        self.up = True
        spec = ModelSpec(url=self.server.url, model="policy", token_ids=True, api_key_env=VARIABLE, retries=0)
        address = Address(spec, KEY, run / "log", same_gpu, start_s=20.0, is_up=lambda: self.up)
        self.policy = VllmPolicy(address, self.module, self.tokenizer, self.renderer, run, self.said.append)

    def learn(self) -> None:
        """What a step of the learner does to the weights."""
        with torch.no_grad():
            for weight in self.module.parameters():
                if weight.requires_grad:
                    weight.add_(torch.randn_like(weight) * 0.5)
        self.policy.weights_changed()

    def play(self, work: Callable[[VllmPolicy], Coroutine[Any, Any, Any]]) -> Any:
        async def with_policy() -> Any:
            async with self.policy:
                return await work(self.policy)

        return asyncio.run(with_policy())

    def own_logprobs(self, ids: tuple[int, ...], prompt: Any = ASK.prompt) -> list[float]:
        with torch.no_grad():
            logits = self.module(torch.tensor([[*prompt, *ids]])).logits[0]
        found = torch.log_softmax(logits, -1)
        return [found[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(room, "POLL_S", 0.02)
    made: list[Scene] = []

    def make(**how: Any) -> Scene:
        made.append(Scene(tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        one.server.close()


def test_the_stand_in_answers_as_the_real_server_did() -> None:
    [completion] = read_answer(RECORDED["completion"]).completions
    assert completion.ids == (539, 346, 465, 488, 883, 235) and completion.finish == "length"
    assert completion.logprobs is not None and len(completion.logprobs) == 6


def test_ids_and_log_probabilities_are_those_of_the_learner(scene: Callable[..., Scene]) -> None:
    here = scene()
    [found] = here.play(lambda policy: policy.generate(ASK))
    assert found.logprobs == pytest.approx(here.own_logprobs(found.ids), abs=1e-5)
    assert found.text == here.tokenizer.decode(found.ids, skip_special_tokens=True)
    [body] = here.server.seen
    assert body["prompt"] == [1, 5, 9] and body["seed"] == 3 and set(body["stop_token_ids"]) >= here.renderer.end_ids
    assert "weights by shared memory" in here.said[0] or "weights by files" in here.said[0]


def test_messages_are_rendered_by_our_own_template(scene: Callable[..., Scene]) -> None:
    from upshot.core.conversation import Message

    here = scene()
    here.play(lambda policy: policy.generate(Request([Message("user", "hello")], Sampling(max_tokens=2))))
    assert here.server.seen[0]["prompt"] == here.renderer.prompt_ids([Message("user", "hello")])


def test_given_ids_are_scored_as_our_engine_scores_them(scene: Callable[..., Scene]) -> None:
    here = scene()
    found = here.play(lambda policy: policy.logprobs([1, 5, 9], [7, 8]))
    engine = EngineModel(Engine(here.module, here.renderer.end_ids), here.tokenizer, "policy", here.renderer)
    assert found == pytest.approx(asyncio.run(engine.logprobs([1, 5, 9], [7, 8])), abs=1e-5)


def test_after_a_step_the_next_sample_comes_from_the_new_weights_and_names_them(scene: Callable[..., Scene]) -> None:
    here = scene()

    async def work(policy: VllmPolicy) -> Any:
        [before] = await policy.generate(ASK)
        here.learn()
        [after] = await policy.generate(ASK)
        return before, after

    before, after = here.play(work)
    assert (before.version, after.version) == (0, 1) and before.ids != after.ids
    assert after.logprobs == pytest.approx(here.own_logprobs(after.ids), abs=1e-5)
    assert [body["version"] for body in here.server.seen] == ["0", "1"]
    assert here.server.seen[0]["cache_salt"] != here.server.seen[1]["cache_salt"]
    assert here.policy.syncs == 2


def test_the_server_refuses_a_request_for_weights_it_does_not_have(scene: Callable[..., Scene]) -> None:
    here = scene()

    async def work(policy: VllmPolicy) -> Any:
        policy.endpoint.headers = {room.HEADER: "7"}
        with pytest.raises(ModelCallError, match="stale weights: version 7 is requested, 0 is loaded"):
            await policy.endpoint.generate(ASK)

    here.play(work)
    assert here.server.seen == []


def test_requests_in_flight_finish_before_weights_change(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.server.latency_s = 0.2

    async def work(policy: VllmPolicy) -> Any:
        early = [asyncio.create_task(policy.generate(ASK)) for _ in range(4)]
        await asyncio.sleep(0.1)
        here.learn()
        late = [asyncio.create_task(policy.generate(ASK)) for _ in range(4)]
        return [(await task)[0].version for task in (*early, *late)]

    assert here.play(work) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert here.server.most_busy_at_load == 0 and here.policy.syncs == 2


def test_many_requests_at_once_hand_the_weights_over_once(scene: Callable[..., Scene]) -> None:
    here = scene()

    async def work(policy: VllmPolicy) -> Any:
        here.learn()
        found = await asyncio.gather(*(policy.generate(ASK) for _ in range(16)))
        return {completion.version for [completion] in found}

    assert here.play(work) == {1}
    assert here.policy.syncs == 2  # at the start and after the step


def test_a_server_that_is_killed_gets_the_newest_weights_before_its_first_request(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.server.latency_s = 0.3

    async def work(policy: VllmPolicy) -> Any:
        here.learn()
        asked = [asyncio.create_task(policy.generate(ASK)) for _ in range(3)]
        await until(lambda: len(here.server.seen) == 3)
        here.server.kill()
        threading.Timer(0.3, here.server.start).start()
        return [(await task)[0] for task in asked]

    found = here.play(work)
    assert {one.version for one in found} == {1}
    for one in found:
        assert one.logprobs == pytest.approx(here.own_logprobs(one.ids), abs=1e-5)
    assert here.policy.syncs == 3


def test_a_server_restarted_between_two_steps_is_noticed(scene: Callable[..., Scene]) -> None:
    here = scene()

    async def work(policy: VllmPolicy) -> Any:
        await policy.generate(ASK)
        here.server.kill()
        here.server.start()
        return await policy.generate(ASK)

    [found] = here.play(work)
    assert found.logprobs == pytest.approx(here.own_logprobs(found.ids), abs=1e-5)


def test_a_server_that_stays_down_is_an_error_with_its_log(scene: Callable[..., Scene]) -> None:
    here = scene()

    async def work(policy: VllmPolicy) -> Any:
        here.server.kill()
        here.up = False
        await policy.generate(ASK)

    with pytest.raises(UserError, match=r"did not come back .*log"):
        here.play(work)


def test_dropped_and_aborted_requests_are_repeated(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.server.drops, here.server.gives_up = 1, 1
    [found] = here.play(lambda policy: policy.generate(ASK))
    assert found.ids and here.server.drops == here.server.gives_up == 0
    here.server.drops = 100
    with pytest.raises(ModelCallError, match="connection"):
        here.play(lambda policy: policy.generate(ASK))


def test_weights_that_are_lost_on_the_way_stop_the_run(scene: Callable[..., Scene]) -> None:
    here = scene(loses=("model.embed_tokens.weight",))
    with pytest.raises(UserError, match="changed on their way to vLLM"):
        here.play(lambda policy: policy.generate(ASK))
    assert here.server.seen == []


def test_weights_that_do_not_reach_every_worker_stop_the_run(scene: Callable[..., Scene]) -> None:
    here = scene(world=2)
    with pytest.raises(UserError, match="1 of 2 workers answered"):
        here.play(lambda policy: policy.generate(ASK))
    weights = {"a": torch.ones(2)}
    states = [{"version": version, "sum": "", "workers": 2, "rank": rank} for rank, version in enumerate(("4", "3"))]
    with pytest.raises(UserError, match="worker 1 has version 3"):
        check_arrival(states, "4", weights)


def test_adapters_are_swapped_under_a_new_name_and_the_base_is_never_sent(scene: Callable[..., Scene]) -> None:
    here = scene(lora=True)

    async def work(policy: VllmPolicy) -> Any:
        await policy.generate(ASK)
        here.learn()
        return await policy.generate(ASK)

    [found] = here.play(work)
    assert [body["model"] for body in here.server.seen] == ["policy-0", "policy-1"]
    assert list(here.server.adapters) == ["policy-1"] and "/collective_rpc" not in here.server.calls
    assert found.version == 1
    assert found.logprobs == pytest.approx(here.own_logprobs(found.ids), abs=1e-5)


def test_on_the_learners_gpu_the_server_sleeps_while_the_learner_works(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "choose_route", lambda weights, same_gpu: "memory")  # there is no GPU here
    here = scene(same_gpu=True)

    async def work(policy: VllmPolicy) -> Any:
        await policy.generate(ASK)
        await policy.rest(park=True)
        assert here.server.asleep
        here.learn()
        [found] = await policy.generate(ASK)
        assert not here.server.asleep
        return found

    assert here.play(work).version == 1
    order = [call for call in here.server.calls if call in ("/sleep", "/wake_up", "/collective_rpc")]
    assert order[-5:] == ["/sleep", "/wake_up", "/collective_rpc", "/collective_rpc", "/wake_up"]


def test_a_server_that_is_down_when_it_should_sleep_is_awaited_afterwards(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "choose_route", lambda weights, same_gpu: "memory")
    here = scene(same_gpu=True)

    async def work(policy: VllmPolicy) -> Any:
        here.server.kill()
        await policy.rest(park=True)
        here.learn()
        threading.Timer(0.2, here.server.start).start()
        return await policy.generate(ASK)

    [found] = here.play(work)
    assert found.version == 1
    assert found.logprobs == pytest.approx(here.own_logprobs(found.ids), abs=1e-5)


def test_the_fastest_available_transfer_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = {"a": torch.ones(4)}
    assert choose_route(weights, same_gpu=True) == "gpu"
    monkeypatch.setattr("upshot.serving.vllm.weights.SHARED", tmp_path)
    assert choose_route(weights, same_gpu=False) == "memory"
    monkeypatch.setattr("upshot.serving.vllm.weights.SHARED", tmp_path / "nowhere")
    assert choose_route(weights, same_gpu=False) == "file"


def test_the_checksum_of_weights_depends_on_every_bit_and_not_on_their_layout() -> None:
    one, two = torch.randn(3, 4), torch.randn(2, 4)
    assert checksum([one, two]) == checksum([torch.cat([two, one])])
    other = two.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(9.0))
    assert checksum([one, two]) != checksum([one, other])


def test_without_the_key_only_health_is_answered(scene: Callable[..., Scene]) -> None:
    import urllib.error
    import urllib.request

    here = scene()
    root = here.server.url.removesuffix("/v1")
    assert urllib.request.urlopen(f"{root}/health").status == 200
    for path in ("/v1/models", "/collective_rpc", "/sleep", "/upshot/gate"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{root}{path}")
