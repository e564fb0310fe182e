# %% [markdown]
# # CollabLLM from zero
#
# CollabLLM scores a reply by the conversation that follows it. This page shows every stage with a tiny model
# on a CPU: a warm start, what single replies are worth, training with two rewards, and a comparison. The last section
# has the commands for real models.

# %%
import upshot
from upshot.tasks.slots import SlotsTask

WARM_STEPS, STEPS, ROWS = 120, 60, 200

# %% [markdown]
# ## A customer with a hidden goal
#
# The task `slots` is a shop. The customer wants a thing of a certain size and colour, and mentions all, some or none of
# this in the first message. The policy never sees the goal or the reference.

# %%
task = SlotsTask()
row = next(row for row in task.rows("test") if row.messages[-1].content.endswith("something"))
print("says  ", row.messages[-1].content)
print("wants ", row.goal)

# %% [markdown]
# ## A model that mostly guesses
#
# The warm start imitates demonstrations in which the assistant mostly guesses what the customer left unsaid.

# %%
warm = upshot.train("quickstart", warm_start={"steps": WARM_STEPS}, train={"steps": 0}, run_dir="runs/warm")
print(warm.status["state"], warm.checkpoint)

# %% [markdown]
# ## What is a reply worth?
#
# Scored as it stands (0 rounds), a question earns nothing. Scored by its futures (2 rounds), it earns what the
# conversation leads to: the customer answers, and the model continues. `upshot.reward` plays these futures for any
# candidates, policy and user.

# %%
candidates = ["which size and colour and thing ?", "here is a small red lamp"]
for rounds in (0, 2):
    replies = upshot.reward(
        list(row.messages), candidates, goal=row.goal, reference=row.reference, meta=dict(row.meta),
        task=task, metrics={"verifier": 1.0}, policy=str(warm.checkpoint), user=task.user(),
        rounds=rounds, samples=16, max_tokens=12,
    )  # fmt: skip
    for text, reply in zip(candidates, replies, strict=True):
        print(f"{rounds} rounds  {reply.reward.total.value:.2f}  {text}")

# %% [markdown]
# One of the futures, turn by turn:

# %%
for message in replies[0].futures[0].conversation.messages:
    print(f"{message.role:>9}: {message.content}")

# %% [markdown]
# ## Two rewards, two models
#
# Both models start from the same warm start and train for the same number of steps. For the first, every reply is
# scored as it stands; for the second, by two futures of up to two rounds, with credit along the tree.

# %%
shared = {
    "model": {"path": str(warm.checkpoint)},
    "warm_start": None,
    "train.steps": STEPS,
    "eval": {"every": STEPS, "rows": ROWS},
}
single = upshot.train("quickstart", run_dir="runs/single", **shared, **{"futures.rounds": 0, "credit.by": "reply"})
multi = upshot.train("quickstart", run_dir="runs/multi", **shared)


def held_out(run: upshot.runs.RunFolder, key: str) -> float:
    """The last evaluation of a run."""
    return [line[key] for line in run.metrics if key in line][-1]


def played(run: upshot.runs.RunFolder) -> list[dict]:
    """The replies of its last step."""
    last = max(reply["step"] for reply in run.replies)
    return [reply for reply in run.replies if reply["step"] == last]


# %%
for name, run in {"single-reply": single, "multiturn-aware": multi}.items():
    asks = [reply["reply"].startswith("which") for reply in played(run)]
    tokens = held_out(run, "eval/rollout/reply_tokens")
    print(f"{name:16} asks in {sum(asks) / len(asks):.0%} of its last replies; held out {tokens:.1f} tokens a reply")

# %% [markdown]
# ## What was measured
#
# This notebook is short and has one seed. `make demo` trains longer and evaluates whole conversations; its table is in
# [five minutes](../tour.md).
#
# The second training also trains what the policy says in the futures (credit along the tree). With a real model and
# `dr-grpo` (the quickstart's estimator), `rloo` or PPO, this decides whether the model keeps what it learned: if only
# the reply is trained, it learns to ask every time and forgets how to answer. With `grpo` it does not forget, the tree
# adds a few hundredths, and the model asks only where something is missing: [results](../results.md), [why the
# tree](../why/tree.md).
#
# ## The same with real models
#
# The published settings are recipes. They need a GPU, a hub or data, a user model and a judge. We have not run these
# commands with an 8B model ([what we have run](../results.md)):
#
#     upshot data build --task math-hard --policy SPEC --user SPEC --judge SPEC --out data/built          # (key, hub)
#     upshot data prepare --dataset data/built --for sft --out data/math-hard                             # (GPU)
#     upshot data prepare --dataset data/built --for rl --out data/math-hard                              # (GPU)
#     upshot train collabllm-sft model.path=MODEL                                                         # (GPU)
#     upshot train collabllm-grpo model.path=CHECKPOINT models.user=SPEC models.judge=SPEC                # (GPU, key)
#     upshot eval --task math-hard --models base=MODEL,trained=runs/… --user SPEC --judge SPEC  # (GPU, key, hub)
#
# `make collabllm-smoke` runs these steps end to end on tiny models. Details: [CollabLLM](../collabllm.md),
# [data](../data.md), [evaluation](../evaluation.md).
