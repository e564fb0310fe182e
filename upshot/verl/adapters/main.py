"""The program that runs verl: verl's own entry point, with our trainer registered.

    python -m upshot.verl.adapters.main KEY=VALUE …

verl imports its `external_lib` too late to register a trainer: the class is chosen before any model config is read.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
import ray
from ray.exceptions import RayError
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device

from upshot.core.errors import UserError
from upshot.verl.adapters.oversight import OverseenRunner, reason
from upshot.verl.adapters.ray_start import be_patient
from upshot.verl.process import REASON


class ClusterRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's runner, in its own Ray process, which knows our trainer."""

    def run(self, config: Any) -> None:
        """Train to the end."""
        from upshot.verl.adapters import trainer  # noqa: F401  registers it in this process

        super().run(config)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)  # type: ignore[untyped-decorator]
def main(config: Any) -> None:
    """Run verl; an error that the user can fix is one line, with exit code 2."""
    be_patient()
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        run_ppo(config, task_runner_class=OverseenRunner(ray.remote(ClusterRunner)))
    except (UserError, RayError) as error:
        message, code = reason(error)
        print(f"{REASON}{' '.join(message.split())}", flush=True)  # one line, whatever Ray's words are
        sys.exit(code)


if __name__ == "__main__":
    main()
