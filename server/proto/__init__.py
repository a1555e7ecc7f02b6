"""castline.v1 protocol and its generated stubs."""
