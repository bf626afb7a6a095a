"""Selected-index tables: which logical positions each request's drafts attend to."""
