"""Load generator for any OpenAI-compatible server: what `castline bench` runs.

===============  ==========================================================================
settings         the options of one run, and the points of its sweep
prompts          synthetic prompts, calibrated in the server's own tokens
dataset          prompts from a JSONL file
workload         the endless stream of requests of one point
schedule         arrival times of an open loop
loops            closed loop and open loop
connection       HTTP/1.1 over asyncio and llhttp
sse              the event-stream parser
protocol         the OpenAI bodies, in and out
client           one streaming request, timed
preflight        model, calibration and refused fields, before anything is measured
monitor          what the client itself cost
stats, slo       records to figures
results          the JSON document
sweep            all points, one after the other
table, plot      figures for people
===============  ==========================================================================
"""
