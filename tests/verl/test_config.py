"""A recipe on verl: every value can be traced to its origin, and nothing is silently dropped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from upshot.config.layers import flatten
from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.verl.config import compose
from upshot.verl.plan import ClusterPlace, is_theirs, uncarried_entry
from upshot.verl.table import CARRIED, LEFT, PLAYED, SPECIAL

PLACE = ClusterPlace("/run", rows=64, prompt_tokens=40, context=256)


def recipe(*overrides: str) -> Recipe:
    own = ["warm_start=null", "model.path=/model", *overrides]
    return load_recipe("quickstart", ["credit.by=reply", *own]).recipe


def value(made: Recipe, key: str, place: ClusterPlace = PLACE) -> object:
    (found,) = [s.value for s in compose(made, place).settings if s.key == key]
    return found


def test_every_key_of_a_recipe_is_translated_used_by_us_or_left_out_with_a_reason() -> None:
    carried = {key for line in CARRIED for key in line.ours}.union(SPECIAL)
    known = [*carried, *PLAYED, *LEFT]
    full = load_recipe("quickstart", ["credit.by=reply", "model.lora={r: 8}"]).recipe
    lost = [
        key
        for key, _ in flatten(full.model_dump(mode="json"))
        if not any(key == k or key.startswith(k + ".") for k in known)
    ]
    assert lost == []


def test_no_key_is_both_used_and_left_out() -> None:
    played = [
        key
        for key, _ in flatten(recipe().model_dump(mode="json"))
        if any(key == k or key.startswith(k + ".") for k in PLAYED)
    ]
    assert [key for key in played if uncarried_entry(key) is not None] == []


def test_every_setting_says_where_it_came_from() -> None:
    plan = compose(recipe(), PLACE)
    assert all(setting.source for setting in plan.settings)
    keys = [setting.key for setting in plan.settings]
    assert len(keys) == len(set(keys))
    told = plan.page()
    assert "actor_rollout_ref.actor.optim.lr=0.0004    ← train.lr" in told


def test_the_quickstart_is_translated_to_verls_keys() -> None:
    made = recipe()
    assert value(made, "data.train_batch_size") == 16
    assert value(made, "actor_rollout_ref.rollout.n") == 8
    assert value(made, "actor_rollout_ref.rollout.top_k") == -1  # 0 must be −1 there
    assert value(made, "data.max_prompt_length") == 40
    assert value(made, "data.max_response_length") == 12
    assert value(made, "trainer.total_training_steps") == 80
    assert value(made, "trainer.total_epochs") == 20
    assert value(made, "trainer.save_freq") == 20
    assert value(made, "trainer.test_freq") == -1
    assert value(recipe("train.save.every=0"), "trainer.save_freq") == 80  # one at the end is always wanted


@pytest.mark.parametrize(("warmup", "steps", "share"), [("0", 0, 0), ("7", 4, 0), ("1.5", 1, 0), ("0.1", 0, 0.1)])
def test_a_warm_up_is_counted_in_steps_or_a_share_of_all(warmup: str, steps: int, share: float) -> None:
    made = recipe("train.minibatches=2", f"train.schedule.warmup_steps={warmup}")
    optim = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    assert (value(made, optim), value(made, f"{optim}_ratio")) == (steps, share)


def test_kl_goes_into_the_loss_or_into_the_reward() -> None:
    loss, reward = recipe("train.kl=0.1"), recipe("train.kl=0.1", "train.kl.where=reward")
    assert (value(loss, "actor_rollout_ref.actor.use_kl_loss"), value(loss, "algorithm.use_kl_in_reward")) == (1, 0)
    assert (value(reward, "actor_rollout_ref.actor.use_kl_loss"), value(reward, "algorithm.use_kl_in_reward")) == (0, 1)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("train.schedule=linear", "no schedule 'linear'"),
        ("train.loss=reinforce", "no loss 'reinforce'"),
        ("train.kl={weight: 0.1, estimator: k3-corrected}", "no KL estimator"),
        ("train.method=dpo", "rl and ppo run on verl, the others"),
        ("train.prompts_per_step=65", "there are 64"),
        ("models.judge=policy@start", "models.judge=/model"),
        ("models.judge=policy@5", "only the newest weights"),
        ("futures={name: classmates, classmates: ['policy@start']}", "name the folder itself"),
        ("futures={name: classmates, classmates: [policy], measure: likelihood}", "log-probabilities of given ids"),
    ],
)
def test_settings_that_verl_lacks_are_refused_by_name(override: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        compose(recipe(override), PLACE).check()


def test_a_reason_is_reported_once() -> None:
    both = recipe("eval.data=b.jsonl")
    both.train.data = "a.jsonl"  # from a file: the command line refuses it earlier
    with pytest.raises(UserError) as refused:
        compose(both, PLACE).check()
    assert str(refused.value).count("for sft and dpo") == 1


def test_a_recipe_that_verl_can_run_is_not_refused() -> None:
    compose(recipe("warm_start={steps: 3, new_model_only: true}"), PLACE).check()  # the model is named
    compose(recipe(), PLACE).check()
    compose(recipe("model.lora={r: 8, dropout: 0}", "train.kl=0.1", "train.importance=truncate"), PLACE).check()


@pytest.mark.parametrize(
    "override",
    [
        "train.method=ppo",
        "train.minibatches=3",
        "train.dynamic_sampling=2",
        "train.async_steps=1",
        "train.importance={rule: mask, low: 0.5}",
        "credit={by: turns, split: true}",
        "credit={by: turns, tokens: answer}",
        "futures={name: classmates, classmates: [a]}",
        "reward.max_missing=0.3",
    ],
)
def test_settings_that_our_trainer_implements_are_not_refused(override: str) -> None:
    compose(recipe(override), PLACE).check()


def test_the_critic_starts_from_the_policy_and_uses_its_learning_rate() -> None:
    made = recipe("train.method=ppo", "train.lr=3e-5", "train.clip.high=0.3", "train.kl=0.1")
    found = {s.key: s.value for s in compose(made, PLACE).settings}
    assert found["critic.enable"] is True and found["critic.model.path"] == found["actor_rollout_ref.model.path"]
    assert found["critic.optim.lr"] == 3e-5 and found["critic.cliprange_value"] == 0.3
    assert found["critic.fsdp.model_dtype"] == "fp32" and found["critic.strategy"] == "fsdp2"
    assert found["algorithm.use_kl_in_reward"] and not found["actor_rollout_ref.actor.use_kl_loss"]
    assert not any(key.startswith("critic.") for key in (s.key for s in compose(recipe(), PLACE).settings))


def test_verls_own_settings_win_and_are_distinguished_from_the_recipes() -> None:
    assert is_theirs("trainer.n_gpus_per_node=8") and is_theirs("+ray_kwargs.ray_init.num_gpus=1")
    assert not is_theirs("train.lr=1") and not is_theirs("reward.max_missing=1") and not is_theirs("model.path=x")
    tensors = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    plan = compose(recipe(), PLACE, ["trainer.n_gpus_per_node=8", f"{tensors}=2"])
    assert plan.value("trainer.n_gpus_per_node") == 8
    found = [s for s in plan.settings if s.key == tensors]
    assert [(s.value, s.source) for s in found] == [(2, "command line")]
    words = compose(recipe(), PLACE, ["+trainer.mine=1", "verl.reward.num_workers=2"]).overrides()
    assert "+trainer.mine=1" in words and "reward.num_workers=2" in words and "reward.num_workers=0" not in words


def test_overrides_are_quoted_as_hydra_reads_them() -> None:
    words = compose(recipe("name='a run'"), PLACE).overrides()
    assert 'trainer.experiment_name="a run"' in words
    assert "trainer.logger=[console]" in words
    assert "++ray_kwargs.ray_init.runtime_env.env_vars.UPSHOT_CLUSTER_RECIPE=/run/workers.yaml" in words
    assert "actor_rollout_ref.actor.loss_scale_factor=null" in words


def test_config_and_rows_need_neither_torch_nor_verl() -> None:
    names = ", ".join(f"upshot.verl.{name}" for name in ("config", "rows", "served", "trajectory"))
    code = f"import sys, {names}\n"
    code += "print([name for name in ('torch', 'verl', 'ray') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_dry_run_on_verl_prints_both_sides_and_what_has_no_counterpart(capsys: pytest.CaptureFixture[str]) -> None:
    from upshot.cli import main

    words = ["model.path=/model", "warm_start=null", "trainer.n_gpus_per_node=8"]
    assert (
        main(["train", "quickstart", "credit.by=reply", "--engine", "verl", "--dry-run", *words]) == 2
    )  # the checks are made as well
    told, wrong = capsys.readouterr()
    assert "upshot: there is no folder '/model'" in wrong
    assert "actor_rollout_ref.rollout.n=8    ← train.group_size" in told
    assert "trainer.n_gpus_per_node=8    ← command line" in told
    assert "train.max_skipped=3    verl has no such guard" in told
    assert main(["train", "quickstart", "credit.by=reply", "--engine", "verl", "--dry-run", "eval.stop_after=5"]) == 2
    told = capsys.readouterr()
    assert "! eval.stop_after=5" in told.out and "cannot run this recipe" in told.err


def test_along_the_tree_settings_that_rows_cannot_express_are_refused_with_alternatives() -> None:
    compose(recipe("credit.by=tree", "train.kl=0.1", "train.kl.where=reward"), PLACE).check()
    with pytest.raises(UserError, match=r"train\.kl\.where=loss.*set train\.kl\.where=reward"):
        compose(recipe("credit.by=tree", "train.kl=0.1"), PLACE).check()
    with pytest.raises(UserError, match=r"train\.entropy=0\.01.*credit\.by=reply"):
        compose(recipe("credit.by=tree", "train.entropy=0.01"), PLACE).check()


def test_along_the_tree_rows_of_futures_fit_the_length() -> None:
    alone, tree = (compose(recipe(f"credit.by={by}"), PLACE) for by in ("reply", "tree"))
    room = tree.value("actor_rollout_ref.rollout.max_model_len") - 1
    assert alone.value("data.max_response_length") < tree.value("data.max_response_length") == room


@pytest.mark.parametrize("word", ["episode.agent=true", "task={name: verifiers, env: gsm8k}"])
def test_episodes_that_a_program_plays_are_refused_by_name(word: str) -> None:
    with pytest.raises(UserError, match=word.partition("=")[0]):
        compose(recipe(word), PLACE).check()


def test_a_new_model_and_a_warm_start_are_made_before_verl_starts() -> None:
    made = load_recipe("quickstart", ["credit.by=reply"]).recipe
    plan = compose(made, PLACE)
    plan.check()
    assert plan.value("actor_rollout_ref.model.path") == "(made at the start)"
    assert "run by local mode before verl starts" in plan.page()
    with pytest.raises(UserError, match="adapters of a warm start"):
        compose(load_recipe("quickstart", ["credit.by=reply", "model.lora={r: 8, dropout: 0}"]).recipe, PLACE).check()


def test_vllm_samples_where_it_is_installed_and_our_engine_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from upshot.verl import config

    for there, name in ((object(), "vllm"), (None, "upshot")):
        monkeypatch.setattr(config.importlib.util, "find_spec", lambda _, there=there: there)
        assert value(recipe(), "actor_rollout_ref.rollout.name") == name


def test_our_engine_is_sent_merged_adapters() -> None:
    given = recipe("model.lora={r: 8, dropout: 0}")
    ours = compose(given, PLACE, ["actor_rollout_ref.rollout.name=upshot"])
    theirs = compose(given, PLACE, ["actor_rollout_ref.rollout.name=vllm"])
    keys = [{s.key for s in plan.settings} for plan in (ours, theirs)]
    assert ["actor_rollout_ref.model.lora.merge" in found for found in keys] == [True, False]


@pytest.mark.parametrize(
    ("word", "way_out"),
    [
        ("actor_rollout_ref.rollout.temperature=0.5", "set episode.temperature of the recipe"),
        ("data.train_batch_size=8", "set train.prompts_per_step of the recipe"),
        ("trainer.logger=[wandb]", "informs the trackers"),
        ("data.val_batch_size=2", "eval.rows"),
        ("trainer.v1.trainer_mode=sync", "set train.async_steps of the recipe"),
        ("trainer.v1.trainer_mode=colocate_async", "set train.async_steps of the recipe"),
        ("trainer.v1.separate_async.parameter_sync_step=2", "verl's own trainers are not used"),
        ("trainer.use_v1=false", "one of verl's v1"),
        ("algorithm.gamma=0.5", "set train"),
        ("+algorithm.rollout_correction.rollout_is=token", "set train"),
        ("actor_rollout_ref.model.path=/other", "set model.path"),
        ("trainer.save_freq=3", "set train.save.every"),
    ],
)
def test_verl_settings_that_belong_to_the_recipe_are_refused_with_its_key(word: str, way_out: str) -> None:
    with pytest.raises(UserError, match=f"cannot be set on the command line: .*{way_out}"):
        compose(recipe(), PLACE, [word])


def test_verl_settings_without_effect_on_the_run_are_accepted() -> None:
    same = compose(recipe(), PLACE).value("data.train_batch_size")
    free = [
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    ]
    plan = compose(recipe(), PLACE, [f"data.train_batch_size={same}", "trainer.n_gpus_per_node=4", *free])
    assert plan.ranks == 4 and plan.value("actor_rollout_ref.actor.strategy") == "megatron"


def test_the_users_external_libraries_are_imported_beside_ours() -> None:
    key = "actor_rollout_ref.model.external_lib"
    ours = "upshot.verl.adapters.register"
    assert compose(recipe(), PLACE, [f"{key}=mine"]).value(key) == [ours, "mine"]
    assert compose(recipe(), PLACE, [f"{key}=[mine, other]"]).value(key) == [ours, "mine", "other"]


@pytest.mark.parametrize(
    ("words", "backend", "mode"),
    [
        (["episode.top_p=1", "episode.top_k=0"], "vllm", None),
        (["episode.top_p=0.9"], "vllm", "raw_logprobs"),
        (["episode.top_k=20"], "vllm", "raw_logprobs"),
        (["episode.top_k=20", "episode.temperature=0.7"], "upshot", None),
    ],
)
def test_servers_give_log_probabilities_of_the_distribution_before_it_is_cut(
    words: list[str], backend: str, mode: str | None
) -> None:
    """vLLM's default is after the cut: 0.24 apart from the trainer's, a divergence of 0.29 at the first update."""
    plan = compose(recipe(*words), PLACE, [f"actor_rollout_ref.rollout.name={backend}"])
    plan.check()
    assert plan.value("actor_rollout_ref.rollout.logprobs_mode") == mode


def test_a_server_that_cannot_give_them_is_refused() -> None:
    for words, backend in (["episode.top_p=0.9", "episode.temperature=0.7"], "vllm"), (["episode.top_p=0.9"], "sglang"):
        with pytest.raises(UserError, match=r"episode.top_p=0.9.*rollout.name=upshot"):
            compose(recipe(*words), PLACE, [f"actor_rollout_ref.rollout.name={backend}"]).check()


def test_without_flash_attention_another_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from upshot.verl import config

    key = "actor_rollout_ref.model.override_config.attn_implementation"
    for there, wanted in ((object(), None), (None, "sdpa")):
        monkeypatch.setattr(config.importlib.util, "find_spec", lambda _, there=there: there)
        assert compose(recipe(), PLACE).value(key) == wanted
    assert compose(recipe(), PLACE, [f"+{key}=eager"]).value(key) == "eager"
