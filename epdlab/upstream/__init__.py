"""Runs of SGLang's own encoder and receiver code, release by release, against the real Mooncake TCP engine.

`python -m epdlab.upstream` fetches the wheels, makes a virtual environment of their own, plays `scenarios.SCENARIOS` and
writes `results/upstream_*.json`. `stage`, `recorder`, `payload`, `encoder_proc` and `receiver_proc` run inside that
environment (started through `inside.py`); everything else runs here and never unpickles what a release sends.
"""
