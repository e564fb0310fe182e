"""The policy on vLLM (`model.engine: vllm`): a server of the run's own, whose weights follow the learner's.

`launch.py` knows where it is (`run/policy_server.py` starts it), `client.py` is its routes beyond sampling,
`weights.py` packs weights, `policy.py` is the model that the rollouts ask. `inside/` runs in vLLM's own processes.
"""
