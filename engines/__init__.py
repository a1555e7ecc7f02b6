"""Everything about an engine at rest: manifest, bundle, host, capacity."""
