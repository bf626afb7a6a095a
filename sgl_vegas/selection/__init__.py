"""Which KV entries drafts attend to: the policies and what they are built from."""
