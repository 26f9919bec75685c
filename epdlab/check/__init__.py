"""Finding what breaks: an executable model of the engine, the explorer of all orders, schedules and the ablation table.

The sender and the receiver run here unchanged, over a model engine, in-memory links and virtual time. The core never
imports this folder.
"""
