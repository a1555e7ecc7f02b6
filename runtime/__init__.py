"""Bundle to text: scheduler, batch, executor, sampler, detokenizer."""
