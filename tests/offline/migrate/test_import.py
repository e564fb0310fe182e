"""`upshot recipe import`: settings of the originals become a recipe; settings without a counterpart are listed with
reasons."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from upshot.cli import main, make_parser
from upshot.config.load import load_recipe
from upshot.core.errors import UserError
from upshot.offline.migrate.recipe import ImportedRecipe, carry, find_script
from upshot.offline.migrate.theirs import read, read_all, read_config, read_script

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


def carried(script: str) -> ImportedRecipe:
    """What the first training command of a script becomes."""
    return carry(next(read_script(script)))


DROP = ("--drop=made.up", "--drop=actor_rollout_ref.rollout.shiny")


def imported(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], name: str = "theirs.sh"):
    """The recipe and what the command printed on stderr."""
    (tmp_path / name).write_text(text)
    assert main(["recipe", "import", str(tmp_path / name), "--out", str(tmp_path / "mine.yaml"), *DROP]) == 0
    return load_recipe(str(tmp_path / "mine.yaml")).recipe, capsys.readouterr().err


def test_the_verl_recipes_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, told = imported(tmp_path, VERL, capsys)
    assert recipe.task.name == "math-hard" and recipe.name == "my-run-one" and recipe.trackers == ["wandb"]
    assert recipe.task.options["train_file"] == "~/data/collabllm-math-hard-large/rl_train.parquet"
    assert {m.name: m.weight for m in recipe.reward.metrics} == {
        "accuracy": 1,
        "document->bleu": 0.5,  # from the document that the judge extracts, as in the original
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
    assert "not imported: made.up=1: no counterpart is known" in told
    assert "fsdp_config.param_offload=True: each process holds the weights" in told
    assert "rollout.shiny=1: no counterpart is known" in told  # an unknown setting may change the result
    assert recipe.train.optimizer.weight_decay == 0.01  # verl's default
    assert "resume_from_path" not in told  # null: the key is left out


def test_the_classmate_forks_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, told = imported(tmp_path, CLASSMATE, capsys)
    assert recipe.task.name == "gsm8k" and recipe.seed == 0  # a command in a comment does not count
    assert recipe.task.options["train_file"] == "./data/gsm8k/train.parquet"
    options = recipe.futures.options
    assert recipe.futures.name == "classmates" and options["weight"] == 0.5 and options["keep"] == "first-100-tokens"
    assert (options["reward"], options["tokens"]) == ("without-thought", "kept")
    assert options["classmates"][1] == {"name": "peer2", "think": ["### Reasoning", "### Output"]}
    assert recipe.models["peer2"].model == "local:Qwen/Qwen3-0.6B"
    assert recipe.episode.think == ("<think>", "</think>") and recipe.train.advantage.name == "dr-grpo"
    assert (recipe.train.minibatches, recipe.train.save.every, recipe.train.kl.weight) == (2, 150, 0.0)
    assert "default_local_dir=${WHO_KNOWS}/x: only the shell knows its value" in told
    assert "do-not-show-me" not in told + (tmp_path / "mine.yaml").read_text()


def test_collabllms_own_script_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, _ = imported(tmp_path, ONLINE, capsys)
    assert recipe.train.method == "online-dpo" and recipe.train.prompts_per_step == 1 * 4 * 8
    weights = {metric.name: metric.weight for metric in recipe.reward.metrics}
    assert weights == {
        "accuracy": 1,
        "interactivity": 0.5,
        "token_amount": -0.0005,
    }  # thousands in the original, tokens here
    assert recipe.futures.rounds == 2  # four messages are two rounds
    assert recipe.models["judge"].model == "anthropic/claude-3-5-sonnet-latest" and recipe.model.lora.r == 32
    assert recipe.futures.user.options["temperature"] == 0.9 and recipe.episode.temperature == 0.6
    assert recipe.model.quantize == "4bit"


def test_a_hydra_config_and_a_file_of_arguments_are_read(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(yaml.safe_dump({"hydra": {"x": 1}, "actor_rollout_ref": {"rollout": {"n": 4}}}))
    flat.write_text("learning_rate: 1e-5\nuse_lora: true\nminimum_gap: 0.02\n")
    weights = {"optimizer": {"weight_decay": 0.01}}  # verl's default
    assert carry(read_config(str(nested))).recipe["train"] == {"group_size": 4, **weights}
    recipe = carry(read_config(str(flat))).recipe
    assert recipe["train"] == {"lr": 1e-5, "dpo": {"min_gap": 0.02}} and recipe["model"] == {"lora": {}}


def test_the_files_that_a_script_names_are_read_beside_it(tmp_path: Path) -> None:
    user = {"user_model": "gpt-4o", "num_retries": 5, "max_tokens": 512, "temperature": 0.7, "enable_log": True}
    files = {
        "train.sh": VERL.replace("made.up=1", "actor_rollout_ref.rollout.multi_turn.interaction_config_path=$X/i.yaml"),
        "trainer.yaml": "data: {seed: 3, train_batch_size: 99}\n",
        "interaction.yaml": yaml.safe_dump({"interaction": [{"name": "collabllm", "class_name": "x", "config": user}]}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert (
        main(["recipe", "import", *(str(tmp_path / name) for name in files), "--out", str(tmp_path / "m.yaml"), *DROP])
        == 0
    )
    recipe = load_recipe(str(tmp_path / "m.yaml")).recipe
    assert recipe.seed == 3 and recipe.train.prompts_per_step == 16  # the script overrides it
    assert (recipe.models["user"].model, recipe.models["user"].retries) == ("openai/gpt-4o", 5)
    assert recipe.futures.user.options == {"model": "user", "max_tokens": 512, "temperature": 0.7}


def test_sft_and_dpo_train_on_their_data_file(tmp_path: Path) -> None:
    script = "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=d/medium/sft_train.parquet optim.lr=1e-6 $@"
    recipe = carried(script).recipe
    defaults = {"weight_decay": 0.01, "betas": [0.9, 0.95]}, {"name": "cosine", "warmup_steps": 0.1}  # verl's
    assert recipe["train"] == {"lr": 1e-6, "method": "sft", "data": "d/medium/sft_train.parquet"} | dict(
        zip(("optimizer", "schedule"), defaults, strict=True)
    )
    assert recipe["task"] == {"name": "medium"}


def test_a_published_set_must_be_prepared_before_sft_learns_from_it() -> None:
    script = "torchrun -m scripts.train.sft --dataset_repo collabllm/collabllm-multiturn-medium --model_name m"
    done = carried(script)
    assert done.recipe["train"] == {"method": "sft", "data": "data/medium/sft_train.parquet"}
    assert done.recipe["eval"] == {
        "data": "data/medium/sft_validation.parquet"
    }  # otherwise eval.every stops it from starting
    command = "upshot data prepare --dataset collabllm/collabllm-multiturn-medium --for sft --out data/medium"
    assert command in done.left[-1][2]


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
    assert (args.proactive_share, args.proactive, args.system_share) == (0.5, "json", 0)  # the original's
    assert args.push is None and "not imported: --hf_entity" in said.err


def test_the_kl_in_the_reward_the_entropy_bonus_and_the_loss_are_carried_over() -> None:
    script = (
        "python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 "
        "actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.5 "
        "actor_rollout_ref.actor.entropy_coeff=0.02 actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
        "algorithm.adv_estimator=reinforce_plus_plus_baseline"
    )
    train = carried(script).recipe["train"]
    assert (train["kl"], train["entropy"], train["loss"]) == ({"where": "reward", "weight": 0.01}, 0.02, "gspo")
    assert train["advantage"] == {"name": "reinforce++", "baseline": "group"}
    both = carried(script.replace("use_kl_loss=False", "use_kl_loss=True"))
    assert both.recipe["train"]["kl"] == {"weight": 0.5}
    assert [why for name, _, why in both.left if name == "algorithm.use_kl_in_reward"] != []


def test_a_lower_bound_goes_into_the_line_that_prepares_the_data() -> None:
    script = "torchrun -m scripts.train.sft --dataset_repo a/b --lower_bound_metric rewards.accuracy --lower_bound 0.5"
    assert "--for sft --min accuracy=0.5 --out" in carried(script).left[-1][2]


def test_a_secret_inside_a_value_is_not_shown() -> None:
    script = """torchrun -m scripts.train.ppo --user_generation_kwargs '{"model": "$M", "api_key": "sk-1"}'"""
    [(name, shown, _)] = carried(script).left
    assert name == "--user_generation_kwargs" and "sk-1" not in str(shown)


def test_files_that_launch_no_known_original_are_refused(tmp_path: Path) -> None:
    for name, text, match in (
        ("a.sh", "echo hello", "launches nothing"),
        ("b.sh", "python examples/finetune.py --seed 1", "launches 'examples/finetune.py', which has no"),
        (
            "c.sh",
            "accelerate launch --config_file zero3.yaml trl/dpo.py --beta 1",
            "launches 'trl/dpo.py', which has no",
        ),
        ("a.yaml", "- 1", "nor a mapping"),
        ("a.txt", "", "neither a .sh"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=match):
            read(str(tmp_path / name), find_script)


def test_a_setting_of_an_unknown_original_says_where_it_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trl.yaml").write_text("num_generations: 8\nloss_type: dr_grpo\nlogging_first_step: true\n")
    assert main(["recipe", "import", str(tmp_path / "trl.yaml"), "task.name=gsm8k"]) == 2
    err = capsys.readouterr().err
    assert "--num_generations=8 (here it is train.group_size)" in err
    assert "--loss_type=dr_grpo (here it is train.length_norm=constant)" in err
    assert "--logging_first_step=True (no counterpart is known)" in err


def test_ppo_starts_from_the_model_that_sft_trained(tmp_path: Path) -> None:
    script = "torchrun -m scripts.train.ppo --dataset_name math-hard --model_name outputs/sft --base_model_name a/b"
    done = carried(script)
    assert done.recipe["model"] == {"path": "outputs/sft"}
    assert ("--base_model_name", "a/b", "the adapter in --model_name names its own base") in done.left


def test_prompts_that_are_too_long_are_dropped_as_in_the_original() -> None:
    start = "python -m verl.trainer.main_ppo data.truncation="
    rules = {"error": None, "left": "truncate", "error data.filter_overlong_prompts=True": "filter"}
    for words, rule in rules.items():
        assert carried(f"{start}{words}").recipe.get("episode", {}).get("long_prompts") == rule
    [(_, _, why)] = carried(f"{start}right").left
    assert "known values: error, left" in why


def test_models_keep_the_name_of_their_provider() -> None:
    judge = "+reward_model.reward_kwargs.llm_judge_kwargs.model"
    assert carried(f"python -m verl.trainer.main_ppo {judge}=deepinfra/Qwen/Qwen3-32B").recipe["models"] == {
        "judge": "deepinfra/Qwen/Qwen3-32B"
    }
    fork = "python -m verl.trainer.main_ppo reward_model.llm_judge_model_name=Qwen/Qwen3-32B"
    assert carried(fork).recipe["models"] == {"judge": "local:Qwen/Qwen3-32B"}
    for key in ("sandbox_fusion_url", "sandbox_fusion.url"):  # from the fork, and from verl
        script = f"python -m verl.trainer.main_ppo reward_model.{key}=http://host:8082/run_code"
        assert carried(script).recipe["sandbox"] == "fusion+http://host:8082"


CONFIGS = "reward_model.classmate_cot_reward_configs"
SEPARATED = f"""python3 -m verl.trainer.qwen_classmate_cot_main_ppo \\
    algorithm.adv_estimator=grpo_main_classmate_separated data.train_files="['./data/gsm8k/train.parquet']" \\
    {CONFIGS}.classmate_reward_weight=1 {CONFIGS}.classmate_reward_type=random_truncate \\
    {CONFIGS}.main_cot_keep_rate_min=0.3 {CONFIGS}.main_cot_keep_rate_max=0.9 \\
    reward_model.classmate_num_return_sequences=2 reward_model.think_start_str=$'<think>\\n' \\
    "reward_model.think_end_str='</think>'"
"""


def test_classmates_in_a_yaml_are_read_if_it_is_given_and_requested_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, config, out = tmp_path / "run.sh", tmp_path / "trainer.yaml", tmp_path / "mine.yaml"
    script.write_text(SEPARATED)
    names = {"classmate_model_name_or_path_list": None, "classmate_reward_weight": 9}
    given = {"reward_model": {"classmate_cot_reward_configs": names, "classmate_use_vllm": True}}
    config.write_text(yaml.safe_dump(given))
    for words, why in (([], "stands in its YAML"), ([str(config)], "is null in the files given")):
        assert main(["recipe", "import", str(script), *words, "--out", str(out)]) == 2
        assert f"{CONFIGS}.classmate_model_name_or_path_list {why}" in capsys.readouterr().err
    names["classmate_model_name_or_path_list"] = ["Qwen/Qwen3-0.6B"]
    config.write_text(yaml.safe_dump(given))
    word = f'{CONFIGS}.classmate_model_name_or_path_list=["Qwen/Qwen3-0.6B"]'
    for more in (str(config), word):
        assert main(["recipe", "import", str(script), more, "--out", str(out)]) == 0
        recipe = load_recipe(str(out)).recipe
        assert recipe.futures.name == "classmates" and recipe.models["peer"].model == "local:Qwen/Qwen3-0.6B"
        assert recipe.futures.options["keep"] == [0.3, 0.9] and recipe.futures.samples == 2
        assert recipe.train.advantage.name == "separated" and recipe.futures.options["weight"] == 1
        assert recipe.episode.think == ("<think>", "</think>")
    assert "Its rows are of the task 'gsm8k'" in out.read_text().splitlines()[0]


def test_a_map_of_classmates_is_used_unchanged(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SEPARATED)
    served = {"Qwen/Qwen3-0.6B": {"outward_host": "node7", "port": 8001, "served_model_name": "q", "model_index": 0}}
    (tmp_path / "map.json").write_text(json.dumps(served))
    done = carry(read_all([str(tmp_path / "run.sh"), str(tmp_path / "map.json")], find_script))
    assert done.recipe["futures"]["classmates"] == str(tmp_path / "map.json")
    assert done.recipe["futures"]["name"] == "classmates"


def test_a_reward_model_scores_replies_and_classmates_alike() -> None:
    script = SEPARATED.replace("gsm8k", "general_reward") + (
        " reward_model.llm_judge_model_name=Skywork/S reward_model.llm_judge_backend_type=hf_scoring"
        f" {CONFIGS}.classmate_model_name_or_path_list=['a/b'] reward_model.token_level_main_reward_mode=cot_only"
    )
    done = carried(script.replace("\n ", " "))
    assert done.recipe["reward"]["metrics"] == [{"name": "rm_score", "model": "Skywork/S", "squash": "none"}]
    assert done.recipe["futures"]["metric"] == "rm_score" and done.recipe["credit"] == {"tokens": "thought"}
    assert done.recipe["task"]["behaviour"] == "general-quality"


def test_a_task_that_cannot_be_inferred_is_requested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "a.sh", tmp_path / "a.yaml"
    script.write_text("python -m verl.trainer.main_ppo data.train_files=data/riddles/train.parquet")
    assert main(["recipe", "import", str(script), "--out", str(out)]) == 2
    assert "whose rows are these (data/riddles/train.parquet)?" in capsys.readouterr().err and not out.exists()
    assert main(["recipe", "import", str(script), "task.name=exact-match", "train.lr=1e-5", "--out", str(out)]) == 0
    recipe = load_recipe(str(out)).recipe
    assert recipe.task.name == "exact-match" and recipe.train.lr == 1e-5


def test_settings_with_another_meaning_in_open_instruct_are_named_and_not_carried_over() -> None:
    """A flag means what its own program means by it; a flag without a counterpart is listed with its reason."""
    dpo = "accelerate launch open_instruct/dpo_tune_cache.py"
    mixed = f"{dpo} --mixer_list a/b 100 c/d 50 --beta 5 --loss_type dpo_norm"
    left = {name: why for name, _, why in carried(mixed).left}
    assert (
        "several" in left["--mixer_list"] and "known values: dpo" in left["--loss_type"] and "length" in left["--beta"]
    )
    assert "dpo" not in carried(mixed).recipe["train"]
    made = carried(f"{dpo} --mixer_list a/b 1.0").left[-1][2]
    assert "load_dataset('a/b', split='train').to_parquet('data/dolci/dpo_train.parquet')" in made
    rl = "python open_instruct/grpo_fast.py --dataset_mixer_list ai2-adapt-dev/rlvr_gsm8k_zs 1.0 --beta 0.02"
    more = "--per_device_train_batch_size 8 --num_epochs 4 --code_api_url http://host:1234/test_program --max_turns 3"
    done = carried(f"{rl} {more}")
    left = {name: why for name, _, why in done.left}
    assert "token_budget" in left["--per_device_train_batch_size"] and "known values: 1" in left["--num_epochs"]
    assert left["--max_turns"] == "no counterpart is known"  # CollabLLM's flag of that name means something else
    assert done.recipe["train"]["kl"]["weight"] == 0.02 and done.recipe["train"]["prompts_per_step"] == 16
    assert done.recipe["task"] == {"name": "gsm8k", "file": "ai2-adapt-dev/rlvr_gsm8k_zs"}
    assert done.recipe["sandbox"] == "opencode+http://host:1234"


def test_an_import_that_would_lose_what_changes_learning_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "theirs.sh", tmp_path / "mine.yaml"
    start = "python -m verl.trainer.main_ppo data.train_files=d/gsm8k/train.parquet actor_rollout_ref.actor."
    for word, stops in (
        ("ppo_epochs=4", True),
        ("ppo_epochs=1", False),
        ("grad_clip=$CLIP", True),
        ("ppo_micro_batch_size_per_gpu=4", False),
        ("optim.exotic=1", True),
        ("grad_clip=1 custom_reward_function.path=my_reward.py custom_reward_function.name=f", True),
        ("grad_clip=1 custom_reward_function.path=/opt/verl/recipe/collabllm/reward_function.py", False),
        ("grad_clip=1 +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True", True),
        ("grad_clip=1 reward_model.overlong_buffer.enable=False", False),
    ):
        script.write_text(f"{start}{word} trainer.default_local_dir=$WHERE")
        key = f"actor_rollout_ref.actor.{word}".split()[-2 if "name=" in word else -1].partition("=")[0].lstrip("+")
        assert main(["recipe", "import", str(script), "--out", str(out)]) == (2 if stops else 0), word
        err = capsys.readouterr().err
        assert (f"To continue without them: --drop={key}" in err) == stops
        assert main(["recipe", "import", str(script), "--out", str(out), f"--drop={key}"]) == 0
        capsys.readouterr()


def test_turns_of_the_episode_are_carried_over_without_futures() -> None:
    start = "python -m verl.trainer.main_ppo data.train_files=$HOME/data/gsm8k/train.parquet actor_rollout_ref.rollout"
    done = carried(
        f"{start}.multi_turn.max_assistant_turns=5 actor_rollout_ref.rollout.multi_turn.tool_config_path=$D/gsm8k.yaml"
    )
    assert done.recipe["episode"] == {"max_turns": 5} and done.recipe["task"]["name"] == "gsm8k"
    assert "futures" not in done.recipe
    words = ("multi_turn.max_user_turns=2", "multi_turn.num_repeat_rollouts=3")
    future = carried(" actor_rollout_ref.rollout.".join([f"{start}.multi_turn.max_assistant_turns=3", *words]))
    assert future.recipe["futures"]["rounds"] == 2 and "episode" not in future.recipe


def test_a_multi_turn_config_keeps_its_turns_task_and_sampling(tmp_path: Path) -> None:
    config = tmp_path / "gsm8k.yaml"
    rollout = {"max_turns": 3, "task_type": "gsm8k", "sampling_params": {"temperature": 0.8, "max_tokens": 192}, "n": 2}
    actor = {"kl_loss_coef": 1e-4, "use_kl_loss": True}
    config.write_text(yaml.safe_dump({"actor_rollout_ref": {"rollout": rollout, "actor": actor}}))
    recipe = carry(read_config(str(config))).recipe
    assert recipe["episode"] == {"max_turns": 3, "temperature": 0.8, "max_tokens": 192}
    assert recipe["task"] == {"name": "gsm8k"} and recipe["train"]["kl"] == {"weight": 1e-4}


def test_a_verl_batch_size_counts_all_ranks() -> None:
    sft = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=d/gsm8k/train.parquet"
    for batch in ("64", "${BATCH:-64}"):
        assert carried(f"{sft} data.train_batch_size={batch}").recipe["train"]["prompts_per_step"] == 64


def test_a_judged_behaviour_without_a_judge_requests_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "a.sh", tmp_path / "a.yaml"
    script.write_text("python -m verl.trainer.main_ppo data.train_files=data/sycophancy/train.parquet")
    assert main(["recipe", "import", str(script), "--out", str(out)]) == 2
    assert "scored for sycophancy by a judge, and the files name none" in capsys.readouterr().err
    assert main(["recipe", "import", str(script), "models.judge=http://host:1/v1#j", "--out", str(out)]) == 0


def test_a_monitor_is_on_if_the_fork_has_it_on() -> None:
    start = "python -m verl.trainer.main_ppo data.train_files=d/gsm8k/train.parquet reward_model.do_cot_monitor="
    on = carried(f"{start}True").recipe
    assert on["eval"] == {"monitor": "monitor"} and on["models"] == {"monitor": "openai/gpt-4o-mini"}
    assert "eval" not in carried(f"{start}False").recipe


def test_a_map_of_classmates_overrides_the_list_in_a_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SEPARATED)
    served = {"Qwen/Qwen3-0.6B": {"outward_host": "node7", "port": 8001, "served_model_name": "q", "model_index": 0}}
    (tmp_path / "map.json").write_text(json.dumps(served))
    names = {"classmate_cot_reward_configs": {"classmate_model_name_or_path_list": ["a/b"]}}
    (tmp_path / "olmo.yaml").write_text(yaml.safe_dump({"reward_model": names}))
    for order in (("olmo.yaml", "map.json"), ("map.json", "olmo.yaml")):
        files = [str(tmp_path / name) for name in ("run.sh", *order)]
        assert carry(read_all(files, find_script)).recipe["futures"]["classmates"] == str(tmp_path / "map.json")


INFERENCE = (
    "python src/inference_main_model.py model_args.model_name_or_path=a/b running_args.generation_args.max_tokens=3072 "
    "data_args.dataset_split_name=test data_args.max_predict_samples=1000"
)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("python verl/data_preprocessing/sycophancy.py --seed 1", "--out data/sycophancy"),
        ("python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k", "--out '~/data/gsm8k'"),
        ("python process_dataset.py --dataset a/b --local_dir $HOME/data/x", "--out '~/data/x'"),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve a/b --served-model-name q --port 8003", "upshot serve \\\n"),
        (
            "python -m my_eval.src.analysis_module.different_monitor --monitor_model_name m",
            "run=${1:?give its value}\nupshot eval monitor $run",
        ),
        (
            INFERENCE,
            "    --models model=local:a/b \\\n    --split test \\\n    --goals 1000 \\\n    episode.max_tokens=3072",
        ),
        ("python my_eval/src/analysis_module/visualize_main_figure.py", "upshot view runs"),
    ],
)
def test_scripts_that_train_nothing_have_a_command(
    script: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.sh").write_text(script)
    assert main(["recipe", "import", str(tmp_path / "theirs.sh")]) == 0
    assert line in capsys.readouterr().out


def test_a_loop_variable_becomes_an_argument_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "merge.sh"
    script.write_text(
        "for (( j=0; j<3; j++ )); do\n  step_idx=$((40 * (j + 1)))\n  python -m verl.model_merger merge --backend fsdp "
        "--local_dir out/global_step_${step_idx}/actor --target_dir out/${step_idx}\ndone\n"
    )
    assert main(["recipe", "import", str(script)]) == 0
    text = capsys.readouterr().out
    assert "step_idx=${1:?give its value}\n" in text and '"out/global_step_${step_idx}/actor"' in text


MULTI_TURN = (
    "python3 -m verl.trainer.main_ppo --config-path=$(pwd)/examples/multiturn/config --config-name='gsm8k_turns' "
    "data.train_files=$HOME/data/gsm8k/train.parquet algorithm.adv_estimator=grpo"
)


def test_a_config_that_a_script_names_is_read_if_it_is_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "multiturn"
    (folder / "config").mkdir(parents=True)
    script, config = folder / "run.sh", folder / "config" / "gsm8k_turns.yaml"
    script.write_text(MULTI_TURN)
    turns = {"actor_rollout_ref": {"rollout": {"multi_turn": {"enable": True, "max_assistant_turns": 5}}}}
    config.write_text(yaml.safe_dump({**turns, "data": {"train_batch_size": 8}}))
    for paths in ([str(script)], [str(script), str(config)]):
        done = carry(read_all([*paths, "data.train_batch_size=16"], find_script))
        assert done.recipe["episode"] == {"max_turns": 5} and done.stops == []
        assert done.recipe["train"]["prompts_per_step"] == 16, "what the words set stands"


def test_the_interaction_file_is_read_from_the_path_in_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "recipe" / "collabllm"
    (folder / "config").mkdir(parents=True)
    script, user = folder / "train.sh", folder / "config" / "talk.yaml"
    key = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    names = f'{key}="$PROJECT_DIR/recipe/collabllm/config/talk.yaml" reward_model.reward_kwargs.num_repeat_rollouts=3'
    script.write_text(f'PROJECT_DIR="$(pwd)"\npython3 -m verl.trainer.main_ppo {names}\n')
    without = carry(read_all([str(script)], find_script))
    assert key in without.stops
    user.write_text(yaml.safe_dump({"interaction": [{"name": "collabllm", "config": {"user_model": "gpt-4o"}}]}))
    for paths in ([str(script)], [str(script), str(user)]):
        done = carry(read_all(paths, find_script))
        assert done.recipe["models"]["user"] == "openai/gpt-4o" and done.stops == []


def test_a_config_that_cannot_be_found_stops_the_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(MULTI_TURN)
    assert main(["recipe", "import", str(script)]) == 2
    error = capsys.readouterr().err
    assert "--config-name=gsm8k_turns (its YAML is not beside the script" in error and "--drop=--config-name" in error
    assert main(["recipe", "import", str(script), "--drop=--config-name"]) == 0


def test_the_defaults_in_a_yaml_of_the_fork_lose_nothing() -> None:
    defaults = (
        "algorithm._target_=verl.trainer.config.AlgoConfig algorithm.kl_penalty=kl algorithm.use_pf_ppo=False "
        "algorithm.pf_ppo.weight_pow=2.0 algorithm.rollout_is=False algorithm.rollout_is_threshold=1.2 "
        "actor_rollout_ref.rollout.layered_summon=False reward_model.exp_mode=original"
    )
    start = "python -m verl.trainer.main_ppo data.train_files=d/gsm8k/train.parquet"
    assert carried(f"{start} {defaults}").stops == []
    assert carried(f"{start} algorithm.rollout_is=True").stops == ["algorithm.rollout_is"]


def test_a_script_that_only_starts_another_names_it(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#SBATCH --gpus=1\nmkdir -p out\nbash my_scripts/train.sh\n")
    with pytest.raises(UserError, match=r"launches 'my_scripts/train.sh'; import that script instead"):
        read(str(tmp_path / "job.sh"), find_script)
