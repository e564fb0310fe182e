"""`upshot recipe import`: settings of the originals become a recipe, and what does not is listed with the reason."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from upshot.cli import main, make_parser
from upshot.config.load import load_recipe
from upshot.core.errors import UserError
from upshot.offline.migrate.recipe import carry
from upshot.offline.migrate.theirs import read, read_config, read_script

VERL = r"""
set -x
PROJECT_DIR="$(pwd)"
RESUME_PATH="${1:-}"
python3 -m verl.trainer.main_ppo \
    --config-name collabllm_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/collabllm-math-hard-large/rl_train.parquet \
    data.val_files=$HOME/data/collabllm-math-hard-large/rl_validation.parquet \
    +reward_model.reward_kwargs.metric_weights.accuracy=1 \
    +reward_model.reward_kwargs.metric_weights.bleu_score=0.5 \
    +reward_model.reward_kwargs.metric_weights.token_amount=-0.0001 \
    +reward_model.reward_kwargs.llm_judge_kwargs.model=gpt-4o-mini \
    data.train_batch_size=16 \
    actor_rollout_ref.model.path="Qwen/Qwen2.5-7B-Instruct" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.max_user_turns=2 \
    actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3 \
    actor_rollout_ref.rollout.shiny=1 \
    made.up=1 \
    trainer.logger='["console", "wandb"]' \
    trainer.experiment_name='my run/one' \
    trainer.save_freq=-1 trainer.test_freq=10 trainer.total_epochs=20 \
    trainer.resume_from_path=null
"""

CLASSMATE = r"""
data_dir=./data
export SOME_API_KEY="do-not-show-me"
train_files="['${data_dir}/gsm8k/train.parquet']"
think_start_str="<think>"
classmate_list='["meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B"]'
train_size=8000   # after filtering
batch=16
steps=$(((train_size + batch - 1) / batch * 3))
#python3 -m verl.trainer.main_ppo data.seed=7
python3 -m verl.trainer.classmate_cot_main_ppo algorithm.adv_estimator=grpo_w_classmate \
    data.train_files="$train_files" data.train_batch_size=${batch} data.max_response_length=3072 \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((batch / 2)) \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.1 \
    trainer.save_freq=$((steps / 10)) trainer.total_epochs=3 $@ \
    reward_model.classmate_cot_reward_configs.classmate_reward_weight=0.5 \
    reward_model.classmate_cot_reward_configs.classmate_reward_type=remove_wo_cot \
    reward_model.classmate_cot_reward_configs.token_level_classmate_reward_mode=classmate_partial \
    reward_model.classmate_cot_reward_configs.classmate_model_name_or_path_list=${classmate_list} \
    reward_model.classmate_cot_reward_configs.main_cot_keep_rate=first-100-tokens \
    "reward_model.think_start_str='${think_start_str}'" "reward_model.think_end_str='</think>'" \
    "reward_model.classmate_think_start_str='### Reasoning'" "reward_model.classmate_think_end_str='### Output'" \
    reward_model.judge_api_key=do-not-show-me \
    trainer.default_local_dir="${WHO_KNOWS}/x"
"""

ONLINE = r"""
ENABLE_COLLABLLM_LOGGING=0 CUDA_VISIBLE_DEVICES=0,1 \
    torchrun --master_port=56500 --nproc_per_node=8 -m scripts.train.online_dpo \
    --dataset_name math-hard --dataset_repo collabllm/collabllm-multiturn-math-hard \
    --metric_names "accuracy" "interactivity" "token_amount" --metric_weights 1 0.5 -0.5 \
    --user_generation_kwargs '{"model": "gpt-4o-mini", "temperature": 0.9}' \
    --assistant_generation_kwargs '{"model": "x", "temperature": 0.6}' \
    --reward_generation_kwargs '{"model": "claude-3-5-sonnet-latest"}' \
    --model_name outputs/sft --output_dir outputs/online_dpo --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 --num_train_epochs 1 --learning_rate 5e-6 --num_samples 3 --max_new_turns 4 \
    --use_lora --use_4bit
"""


def imported(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], name: str = "theirs.sh"):
    """The recipe and what the command told on stderr."""
    (tmp_path / name).write_text(text)
    assert main(["recipe", "import", str(tmp_path / name), "--out", str(tmp_path / "mine.yaml")]) == 0
    return load_recipe(str(tmp_path / "mine.yaml")).recipe, capsys.readouterr().err


def test_the_verl_recipes_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, told = imported(tmp_path, VERL, capsys)
    assert recipe.task.name == "math-hard" and recipe.name == "my-run-one" and recipe.trackers == ["wandb"]
    assert recipe.task.options["train_file"] == "~/data/collabllm-math-hard-large/rl_train.parquet"
    assert {m.name: m.weight for m in recipe.reward.metrics} == {
        "accuracy": 1,
        "bleu_score": 0.5,
        "token_amount": -1e-4,
    }
    train = recipe.train
    assert (train.lr, train.kl.weight, train.kl.estimator, train.minibatches, train.group_size) == (
        1e-6,
        0.001,
        "k3",
        2,
        8,
    )
    assert (train.epochs, train.save.every, recipe.eval.every) == (20, 0, 10)
    assert (recipe.futures.rounds, recipe.futures.samples) == (2, 3) and recipe.futures.user.name == "llm"
    assert recipe.models["judge"].model == recipe.models["user"].model == "openai/gpt-4o-mini"
    assert "not carried: made.up=1: no counterpart is known" in told
    assert "fsdp_config.param_offload=True: each process holds the model" in told
    assert "rollout.shiny=1: the embedded engine has no such setting" in told
    assert "resume_from_path" not in told  # null is the key left out


def test_the_classmate_forks_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, told = imported(tmp_path, CLASSMATE, capsys)
    assert recipe.task.name == "gsm8k" and recipe.seed == 0  # a launch in a comment is none
    assert recipe.task.options["train_file"] == "./data/gsm8k/train.parquet"
    options = recipe.futures.options
    assert recipe.futures.name == "classmates" and options["weight"] == 0.5 and options["keep"] == "first-100-tokens"
    assert (options["reward"], options["tokens"]) == ("without-thought", "kept")
    assert options["classmates"][1] == {"name": "peer2", "think": ["### Reasoning", "### Output"]}
    assert recipe.models["peer2"].model == "local:Qwen/Qwen3-0.6B"
    assert recipe.episode.think == ("<think>", "</think>") and recipe.train.advantage.name == "dr-grpo"
    assert (recipe.train.minibatches, recipe.train.save.every, recipe.train.kl.weight) == (2, 150, 0.0)
    assert "default_local_dir=${WHO_KNOWS}/x: the shell alone knows its value" in told
    assert "do-not-show-me" not in told + (tmp_path / "mine.yaml").read_text()


def test_collabllms_own_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, told = imported(tmp_path, ONLINE, capsys)
    assert recipe.train.method == "online-dpo" and recipe.train.prompts_per_step == 1 * 4 * 8
    weights = {metric.name: metric.weight for metric in recipe.reward.metrics}
    assert weights == {"accuracy": 1, "interactivity": 0.5, "token_amount": -0.0005}  # thousands there, tokens here
    assert recipe.futures.rounds == 2  # four messages are two rounds
    assert recipe.models["judge"].model == "anthropic/claude-3-5-sonnet-latest" and recipe.model.lora.r == 32
    assert recipe.futures.user.options["temperature"] == 0.9 and recipe.episode.temperature == 0.6
    assert "not carried: --use_4bit=True" in told


def test_a_hydra_config_and_a_file_of_arguments_are_read(tmp_path: Path) -> None:
    nested = yaml.safe_dump({"hydra": {"x": 1}, "actor_rollout_ref": {"rollout": {"n": 4}}, "data": {"seed": 3}})
    assert carry(read_config(nested)).recipe["train"] == {"group_size": 4}
    flat = carry(read_config("learning_rate: 0.00001\nuse_lora: true\nminimum_gap: 0.02\n"))
    assert flat.recipe["train"] == {"lr": 1e-5, "dpo": {"min_gap": 0.02}} and flat.recipe["model"] == {
        "lora": {"r": 32}
    }
    assert read_config(nested).original == "verl" and read_config("peft_r: 3").original == "collabllm"


def test_the_files_that_a_script_names_are_read_beside_it(tmp_path: Path) -> None:
    user = {"user_model": "gpt-4o", "num_retries": 5, "max_tokens": 512, "temperature": 0.7, "enable_log": True}
    files = {
        "train.sh": VERL.replace("made.up=1", "actor_rollout_ref.rollout.multi_turn.interaction_config_path=$X/i.yaml"),
        "trainer.yaml": "data: {seed: 3, train_batch_size: 99}\n",
        "interaction.yaml": yaml.safe_dump({"interaction": [{"name": "collabllm", "class_name": "x", "config": user}]}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["recipe", "import", *(str(tmp_path / name) for name in files), "--out", str(tmp_path / "m.yaml")]) == 0
    recipe = load_recipe(str(tmp_path / "m.yaml")).recipe
    assert recipe.seed == 3 and recipe.train.prompts_per_step == 16  # the script has the last word
    assert (recipe.models["user"].model, recipe.models["user"].retries) == ("openai/gpt-4o", 5)
    assert recipe.futures.user.options == {"model": "user", "max_tokens": 512, "temperature": 0.7}


def test_sft_and_dpo_learn_from_their_file(tmp_path: Path) -> None:
    script = "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=d/medium/sft_train.parquet optim.lr=1e-6 $@"
    recipe = carry(read_script(script)).recipe
    assert recipe["train"] == {"lr": 1e-6, "method": "sft", "data": "d/medium/sft_train.parquet"}
    assert recipe["task"] == {"name": "medium"}


def test_a_published_set_must_be_prepared_before_sft_learns_from_it() -> None:
    script = "torchrun -m scripts.train.sft --dataset_repo collabllm/collabllm-multiturn-medium --model_name m"
    carried = carry(read_script(script))
    assert carried.recipe["train"] == {"method": "sft", "data": "data/medium/sft_train.parquet"}
    command = "upshot data prepare --dataset collabllm/collabllm-multiturn-medium --for sft --out data/medium"
    assert command in carried.left[-1][2]


BUILD = r"""
python -m scripts.engine.build_dataset \
    --dataset_name bigcodebench --metric_names "runnable code->pass_rate" "token_amount" --metric_weights 1 -0.5 \
    --user_generation_kwargs '{"model": "openai/mine", "api_base": "http://host:1/v1"}' \
    --assistant_generation_kwargs '{"model": "gpt-4o", "temperature": 0.8}' \
    --reward_generation_kwargs '{"model": "claude-3-5-sonnet-latest"}' \
    --output_dir outputs/data --train_size 100 --hf_entity collabllm --max_new_turns 4
"""


def test_a_script_that_builds_data_becomes_the_line_that_builds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "build.sh").write_text(BUILD)
    assert main(["recipe", "import", str(tmp_path / "build.sh")]) == 0
    said = capsys.readouterr()
    words = shlex.split(said.out.replace("\\\n", ""), comments=True)
    args = make_parser(words[1:]).parse_args(words[1:])
    assert (args.task, args.out, args.conversations, args.candidates) == ("bigcodebench", "outputs/data", 100, 2)
    assert (args.policy, args.user) == ("openai/gpt-4o", "http://host:1/v1#mine") and args.temperature == 0.8
    assert args.judge == "anthropic/claude-3-5-sonnet-latest" and args.rounds == 2
    assert args.metrics == "runnable code->pass_rate=1,token_amount=-0.0005"
    assert (args.proactive_share, args.proactive, args.system_share) == (0.5, "json", 0)  # their defaults, not ours
    assert args.push is None and "not carried: --hf_entity" in said.err


def test_the_kl_of_the_reward_the_entropy_bonus_and_the_loss_are_carried() -> None:
    script = (
        "python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 "
        "actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.5 "
        "actor_rollout_ref.actor.entropy_coeff=0.02 actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
        "algorithm.adv_estimator=reinforce_plus_plus_baseline"
    )
    train = carry(read_script(script)).recipe["train"]
    assert (train["kl"], train["entropy"], train["loss"]) == ({"where": "reward", "weight": 0.01}, 0.02, "gspo")
    assert train["advantage"] == {"name": "reinforce++", "baseline": "group"}
    both = carry(read_script(script.replace("use_kl_loss=False", "use_kl_loss=True")))
    assert both.recipe["train"]["kl"] == {"weight": 0.5}
    assert [why for name, _, why in both.left if name == "algorithm.use_kl_in_reward"] != []


def test_a_lower_bound_goes_into_the_line_that_prepares_the_data() -> None:
    script = "torchrun -m scripts.train.sft --dataset_repo a/b --lower_bound_metric rewards.accuracy --lower_bound 0.5"
    assert "--for sft --min accuracy=0.5 --out" in carry(read_script(script)).left[-1][2]


def test_a_key_inside_a_value_is_not_shown() -> None:
    script = """torchrun -m scripts.train.ppo --user_generation_kwargs '{"model": "$M", "api_key": "sk-1"}'"""
    [(name, shown, _)] = carry(read_script(script)).left
    assert name == "--user_generation_kwargs" and "sk-1" not in str(shown)


def test_what_is_none_of_theirs_is_refused(tmp_path: Path) -> None:
    for name, text, match in (
        ("a.sh", "echo hello", "launches nothing"),
        ("a.yaml", "- 1", "no mapping"),
        ("a.txt", "", "no .sh"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=match):
            read(str(tmp_path / name))
