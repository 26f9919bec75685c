"""Runs of SGLang's own encoder and receiver code, release by release, against the real Mooncake TCP engine.

`python -m epdlab.upstream` fetches the wheels, makes a virtual environment of their own, plays `scenarios.SCENARIOS`
and writes `results/upstream_*.json`. `nursery`, `stage`, `recorder`, `payload`, `encoder_proc` and `receiver_proc` run
inside that environment (started through `inside.py`); everything else runs here and never decodes what a release sends.

Fields of one scenario in the results:
    calls: of the encoder, for the first request, in the order in which they returned: op, rank (whose /send it is; null
        in timers and background tasks), region (`emb#1`, or `other#1` for the other owner), bytes, rc (the engine's raw
        code). `encode` is the vision forward, `ack` the PUSH to the rank, `pop` the request letting its embedding go.
    distinct_orders: how many different orders of calls the repetitions gave; 1 means that `calls` is the order.
    counts: raw codes of every request together. statuses: what /send answered.
    metadata_before_forward: requests of which a rank had the metadata before the vision forward ran.
    outcome: ranks with right bytes and an ack, with an ack and wrong bytes, without an ack; HTTP errors; writes without
        a live source region throughout; regions and embeddings left right after the last step, and `settled`: after the
        timer. Of receivers also: landing buffers overwritten after the reader had them, regions and pool slots left.
    landing_calls, states, wire: of receivers: their engine calls, what became of each request, what was on the wire.
"""
