"""Episodes played by an external program: exact ids, one tree, and no conversation contains another's words."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

from tests.patience import until
from tests.tiny import tiny_policy
from upshot.config.load import load_recipe
from upshot.config.recipe import AgentConfig
from upshot.core.conversation import Conversation, Row, Sample, messages_from
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.advantages.grouped import dr_grpo
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import VerifierMetric
from upshot.rollout.agents.runner import AgentRunner
from upshot.rollout.check_names import check_names
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.run.samples import pack, unpack
from upshot.tasks.environments.agent import AgentEpisode
from upshot.training.loops.rl import data_of_episode, set_advantages
from upshot.training.metrics.step import measure_task

Said = list[dict[str, Any]]


async def ask(episode: AgentEpisode, messages: Said, **fields: Any) -> dict[str, Any]:
    """One call; the reply as a message."""
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    async with httpx.AsyncClient(timeout=None, headers=headers) as http:
        body = {"model": episode.model, "messages": messages, **fields}
        answer = await http.post(f"{episode.base_url}/chat/completions", json=body)
        answer.raise_for_status()
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message


def opening(episode: AgentEpisode) -> Said:
    return [message.to_dict() for message in episode.row.messages]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def play(
    function: Callable[[AgentEpisode], Any] | None = None,
    rows: int = 1,
    group_size: int = 1,
    seen: list[tuple[list[int], tuple[int, ...]]] | None = None,
    **config: Any,
) -> list[list[Rollout]]:
    """Some rows of the tiny task, played by an agent; every request to the policy is added to `seen`."""
    policy, task = tiny_policy()
    if seen is not None:
        watch(policy, seen)
    futures = Talk({"verifier": VerifierMetric(task)}, {"verifier": MetricWeight()})

    async def run() -> list[list[Rollout]]:
        agent = AgentRunner(AgentConfig(**{"program": "x", **config}), policy.model.tokenizer, function)
        try:
            return await play_step(RolloutContext(policy, futures, agent=agent), rows_of(rows), group_size, 0)
        finally:
            await agent.aclose()

    return asyncio.run(run())


def rows_of(count: int) -> list[Row]:
    opens = messages_from([user("i want a small red lamp")])
    return [Row(f"row-{n}", opens, goal={"size": "small", "colour": "red", "thing": "lamp"}) for n in range(count)]


def watch(policy: Policy, seen: list[tuple[list[int], tuple[int, ...]]]) -> None:
    generate = policy.model.generate

    async def recording(request: Any) -> Any:
        completions = await generate(request)
        seen.append((list(request.prompt), completions[0].ids or ()))
        return completions

    policy.model.generate = recording  # type: ignore[method-assign]


def trained(reply: Rollout) -> list[tuple[list[int], list[int]]]:
    """Ids and loss mask of every sequence that an episode trains, as if it had been better than the others."""
    group: list[list[Rollout]] = [[reply, other(reply)]]
    set_advantages(group, dr_grpo)
    return [(datum.ids, datum.mask) for datum in data_of_episode(reply)]


def other(reply: Rollout) -> Rollout:
    """A reply that earned less."""
    assert reply.credit is not None
    worse = {name: Score((score.value or 0.0) - 1) for name, score in reply.credit.parts.items()}
    return Rollout(reply.conversation, credit=type(reply.credit)(worse, reply.credit.spans))


def check_exact(reply: Rollout, seen: list[tuple[list[int], tuple[int, ...]]]) -> None:
    """Every sampled token is trained exactly once, after exactly the ids that the policy saw; no other token is
    trained."""
    wanted = sorted((tuple(prompt), ids) for prompt, ids in seen)
    found = []
    for ids, mask in trained(reply):
        start = None
        for at, bit in enumerate([*mask, 0]):
            if bit and start is None:
                start = at
            elif not bit and start is not None:
                found.append((tuple(ids[:start]), tuple(ids[start:at])))
                start = None
    assert sorted(found) == wanted


async def three_turns(episode: AgentEpisode) -> float:
    said = opening(episode)
    for text in ("not sure yet", "hard to say", ""):
        said += [await ask(episode, said), user(text)]
    return 0.5


def test_a_growing_conversation_is_one_sequence_of_the_sampled_ids() -> None:
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    [[reply]] = play(three_turns, seen=seen)
    assert reply.reward.total.value == 0.5, "what a function returns is the reward"
    assert len(seen) == 3 and reply.other_paths == []
    check_exact(reply, seen)
    assert reply.conversation.ids == [*seen[-1][0], *seen[-1][1]], "nothing is rendered again"


async def compacts(episode: AgentEpisode) -> float:
    first = await ask(episode, opening(episode))
    second = await ask(episode, [*opening(episode), first, user("hard to say")])
    await ask(episode, [user("hello i want something"), {**second, "content": "here is a lamp"}, user("please")])
    await ask(episode, [*opening(episode), first, user("not sure yet")])
    return 1.0


def test_an_edited_context_is_a_new_path_and_trains_only_what_was_sampled_in_it() -> None:
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    [[reply]] = play(compacts, seen=seen)
    assert len(reply.other_paths) == 2
    check_exact(reply, seen)
    starts = sorted(path.start for path in reply.other_paths)
    assert starts == [0, 2], "the compacted one begins anew, the one that went another way begins after the first reply"
    line = reply.to_dict(1)
    assert [path["start"] for path in line["other_paths"]] == [path.start for path in reply.other_paths]
    assert measure_task([[reply]])["turns"] == 4, "calls in every context count"
    kept = unpack(pack([reply]))
    assert kept[reply.conversation.key] == as_kept(reply.conversation)
    for path, told in zip(reply.other_paths, line["other_paths"], strict=True):
        assert kept[told["key"]] == as_kept(path.conversation), "audited by its exact ids, from its opening on"


def as_kept(path: Conversation) -> list[Sample]:
    """A path's samples, with log-probabilities at the precision of the file."""
    return [replace(one, logprobs=tuple(float(numpy.float32(v)) for v in one.logprobs)) for one in path.samples()]


async def two_agents(episode: AgentEpisode) -> float:
    async def one(word: str) -> None:
        said = [user(f"i want a {word}")]
        for _ in range(2):
            said += [await ask(episode, said), user("please")]

    await asyncio.gather(one("lamp"), one("chair"), one("bowl"))
    return 1.0


def test_concurrent_agents_of_one_program_have_a_path_each() -> None:
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    [[reply]] = play(two_agents, seen=seen)
    assert len(seen) == 6 and len(reply.other_paths) == 2
    check_exact(reply, seen)


async def several(episode: AgentEpisode) -> float:
    await ask(episode, opening(episode), n=3)
    return 1.0


def test_every_one_of_several_replies_to_a_call_is_recorded() -> None:
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    [[reply]] = play(several, seen=seen)
    assert len(seen) == 3 and len(reply.other_paths) == 2
    check_exact(reply, seen)


@pytest.mark.parametrize("mode", ["sequence", "token", "constant"])
def test_an_episode_of_several_contexts_has_the_weight_of_one(mode: str) -> None:
    [[reply]] = play(compacts)
    set_advantages([[reply, other(reply)]], dr_grpo)
    data = data_of_episode(reply, mode)
    tokens = sum(len(datum.places) for datum in data)
    assert sum(datum.counted for datum in data) == (len(data) if mode == "token" else 1)
    weights = [datum.share / (len(datum.places) if mode == "sequence" else 1) for datum in data]
    assert weights == pytest.approx([1 / tokens if mode == "sequence" else 1.0] * len(data)), "all tokens alike"


def test_the_recipes_sampling_applies_and_a_seed_repeats() -> None:
    async def cold(episode: AgentEpisode) -> float:
        await ask(episode, opening(episode), temperature=0, seed=1, max_tokens=3)
        return 1.0

    replies = [play(cold, group_size=6)[0] for _ in range(2)]
    said = [[reply.conversation.ids for reply in group] for group in replies]
    assert said[0] == said[1]
    assert len({tuple(ids) for ids in said[0]}) > 1, "a temperature of 0 would have said one thing"
    assert all(len(sample.ids) <= 3 for reply in replies[0] for sample in reply.conversation.samples())


def test_a_call_is_answered_with_the_weights_of_its_own_step() -> None:
    playing: ContextVar[int] = ContextVar("playing", default=0)
    policy, task = tiny_policy()
    generate, asked = policy.model.generate, []

    async def watched(request: Any) -> Any:
        asked.append(playing.get())
        return await generate(request)

    policy.model.generate = watched  # type: ignore[method-assign]
    futures = Talk({"verifier": VerifierMetric(task)}, {"verifier": MetricWeight()})

    async def run() -> None:
        agent = AgentRunner(AgentConfig(program="x"), policy.model.tokenizer, three_turns)
        await agent.start()  # the server's own tasks have no current step
        playing.set(7)
        await play_step(RolloutContext(policy, futures, agent=agent), rows_of(1), 1, 0)
        await agent.aclose()

    asyncio.run(run())
    assert asked == [7, 7, 7]


async def crash(episode: AgentEpisode) -> None:
    await ask(episode, opening(episode))
    raise RuntimeError("the tool broke")


async def leave(episode: AgentEpisode) -> None:
    sys.exit(3)


async def other_name(episode: AgentEpisode) -> float:
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        await ask(episode, opening(episode), model="gpt-4o")
    return 1.0


async def other_name_unheeded(episode: AgentEpisode) -> None:
    await ask(episode, opening(episode), model="gpt-4o")


async def hang(episode: AgentEpisode) -> None:
    await ask(episode, opening(episode))
    await asyncio.sleep(600)


async def too_often(episode: AgentEpisode) -> float:
    for _ in range(3):
        await ask(episode, opening(episode))
    return 1.0


async def no_number(episode: AgentEpisode) -> str:
    await ask(episode, opening(episode))
    return "great"


@pytest.mark.parametrize(
    ("function", "reason", "words"),
    [
        (crash, "error", "RuntimeError: the tool broke"),
        (leave, "crashed", "status 3"),
        (other_name, "nothing_said", "no model 'gpt-4o' here, only 'policy'"),
        (other_name_unheeded, "error", "(it was refused: no model 'gpt-4o' here, only 'policy'"),
        (hang, "timeout", "more than 1 s"),
        (too_often, "error", "400 Bad Request"),
        (no_number, "not_a_score", "'great'"),
    ],
)
def test_a_failed_episode_is_missing_with_its_reason(function: Any, reason: str, words: str) -> None:
    limits = {"seconds": 1.0} if function is hang else {}
    [[reply, again]] = play(function, group_size=2, calls=2, **limits)
    for one in (reply, again):
        assert one.reward.total.reason == reason
        assert words in one.reward.total.why
        assert one.credit is not None and not one.credit.trains


def test_without_a_reward_the_task_scores_the_last_reply() -> None:
    async def silent(episode: AgentEpisode) -> None:
        await ask(episode, opening(episode))

    [[reply]] = play(silent)
    assert reply.reward.total.value == 0.0, "random words are no lamp"


def test_a_plain_function_may_block_on_its_answer() -> None:
    def plain(episode: AgentEpisode) -> float:
        body = {"model": episode.model, "messages": opening(episode), "stream": True}
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        with httpx.stream("POST", f"{episode.base_url}/chat/completions", json=body, headers=headers) as answer:
            assert "data: [DONE]" in answer.read().decode()
        return 1.0

    [[reply]] = play(plain)
    assert reply.reward.total.value == 1.0


def test_a_key_is_valid_only_for_its_own_conversation_and_while_it_lasts() -> None:
    met: list[AgentEpisode] = []

    async def nosy(episode: AgentEpisode) -> float:
        met.append(episode)
        await until(lambda: len(met) == 2)
        theirs = next(one for one in met if one is not episode)
        forged = AgentEpisode(episode.row, theirs.base_url, episode.api_key, "policy", "", "")
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            await ask(forged, opening(episode))
        async with httpx.AsyncClient() as http:  # a key for policy calls cannot report a reward
            headers = {"Authorization": f"Bearer {episode.api_key}"}
            posted = await http.post(episode.reward_url, json={"reward": 9}, headers=headers)
            assert posted.status_code == 401
        await ask(episode, opening(episode))
        return 1.0

    groups = play(nosy, group_size=2)
    assert [reply.reward.total.value for reply in groups[0]] == [1.0, 1.0]
    with pytest.raises(httpx.HTTPError):
        asyncio.run(ask(met[0], opening(met[0])))


PROGRAM = """
import json, os, socket, sys, zlib
told = json.load(sys.stdin)
host, port = told["base_url"].split("/")[2].split(":")

def post(path, key, body):
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as link:
        head = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {key}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}", "", ""]
        link.sendall("\\r\\n".join(head).encode() + data)
        raw = b"".join(iter(lambda: link.recv(65536), b""))
    return json.loads(raw.partition(b"\\r\\n\\r\\n")[2])

def ask(messages):
    path = "/" + told["base_url"].split("/", 3)[3] + "/chat/completions"
    body = {"model": told["model"], "messages": messages}
    return post(path, os.environ["OPENAI_API_KEY"], body)["choices"][0]["message"]

name, number = told["row"]["id"], int(told["row"]["id"].split("-")[1])
"""
STRESS = f"""{PROGRAM}
said, heard = [{{"role": "user", "content": name}}], ""
for turn in range(3):
    if number % 5 == 3 and turn == 1:
        os.kill(os.getpid(), 9)
    if number % 5 == 4 and turn == 2:
        said = [{{"role": "user", "content": name + " again"}}]
    reply = ask(said)
    heard += reply["content"] + "|"
    said += [reply, {{"role": "user", "content": name}}]
post("/" + told["reward_url"].split("/", 3)[3], told["reward_key"], {{"reward": zlib.crc32(heard.encode())}})
"""


def test_two_hundred_programs_at_once_with_kills_neither_mix_nor_lose_anything(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(STRESS)
    groups = play(rows=200, program=f"{sys.executable} -I -S {file}", at_once=200, outcome="task")
    killed = [reply for [reply] in groups if reply.reward.total.is_missing]
    assert len(killed) == 40 and {reply.reward.total.reason for reply in killed} == {"crashed"}
    for [reply] in groups:
        row = reply.conversation.row.id
        paths = [path.conversation for path in reply.other_paths] + [reply.conversation]
        theirs = {message.content for path in paths for message in path.messages if message.role == "user"}
        assert theirs <= {row, f"{row} again"}, "0 mixed"
        assert len(paths) == 1 + (int(row.split("-")[1]) % 5 == 4)
        if reply not in killed:
            heard = "".join(f"{text}|" for path in paths for text in texts(path))
            assert zlib.crc32(heard.encode()) == reply.reward.total.value, "0 lost: what it heard is what is recorded"


def texts(path: Conversation) -> list[str]:
    return [turn.message.content for turn in path.turns if turn.sample is not None]


def command(tmp_path: Path, code: str) -> str:
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM + code)
    return f"{sys.executable} -I -S {file}"


@pytest.mark.parametrize(("status", "worth"), [(0, 1.0), (5, 0.0)])
def test_a_programs_exit_status_is_its_outcome_if_the_recipe_says_so(tmp_path: Path, status: int, worth: float) -> None:
    code = f"ask(told['row']['messages']); sys.exit({status})"
    [[reply]] = play(program=command(tmp_path, code), outcome="exit")
    assert reply.reward.total.value == worth


def test_a_program_that_fails_is_missing_with_its_last_words_and_leaves_nothing_behind(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(left)!r}, "w").write(str(child.pid))
ask(told["row"]["messages"])
raise ValueError("no such tool")
"""
    [[reply]] = play(program=command(tmp_path, code))
    assert reply.reward.total.reason == "crashed"
    assert "status 1: ValueError: no such tool" in reply.reward.total.why
    pid = int(left.read_text())
    asyncio.run(until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()))


def test_a_missing_agent_program_or_function_is_refused_before_any_work() -> None:
    from upshot.rollout.agents.runner import find_command, find_function

    with pytest.raises(UserError, match="there is no program 'no-such-agent'"):
        find_command("no-such-agent --fast")
    with pytest.raises(UserError, match="has no 'missing'"):
        find_function("upshot.core.score:missing")
    assert find_function("python agent.py") is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("episode.max_turns=2", "decides the number of turns"),
        ("credit.by=turns", "set credit.by=reply"),
        ("train.method=ppo", "train.method 'ppo' takes one per reply"),
        ("train.method=online-dpo", "train.method 'online-dpo' takes one per reply"),
        ("train.kl={weight: 0.1, where: reward}", "set train.kl.where=loss"),
        ("futures={name: classmates, classmates: [policy]}", "but futures 'classmates' continue a single reply"),
        ("episode.agent=no-such-agent", "there is no program 'no-such-agent'"),
    ],
)
def test_settings_that_agents_exclude_are_refused_before_any_work(override: str, words: str) -> None:
    base = {"task": "slots", "episode": {"agent": "true"}, "reward": {"metrics": ["verifier"]}}
    with pytest.raises(UserError, match=words):
        check_names(load_recipe(base, [override]).recipe)
