"""The policy on vLLM (`model.engine: vllm`): a server of the run's own, whose weights follow the learner's.

`launch.py` starts it, `door.py` is its routes beyond sampling, `parcel.py` carries weights, `policy.py` is the model
that the rollouts ask. `inside/` runs in vLLM's own processes.
"""
