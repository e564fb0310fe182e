"""The policy on vLLM (`model.engine: vllm`): a server of the run's own, whose weights follow the learner's.

`launch.py` knows where it is and its routes beyond sampling (`run/policy_server.py` starts it), `weights.py` packs
weights, `policy.py` is the model that the rollouts ask. `inside/` runs in vLLM's own processes.
"""
