"""Our estimators behind verl's: `algorithm.adv_estimator=upshot` does what `train.advantage` of the recipe says."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from upshot.cluster.adapters.loop import recipe_here
from upshot.cluster.estimate import advantages


@register_adv_est("upshot")  # type: ignore[untyped-decorator]
def estimate(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of every token."""
    recipe = recipe_here()
    found = advantages(
        token_level_rewards.tolist(),
        response_mask.tolist(),
        [str(uid) for uid in index],
        recipe.train.advantage,
        by_turns=recipe.credit.by == "turns",
    )
    out = torch.tensor(found, dtype=token_level_rewards.dtype, device=token_level_rewards.device)
    return out, out
