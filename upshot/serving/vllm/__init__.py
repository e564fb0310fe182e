"""The policy on vLLM (`model.engine: vllm`): the run's own server, whose weights follow the learner's.

`launch.py` knows its address and its routes beyond sampling (`run/policy_server.py` starts it), `weights.py` packs
weights, `policy.py` is the model that rollouts call. `inside/` runs in vLLM's own processes.
"""
