# %% [markdown]
# # CollabLLM from zero
#
# CollabLLM scores a reply by the conversation that follows it. This page shows the method with a tiny model on a CPU,
# in four stages: train a model that mostly guesses, score single replies, train with two different rewards, and
# compare the two models. The last section has the commands for real models.

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
# Both trainings below start from the same model. It was trained to imitate demonstrations (the *warm start*) in which
# the assistant mostly guesses what the customer did not say.

# %%
warm = upshot.train("quickstart", warm_start={"steps": WARM_STEPS}, train={"steps": 0}, run_dir="runs/warm")
print(warm.status["state"], warm.checkpoint)

# %% [markdown]
# ## What is a reply worth?
#
# With 0 rounds, a reply is scored as it stands, so a question earns nothing. With 2 rounds, it is scored by its
# *futures*: the customer answers, the model continues, and the end of the conversation is scored. `upshot.reward`
# plays and scores these futures for any replies, policy and user.

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
# Both models start from the warm start and train for the same number of steps. For the first model, every reply is
# scored as it stands. For the second, every reply is scored by two futures of up to two rounds. The second also
# trains what the model says in the futures (credit along the tree).

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
# This notebook trains only for a few steps, with one seed. `make demo` trains longer and evaluates whole
# conversations; its table is in [five minutes](../tour.md).
#
# How much credit along the tree matters depends on the estimator. With a real model and `dr-grpo` (the quickstart's
# estimator), `rloo` or PPO, a model that is trained only on the reply learns to ask every time and forgets how to
# answer. Along the tree it does not forget. With `grpo` it does not forget in either case, and it asks only where
# something is missing; the tree then adds a few hundredths to the share of correct answers. See
# [results](../results.md) and [why the tree](../why/tree.md).
#
# ## The same with real models
#
# The published settings are recipes. They need a GPU, data (from the hub or your own), a user model and a judge. We
# have not run these commands with an 8B model ([what we have run](../results.md)):
#
#     upshot data build --task math-hard --policy SPEC --user SPEC --judge SPEC --out data/built          # (key, hub)
#     upshot data prepare --dataset data/built --for sft --out data/math-hard                             # (GPU)
#     upshot data prepare --dataset data/built --for rl --out data/math-hard                              # (GPU)
#     upshot train collabllm-sft model.path=MODEL                                                         # (GPU)
#     upshot train collabllm-grpo model.path=CHECKPOINT models.user=SPEC models.judge=SPEC                # (GPU, key)
#     upshot eval --task math-hard --models base=MODEL,trained=runs/… --user SPEC --judge SPEC  # (GPU, key, hub)
#
# `make collabllm-smoke` runs all of these steps on tiny models. Details: [CollabLLM](../collabllm.md),
# [data](../data.md), [evaluation](../evaluation.md).
