"""Load generator for any OpenAI-compatible server."""
