"""What a trace tells: the invariants it keeps or breaks, the state at any point, and its drawings.

Everything here reads lists of `steps.Event` and nothing else, so a real run, a replayed one and a modelled one are
judged and drawn by the same code. The core never imports this folder.
"""
