"""``python -m castline`` is the `castline` command."""

from castline.cli import main

main()
