"""castline against what a user would run instead: ``python -m benchmarks`` from the source tree.

===============  ==========================================================================
settings         the options of one run
workloads        what is asked of every system: W1 … W8 and castline's own extras, as plain data
prompts          prompts of an exact length, in token ids, from a seed
figures          what a system did → the figures of a workload
environments     an environment for each peer, installed from the package index, kept between runs
model            the given weights in the forms that peers are converted from; the reference's logits
quality          a system's logits against the reference's
systems          castline and each peer: install, convert, start, settings
drivers          programs that run inside a peer's environment, where it has no server
sessions         a started system: run a job, suspend, resume, weigh, stop
doors            castline's session: HTTP or gRPC, and the processor time of its two processes
grpc_client      the load over gRPC, in a process of its own
processes        process groups: signals, memory, processor time
machine          what the figures were measured on, and whether it was quiet
bandwidth        measured memory read bandwidth, and what of it a decode step uses
comparison       medians, spreads, ratios, the best peer, the targets
results          the JSON document of a run
runner           rounds, interleaved between the systems
document         docs/performance.md
headline         of the document: castline against the best peer, and alone
wording          of the document: tables, figures, labels with their quality
picture          docs/performance.png
===============  ==========================================================================
"""
