"""The commands of `castline`, one module each, imported when called."""
