"""Programs that run inside a peer's environment: they import the peer and the standard library, never castline.

``protocol`` is what they speak with a session: a JSON object a line, in and out. ``loops`` runs a job on an engine of
either kind, continuous or static batches.
"""
